"""The named data sets, and those of an import path. Named are handwritten digits inside the package, published sets of
small images, a folder of images and a text file.

Published sets are idx files or parquet files in `data.dir`, else from the Hugging Face hub. The idx format:
http://yann.lecun.com/exdb/mnist/ (big-endian magic number, sizes, then bytes). A parquet file has a column of encoded
images, as the hub's have; its images are decoded once, into a .npy file beside it.

The digits are the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (1998), UCI
Machine Learning Repository, https://doi.org/10.24432/C50P49, licensed CC BY 4.0. `digits.npz` holds the 8 x 8 images
(0 … 16, the count of dark pixels in a 4 x 4 block of the scan) and labels in their original order, unchanged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import importlib
import inspect
import io
import itertools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Subset

from paceline.data.arrays import ArraySet
from paceline.data.folder import FolderImages
from paceline.data.loading import MapDataset, set_size
from paceline.errors import DataError, did_you_mean, file_problems, reason_of
from paceline.files import write_file
from paceline.import_path import import_by_path
from paceline.spec import DataSpec
from paceline.spec.codec import PositiveInt, from_mapping

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})


@dataclass(frozen=True)
class NoOptions:
    """The options of a data set that takes none."""


def folder_of(spec: DataSpec) -> Path:
    """The user's folder `data.dir`. Raises `DataError` where there is none."""
    if spec.dir is None or not Path(spec.dir).expanduser().is_dir():
        raise DataError(f"data.dir = {spec.dir!r} is not a directory; give the one with the files of {spec.name}.")
    return Path(spec.dir).expanduser()


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """The module, or a DataError that says which extra of ours brings it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise DataError(f"{purpose} needs {package}; install it with: pip install 'paceline[{extra}]'") from None


def load_digits(spec: DataSpec) -> tuple[ArraySet, ArraySet]:
    """Images 1 x 28 x 28, the size that nets for MNIST take; every fifth image is for testing."""
    from_mapping(NoOptions, spec.options, "data.options")
    with resources.as_file(resources.files("paceline.data") / "digits.npz") as path, np.load(path) as file:
        small, labels = file["images"], file["labels"].astype(np.int64)
    # (n, 8, 8) in 0 … 16 to (n, 1, 28, 28) in 0 … 255: each pixel becomes 3 x 3, with a border of 2.
    pixels = np.rint(small.astype(np.float32) * (255 / 16)).astype(np.uint8)
    images = np.pad(pixels.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2)))[:, None]
    test = np.arange(len(images)) % 5 == 4
    train, held_out = (ArraySet(images[part], labels[part], 10, (0.2247,), (0.3497,)) for part in (~test, test))
    return train, held_out


@dataclass(frozen=True)
class Published:
    """What is known of a published set."""

    repository: str
    """Its name on the Hugging Face hub."""
    columns: tuple[str, str]
    """The names of the columns of images and of labels, in parquet files and on the hub."""
    num_classes: int
    shape: tuple[int, int, int]
    """(C, H, W) of an image."""
    mean: tuple[float, ...]
    std: tuple[float, ...]


def published(about: str, known: Published) -> Callable[[DataSpec], tuple[ArraySet, ArraySet]]:
    """What loads the training and the test set of a published set, with `about` as its docstring.

    It raises `DataError` for files missing or damaged, or a package that reads them is not installed; names the file.
    """

    def load(spec: DataSpec) -> tuple[ArraySet, ArraySet]:
        from_mapping(NoOptions, spec.options, "data.options")
        train = _split(spec, known, "train", "train", spec.train_limit)
        return train, _split(spec, known, "test", "t10k", spec.test_limit)

    load.__doc__ = about
    return load


def _split(spec: DataSpec, known: Published, split: str, idx_name: str, limit: int | None) -> ArraySet:
    folder = None if spec.dir is None else folder_of(spec)
    where: object = known.repository
    if folder is None:
        purpose = f"Without data.dir, {spec.name} comes from the Hugging Face hub, which"
        with file_problems(f"{spec.name} cannot be read from the Hugging Face hub", DataError, "give a data.dir"):
            rows = import_extra("datasets", "hub", purpose).load_dataset(known.repository, split=split)
        rows = rows.select(range(min(limit or len(rows), len(rows))))
        images, labels = (rows.with_format("arrow")[:].column(name) for name in known.columns)
        images, labels = _decoded(images, known, where), labels.to_numpy()
    elif len(idx_files := sorted(folder.glob(f"{idx_name}-*idx?-ubyte*"))) > 1:  # images, labels
        where = idx_files[-1]
        images, labels = read_idx(idx_files[0], 3)[:, None], read_idx(idx_files[-1], 1)
    elif files := sorted(folder.glob(f"{split}*.parquet")) or sorted(folder.glob(f"*/{split}*.parquet")):
        where = files[0]
        parts = [read_parquet(file, known) for file in files]
        images, labels = (part[0] if len(part) == 1 else np.concatenate(part) for part in zip(*parts, strict=True))
    else:
        raise DataError(
            f"{folder} has neither {split}*.parquet nor both {idx_name}-images-idx3-ubyte and "
            f"{idx_name}-labels-idx1-ubyte (or .gz); point data.dir to the folder that has them."
        )
    labels = labels.astype(np.int64)
    if len(labels) != len(images) or not len(labels) or labels.min() < 0 or labels.max() >= known.num_classes:
        raise DataError(
            f"{where} has {len(labels)} labels for {len(images)} images, from {labels.min(initial=0)} to "
            f"{labels.max(initial=0)}, where classes are 0 … {known.num_classes - 1}: it is damaged or another set's."
        )
    return ArraySet(images, labels, known.num_classes, known.mean, known.std)


def read_idx(path: Path, num_dims: int) -> NDArray[np.uint8]:
    """The bytes of an idx file of `num_dims` dimensions in its own shape. Raises `DataError`, which names the file."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as problem:
        raise DataError(f"{path} cannot be read ({problem}); get the file again.") from None
    # Magic number: two zeros, 8 for unsigned bytes, the number of dimensions.
    shape = np.frombuffer(raw[4 : 4 + 4 * num_dims].ljust(4 * num_dims, b"\0"), ">u4")
    if raw[:4] != bytes((0, 0, 8, num_dims)) or len(raw) - 4 - 4 * num_dims != math.prod(shape.tolist()):
        raise DataError(f"{path} is no whole idx file of bytes in {num_dims} dimensions; get the file again.")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * num_dims).reshape(shape)


