"""CIFAR-10 and CIFAR-100 as they are found: Python batches, binary batches, archives of either, parquet.

The formats: https://www.cs.toronto.edu/~kriz/cifar.html. Python batches are pickles, and a pickle can run any
code it likes; ours are read by an unpickler that knows nothing but lists, dictionaries, text and a plain
array of bytes.
"""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.array_set import ArraySet
from paceline.data.cache import decoded
from paceline.data.download import directory_of
from paceline.data.sources import checked_labels, import_extra, no_options
from paceline.errors import DataError
from paceline.spec import DataSpec

_IMAGE_BYTES = 3 * 32 * 32
_Split = tuple[NDArray[np.uint8], NDArray[np.int64]]


@dataclass(frozen=True)
class _Batches:
    """One of the two published forms: its folder, its archive, and the files of each split."""

    folder: str
    archive: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    parse: Callable[[_Cifar, bytes, str], _Split]


@dataclass(frozen=True)
class _Cifar:
    """What tells the two data sets apart."""

    num_classes: int
    label_key: bytes
    """In a Python batch; the parquet column is its singular, or "label"."""
    labels_per_record: int
    """Bytes before each image of a binary batch; the last of them is the class."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    batches: tuple[_Batches, ...]


def load_cifar10(spec: DataSpec) -> tuple[ArraySet, ArraySet]:
    """Ten classes, 50,000 and 10,000 images 3 x 32 x 32."""
    return _load(spec, _CIFAR10)


def load_cifar100(spec: DataSpec) -> tuple[ArraySet, ArraySet]:
    """A hundred (fine) classes, 50,000 and 10,000 images 3 x 32 x 32."""
    return _load(spec, _CIFAR100)


def _load(spec: DataSpec, kind: _Cifar) -> tuple[ArraySet, ArraySet]:
    no_options(spec)
    sources, decode = _find(directory_of(spec), kind, spec.name)

    def named() -> Mapping[str, NDArray[Any]]:
        train, test = decode()
        return {"train_inputs": train[0], "train_targets": train[1], "test_inputs": test[0], "test_targets": test[1]}

    arrays = decoded(spec.name, sources, named)
    train, test = (
        ArraySet(arrays[f"{split}_inputs"], arrays[f"{split}_targets"], kind.num_classes, kind.mean, kind.std)
        for split in ("train", "test")
    )
    return train, test


def _find(directory: Path, kind: _Cifar, name: str) -> tuple[list[Path], Callable[[], tuple[_Split, _Split]]]:
    """The files of the first complete form in `directory`, and the function that decodes them."""
    for form in kind.batches:
        for folder in (directory, directory / form.folder):
            paths = [folder / file for file in form.train + form.test]
            if all(path.is_file() for path in paths):
                return paths, partial(_decode_batches, kind, form, partial(_read_files, paths))
    train, test = _parquet_files(directory, "train"), _parquet_files(directory, "test")
    if train and test:
        return train + test, partial(_decode_parquet, kind, train, test)
    for form in kind.batches:
        archive = directory / form.archive
        if archive.is_file():
            return [archive], partial(_decode_batches, kind, form, partial(_read_archive, archive, form))
    wanted = "; or ".join(f"{', '.join(form.train + form.test)} (or {form.archive})" for form in kind.batches)
    raise DataError(
        f"{directory} has no complete {name}: expected {wanted}; or train*.parquet and test*.parquet; point "
        "data.dir to the directory that has them."
    )


def _joined(parts: Iterable[_Split]) -> _Split:
    images, labels = zip(*parts, strict=True)
    return np.concatenate(images), np.concatenate(labels)


# --- batches, Python and binary ---


def _decode_batches(
    kind: _Cifar, form: _Batches, read: Callable[[], Mapping[str, tuple[str, bytes]]]
) -> tuple[_Split, _Split]:
    """`read` gives for a file's name the place that errors name and its content."""
    files = read()

    def split(names: Sequence[str]) -> _Split:
        return _joined(form.parse(kind, files[name][1], files[name][0]) for name in names)

    return split(form.train), split(form.test)


