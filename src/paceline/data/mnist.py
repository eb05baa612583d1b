"""MNIST, and Fashion-MNIST in its format: idx files, gzipped or not, under their published names.

The format: http://yann.lecun.com/exdb/mnist/ (big-endian magic number, sizes, then bytes).
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.array_set import ArraySet
from paceline.data.cache import decoded
from paceline.data.download import directory_of
from paceline.data.sources import checked_labels, no_options
from paceline.errors import DataError
from paceline.spec import DataSpec
from paceline.words import number_of

_STEMS = {"train": "train", "test": "t10k"}
_NUM_CLASSES = 10


def load_mnist(spec: DataSpec) -> tuple[ArraySet, ArraySet]:
    """Handwritten digits, 60,000 and 10,000 images 1 x 28 x 28."""
    return _load(spec, mean=0.1307, std=0.3081)


def load_fashion_mnist(spec: DataSpec) -> tuple[ArraySet, ArraySet]:
    """Zalando's articles of clothing, 60,000 and 10,000 images 1 x 28 x 28."""
    return _load(spec, mean=0.2860, std=0.3530)


def _load(spec: DataSpec, mean: float, std: float) -> tuple[ArraySet, ArraySet]:
    no_options(spec)
    files = _find(directory_of(spec), spec.name)

    def decode() -> dict[str, NDArray[Any]]:
        arrays: dict[str, NDArray[Any]] = {}
        for split in _STEMS:
            images = read_idx(files[f"{split}_inputs"], num_dims=3)
            where = files[f"{split}_targets"]
            arrays[f"{split}_inputs"] = images[:, None]
            arrays[f"{split}_targets"] = checked_labels(
                read_idx(where, num_dims=1), len(images), _NUM_CLASSES, str(where)
            )
        return arrays

    arrays = decoded(spec.name, list(files.values()), decode)
    train, test = (
        ArraySet(arrays[f"{split}_inputs"], arrays[f"{split}_targets"], _NUM_CLASSES, (mean,), (std,))
        for split in _STEMS
    )
    return train, test


def _find(directory: Path, name: str) -> dict[str, Path]:
    """The four files; each as published, unzipped, or with the dot that some unpackers put into the name."""
    found, missing = {}, []
    for split, stem in _STEMS.items():
        for kind, ending in (("inputs", "images-idx3-ubyte"), ("targets", "labels-idx1-ubyte")):
            canonical = f"{stem}-{ending}"
            names = [base + gz for base in (canonical, canonical.replace("-idx", ".idx")) for gz in ("", ".gz")]
            path = next((directory / name for name in names if (directory / name).is_file()), None)
            if path is None:
                missing.append(canonical)
            else:
                found[f"{split}_{kind}"] = path
    if missing:
        raise DataError(
            f"{directory} has no {', '.join(missing)} (with or without .gz), which {name} consists of; point "
            "data.dir to the directory that has them."
        )
    return found


def read_idx(path: Path, num_dims: int) -> NDArray[np.uint8]:
    """The bytes of an idx file of `num_dims` dimensions in its own shape.

    Raises:
        DataError: not such a file, truncated, or longer than it says; names the file.
    """
    raw = _read(path)
    header_bytes = 4 + 4 * num_dims
    # Magic number: two zeros, 8 for unsigned bytes, the number of dimensions.
    if raw[:4] != bytes((0, 0, 8, num_dims)):
        raise DataError(
            f"{path} is not an idx file of unsigned bytes in {number_of(num_dims, 'dimension')}: it "
            f"begins with {raw[:4].hex(' ') or 'nothing'}; download the file again."
        )
    shape = struct.unpack(f">{num_dims}I", raw[4:header_bytes]) if len(raw) >= header_bytes else (0,)
    if len(raw) - header_bytes != math.prod(shape) or 0 in shape:
        raise DataError(
            f"{path} is {'truncated' if len(raw) - header_bytes < math.prod(shape) else 'damaged'}: it holds "
            f"{max(0, len(raw) - header_bytes)} bytes of data where its header says "
            f"{' x '.join(map(str, shape))}; download the file again."
        )
    return np.frombuffer(raw, np.uint8, offset=header_bytes).reshape(shape)


def _read(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is not a complete gzip file ({error}); download the file again.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}).") from None