def read_parquet(path: Path, known: Published) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """The images (n, C, H, W) and labels (n,) of a parquet file. Raises `DataError`, which names the file.

    Decoded images are kept in a file beside it, where that can be written: CIFAR-10's take 9 s, which every worker of
    every run would spend.
    """
    pyarrow = import_extra("pyarrow", "parquet", "Reading parquet files")
    parquet = import_extra("pyarrow.parquet", "parquet", "Reading parquet files")
    try:
        state, file = path.stat(), parquet.ParquetFile(path)
        if not set(known.columns) <= set(names := file.schema_arrow.names):
            raise DataError(f"{path} needs the columns {' and '.join(known.columns)}; it has {', '.join(names)}.")
        labels = file.read([known.columns[1]]).column(0).to_numpy()
        decoded = path.with_name(f".{path.stem}-{state.st_size}-{state.st_mtime_ns}.npy")
        with contextlib.suppress(OSError, ValueError, EOFError):  # there is none yet, or it is damaged
            return np.load(decoded, mmap_mode="r"), labels
        column = file.read([known.columns[0]]).column(0)
    except (pyarrow.ArrowException, OSError) as problem:
        raise DataError(f"{path} is not a whole parquet file ({str(problem).splitlines()[0]}); get it again.") from None
    images, content = _decoded(column, known, path), io.BytesIO()
    np.save(content, images)
    with contextlib.suppress(OSError):  # the folder cannot be written to
        write_file(decoded, [content.getbuffer()])
    return images, labels