def _read_files(paths: Sequence[Path]) -> dict[str, tuple[str, bytes]]:
    try:
        return {path.name: (str(path), path.read_bytes()) for path in paths}
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read ({error.strerror}).") from None


def _read_archive(archive: Path, form: _Batches) -> dict[str, tuple[str, bytes]]:
    wanted = form.train + form.test
    files: dict[str, tuple[str, bytes]] = {}
    try:
        with open(archive, "rb") as file, tarfile.open(fileobj=file, mode="r:gz") as tar:
            for member in tar:
                name = Path(member.name).name
                content = tar.extractfile(member) if name in wanted and member.isfile() else None
                if content is not None:
                    files[name] = (f"{name} in {archive}", content.read())
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{archive} is not a complete tar.gz file ({error}); download the file again.") from None
    except OSError as error:
        raise DataError(f"{archive} cannot be read ({error.strerror or error}).") from None
    missing = [name for name in wanted if name not in files]
    if missing:
        raise DataError(f"{archive} does not contain {', '.join(missing)}; download the file again.")
    return files


def _parse_binary(kind: _Cifar, raw: bytes, where: str) -> _Split:
    record_bytes = kind.labels_per_record + _IMAGE_BYTES
    if not raw or len(raw) % record_bytes:
        raise DataError(
            f"{where} is truncated or damaged: its {len(raw)} bytes are not a whole number of records of "
            f"{record_bytes}; download the file again."
        )
    records = np.frombuffer(raw, np.uint8).reshape(-1, record_bytes)
    images = records[:, kind.labels_per_record :].reshape(-1, 3, 32, 32)
    return images, checked_labels(records[:, kind.labels_per_record - 1], len(images), kind.num_classes, where)


def _parse_pickle(kind: _Cifar, raw: bytes, where: str) -> _Split:
    try:
        batch = _ArraysOnly(io.BytesIO(raw), encoding="bytes").load()
        data, labels = _lookup(batch, b"data"), _lookup(batch, kind.label_key)
        images = data.pixels().reshape(-1, 3, 32, 32)
        numbers = np.asarray(labels, np.int64).reshape(-1)
    except pickle.UnpicklingError as error:
        raise DataError(f"{where} is not a CIFAR batch: {error}; download the file again.") from None
    except Exception as error:  # damaged bytes can make a pickle fail in any way at all
        raise DataError(
            f"{where} is truncated or damaged ({type(error).__name__}: {error}); download it again."
        ) from None
    return images, checked_labels(numbers, len(images), kind.num_classes, where)


def _lookup(batch: Any, key: bytes) -> Any:
    """Python 2 wrote byte keys, Python 3 writes text."""
    found = batch.get(key, batch.get(key.decode()))
    if found is None:
        raise pickle.UnpicklingError(f"it has no {key.decode()!r}")
    return found