def _decoded(column: Any, known: Published, where: object) -> NDArray[np.uint8]:
    """A column of encoded images as bytes (n, C, H, W). Raises `DataError`, which names `where` and the row."""
    image_module = import_extra("PIL.Image", "parquet", "Reading images from parquet files")
    channels, height, width = known.shape
    images = np.empty((len(column), height, width, channels), np.uint8)
    for row, content in enumerate(column.combine_chunks().field("bytes")):
        try:
            with image_module.open(io.BytesIO(content.as_py())) as image:
                images[row] = np.asarray(image.convert("RGB" if channels == 3 else "L")).reshape(images.shape[1:])
        except (OSError, TypeError, ValueError, SyntaxError) as problem:
            raise DataError(f"{where} has no image of {width} x {height} in row {row} ({problem}).") from None
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))


@dataclass(frozen=True)
class TextOptions:
    file: str
    """A path, relative to data.dir if that is given."""
    context: PositiveInt = 128
    """Tokens in a sample."""


def load_text(spec: DataSpec) -> tuple[ArraySet, ArraySet]:
    """Consecutive samples of `context` bytes, the target of each byte being the next; the last tenth is for testing.

    The arrays are views of the mapped file: no copy, a byte a token. Raises `DataError` where it cannot be read, or is
    too short for one sample of either split.
    """
    options = from_mapping(TextOptions, spec.options, "data.options")
    path, context = Path(spec.dir or ".").expanduser() / Path(options.file).expanduser(), options.context
    try:
        tokens = np.memmap(path, np.uint8, mode="r")
    except (OSError, ValueError) as problem:
        raise DataError(f"data.options.file: {path} cannot be read ({reason_of(problem)}); name a text file.") from None
    cut = len(tokens) * 9 // 10
    if len(tokens) - cut <= context:
        raise DataError(
            f"{path} has {len(tokens)} bytes; data.options.context = {context} needs at least {10 * context + 1}, "
            "since the last tenth is for testing."
        )

    def windows(part: NDArray[Any]) -> ArraySet:
        end = (len(part) - 1) // context * context
        return ArraySet(part[:end].reshape(-1, context), part[1 : end + 1].reshape(-1, context), num_classes=256)

    return windows(tokens[:cut]), windows(tokens[cut:])


@dataclass(frozen=True)
class FolderOptions:
    image_size: PositiveInt = 224
    """Pixels a side of the square that every image becomes."""


def load_folder(spec: DataSpec) -> tuple[FolderImages, FolderImages]:
    """`data.dir` with train/ and val/ (or test/) of class folders; or class folders alone, of which a tenth is test.

    Raises `DataError` where the directory lacks that shape, or the two parts have different classes."""
    size = from_mapping(FolderOptions, spec.options, "data.options").image_size
    import_extra("PIL.Image", "images", "Reading a folder of images")
    root = folder_of(spec)
    if (root / "train").is_dir():
        held_out = root / ("val" if (root / "val").is_dir() else "test")
        if not held_out.is_dir():
            raise DataError(f"{root} has train/ but neither val/ nor test/; add one, or give class folders alone.")
        train, test = _files(root / "train"), _files(held_out)
        if odd := sorted(set(train) ^ set(test)):
            raise DataError(f"The class {odd[0]!r} is in only one of train/ and {held_out.name}/ of {root}.")
    else:
        train, test = _files(root), {}
        for name, files in train.items():
            test[name] = [file for file in files if _is_test(file)]
            train[name] = [file for file in files if not _is_test(file)]
        if not any(train.values()) or not any(test.values()):
            raise DataError(f"{root} has too few images to set a tenth apart; split them into train/ and val/.")
    return _images(train, size), _images(test, size)