class _PickledDtype:
    def __init__(self, code: Any = None, *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        """Byte order and alignment, which single bytes do not have."""


class _PickledArray:
    """Takes the state that a NumPy array was pickled with, without making a NumPy array of it."""

    def __init__(self, *_: Any) -> None:
        self._state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._state = state

    def pixels(self) -> NDArray[np.uint8]:
        _, shape, dtype, is_fortran, data = self._state
        if dtype.code not in (b"u1", "u1") or is_fortran or len(shape) != 2 or shape[1] != _IMAGE_BYTES:
            raise pickle.UnpicklingError(f"its data is not bytes in rows of {_IMAGE_BYTES}")
        return np.frombuffer(data, np.uint8).reshape(shape)


def _from_buffer(data: Any, dtype: _PickledDtype, shape: Any, order: str) -> _PickledArray:
    """How protocol 5 spells an array."""
    array = _PickledArray()
    array.__setstate__((1, shape, dtype, order == "F", data))
    return array


class _ArraysOnly(pickle.Unpickler):
    """Knows the names that a pickled array of bytes mentions, and stands in for each of them."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return _PickledArray
        if module in ("numpy.core.numeric", "numpy._core.numeric") and name == "_frombuffer":
            return _from_buffer
        if module == "numpy" and name in ("ndarray", "dtype"):
            return _PickledArray if name == "ndarray" else _PickledDtype
        if (module, name) == ("_codecs", "encode"):  # how old protocols spell bytes
            return lambda text, _: text.encode("latin1")
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR batch contains")


# --- parquet ---


def _parquet_files(directory: Path, split: str) -> list[Path]:
    """The Parquet files of a split: in the directory itself, or in a folder of it as data set hubs lay them out."""
    for pattern in (f"{split}*.parquet", f"*/{split}*.parquet"):
        files = sorted(directory.glob(pattern))
        if files:
            return files
    return []


def _decode_parquet(kind: _Cifar, train: Sequence[Path], test: Sequence[Path]) -> tuple[_Split, _Split]:
    import_extra("PIL.Image", "parquet", "Reading images from parquet files")
    import_extra("pyarrow.parquet", "parquet", "Reading parquet files")
    return (
        _joined(_read_parquet_file(kind, file) for file in train),
        _joined(_read_parquet_file(kind, file) for file in test),
    )


def _read_parquet_file(kind: _Cifar, path: Path) -> _Split:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path} is not a complete parquet file ({reason}); download the file again.") from None
    image_column = _column(table.column_names, ("img", "image"), path)
    wanted = ("fine_label",) if kind.num_classes == 100 else ("label",)
    label_column = _column(table.column_names, wanted, path)
    image_type = table.schema.field(image_column).type
    if not (pyarrow.types.is_struct(image_type) and image_type.get_field_index("bytes") >= 0):
        raise DataError(f"{path} has no encoded images in its column {image_column!r} but {image_type}.")
    images = np.empty((table.num_rows, 3, 32, 32), np.uint8)
    for row, pixels in enumerate(_decoded_images(table.column(image_column), path)):
        images[row] = pixels
    labels = np.asarray(table.column(label_column).to_numpy(), np.int64)
    return images, checked_labels(labels, len(images), kind.num_classes, str(path))


def _column(names: Sequence[str], wanted: Sequence[str], path: Path) -> str:
    for name in wanted:
        if name in names:
            return name
    raise DataError(f"{path} has no column {' or '.join(map(repr, wanted))}; it has {', '.join(names)}.")


def _decoded_images(column: Any, path: Path) -> Iterator[NDArray[np.uint8]]:
    from PIL import Image

    row = 0
    for chunk in column.chunks:
        for encoded in chunk.field("bytes").to_pylist():
            try:
                with Image.open(io.BytesIO(encoded)) as image:
                    pixels = np.asarray(image.convert("RGB"))
            except (OSError, TypeError, ValueError, SyntaxError) as error:
                raise DataError(
                    f"{path} has no readable image in row {row} ({error}); download the file again."
                ) from None
            if pixels.shape != (32, 32, 3):
                raise DataError(
                    f"{path} has an image of {pixels.shape[1]} x {pixels.shape[0]} in row {row}, not 32 x 32."
                )
            yield pixels.transpose(2, 0, 1)
            row += 1


_CIFAR10 = _Cifar(
    num_classes=10,
    label_key=b"labels",
    labels_per_record=1,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    batches=(
        _Batches(
            folder="cifar-10-batches-py",
            archive="cifar-10-python.tar.gz",
            train=tuple(f"data_batch_{i}" for i in range(1, 6)),
            test=("test_batch",),
            parse=_parse_pickle,
        ),
        _Batches(
            folder="cifar-10-batches-bin",
            archive="cifar-10-binary.tar.gz",
            train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
            test=("test_batch.bin",),
            parse=_parse_binary,
        ),
    ),
)

_CIFAR100 = _Cifar(
    num_classes=100,
    label_key=b"fine_labels",
    labels_per_record=2,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    batches=(
        _Batches(
            folder="cifar-100-python",
            archive="cifar-100-python.tar.gz",
            train=("train",),
            test=("test",),
            parse=_parse_pickle,
        ),
        _Batches(
            folder="cifar-100-binary",
            archive="cifar-100-binary.tar.gz",
            train=("train.bin",),
            test=("test.bin",),
            parse=_parse_binary,
        ),
    ),
)