def _files(folder: Path) -> dict[str, list[Path]]:
    """Class name -> its image files at any depth, both in sorted order. Raises `DataError` where there are none."""
    found = {}
    for one in sorted(path for path in folder.glob("[!.]*") if path.is_dir()):
        found[one.name] = sorted(path for path in one.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
        if not found[one.name]:
            raise DataError(f"{one} has no images ({', '.join(sorted(IMAGE_SUFFIXES))}); add some.")
    if not found:
        raise DataError(f"{folder} has no subfolders; expected one for each class, with its images.")
    return found


def _is_test(file: Path) -> bool:
    """One file in ten, by a hash of its name: a file stays in the same split when other files are added or removed."""
    digest = hashlib.sha256(f"{file.parent.name}/{file.name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 10 == 0


def _images(files: dict[str, list[Path]], image_size: int) -> FolderImages:
    labels = [label for label, name in enumerate(files) for _ in files[name]]
    return FolderImages([*itertools.chain(*files.values())], labels, tuple(files), image_size)


SOURCES: dict[str, Callable[[DataSpec], tuple[MapDataset, MapDataset]]] = {
    "digits": load_digits,
    "mnist": published(
        "Handwritten digits, 60,000 and 10,000 images 1 x 28 x 28.",
        Published("ylecun/mnist", ("image", "label"), 10, (1, 28, 28), (0.1307,), (0.3081,)),
    ),
    "fashion-mnist": published(
        "Zalando's articles of clothing, 60,000 and 10,000 images 1 x 28 x 28.",
        Published("zalando-datasets/fashion_mnist", ("image", "label"), 10, (1, 28, 28), (0.2860,), (0.3530,)),
    ),
    "cifar10": published(
        "Ten classes, 50,000 and 10,000 images 3 x 32 x 32.",
        Published(
            "uoft-cs/cifar10", ("img", "label"), 10, (3, 32, 32), (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
        ),
    ),
    "cifar100": published(
        "A hundred (fine) classes, 50,000 and 10,000 images 3 x 32 x 32.",
        Published(
            "uoft-cs/cifar100",
            ("img", "fine_label"),
            100,
            (3, 32, 32),
            (0.5071, 0.4865, 0.4409),
            (0.2673, 0.2564, 0.2762),
        ),
    ),
    "folder": load_folder,
    "text": load_text,
}


def load(spec: DataSpec | str) -> tuple[MapDataset, MapDataset]:
    """The training and the test set that `spec` describes, limits and augmentation applied.

    Args:
        spec: or just a name: "digits", or "package.module:build".

    Raises:
        DataError: no such data set, files missing or damaged, an optional package missing.
        JobError: options that the data set does not take.
    """
    spec = DataSpec(spec) if isinstance(spec, str) else spec
    train, test = source(spec.name)(spec)
    train, test = _limited(train, spec.train_limit), _limited(test, spec.test_limit)
    if not spec.augment:
        return train, test
    if isinstance(train, FolderImages) or (isinstance(train, ArraySet) and train.mean is not None):
        return dataclasses.replace(train, augment=spec), test
    raise DataError(
        f"data.augment = {list(spec.augment)} cannot be applied to {spec.name!r}, which does not give raw images; "
        "leave it empty and augment inside the data set."
    )


def source(name: str) -> Callable[[DataSpec], tuple[MapDataset, MapDataset]]:
    """The function that loads the data set of a name or an import path. Raises `DataError` if there is none."""
    if ":" in name:
        return _from_import_path
    if name in SOURCES:
        return SOURCES[name]
    raise DataError(
        f"There is no data set {name!r}: {did_you_mean(name, SOURCES)}The names are {', '.join(SOURCES)}; your own is "
        "given by its import path, 'package.module:build'."
    )


def _limited(dataset: MapDataset, limit: int | None) -> MapDataset:
    if limit is None or limit >= len(dataset):
        return dataset
    if isinstance(dataset, ArraySet):
        return dataclasses.replace(dataset, inputs=dataset.inputs[:limit], targets=dataset.targets[:limit])
    if isinstance(dataset, FolderImages):
        return dataclasses.replace(dataset, files=dataset.files[:limit], labels=dataset.labels[:limit])
    return Subset(cast(Any, dataset), range(limit))  # torch asks for its own base class and uses none of it


def _from_import_path(spec: DataSpec) -> tuple[MapDataset, MapDataset]:
    build = import_by_path(spec.name, "data.name", DataError)
    if "split" in inspect.signature(build).parameters:
        pair: Any = build("train", **spec.options), build("test", **spec.options)
    else:
        pair = build(**spec.options)
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise DataError(
            f"{spec.name} returned {type(pair).__name__}; it should take an argument 'split' and return one "
            "data set, or take none and return two, (train, test)."
        )
    for dataset in pair:
        set_size(dataset, f"The data set that {spec.name} returned")
    return pair[0], pair[1]
