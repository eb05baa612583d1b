"""What a checkpoint consists of: files of tensors, and one small file, written last, without which there is none;
where it is, in a folder of a local or shared file system or at an address such as s3://bucket/run; and which are kept.

A folder is a checkpoint exactly if it holds manifest.json, that file is byte for byte what `Manifest.dump` writes, and
the files it names hold the slices it names, each with the CRC-32 it gives, which is there to find damage, not forgery.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import operator
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import torch

from paceline.errors import CheckpointError, JobError
from paceline.files import make_durable, make_run_folder, run_file_mode, write_file
from paceline.spec.codec import NonNegativeInt, PositiveInt, from_mapping
from paceline.spec.job import CheckpointSpec
from paceline.spec.record import best_place
from paceline.tensors import unflatten

FORMAT = 2
"""Raised when older programs could not read what is written."""

MANIFEST_FILE = "manifest.json"
IN_RUN_FOLDER = "checkpoints"
"""The folder of checkpoints in a run folder."""

LATEST_FILE, BEST_FILE = "latest", "best"
"""Name the newest checkpoint, and the best by `keep_best`, for people and scripts; what is resumed from does not rely
on them."""

_FOLDER_NAME = re.compile(r"step-([0-9]{8,18})")

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The data types by their names in the safetensors format."""

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
"""The names that files may have, so that no manifest can make a reader leave its folder."""

_MOST_DIMENSIONS = 64
_MOST_NUMBERS = 2**48
"""The most numbers of a tensor: torch counts its bytes up to 2^63."""


@dataclass(frozen=True)
class DataFile:
    """One file of tensors, in the safetensors format."""

    name: str
    num_bytes: NonNegativeInt


@dataclass(frozen=True)
class Slice:
    """Where a slice begins in the whole tensor, and its size, along each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Self:
        return cls((0,) * len(shape), shape)

    def overlap(self, other: Slice) -> Slice | None:
        """The intersection of both slices; None where it is empty."""
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = map(min, map(operator.add, self.offsets, self.sizes), map(operator.add, other.offsets, other.sizes))
        sizes = tuple(map(operator.sub, stops, starts))
        return Slice(starts, sizes) if all(size > 0 for size in sizes) else None

    def lies_in(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape has such a slice."""
        ranges = zip(self.offsets, self.sizes, shape, strict=False)
        has_all = len(self.offsets) == len(self.sizes) == len(shape)
        return has_all and all(0 <= start <= start + size <= length for start, size, length in ranges)

    def slices_in(self, outer: Slice) -> tuple[slice, ...]:
        """The index that takes this slice out of a tensor that holds the slice `outer`."""
        starts = (own - outers for own, outers in zip(self.offsets, outer.offsets, strict=True))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))


@dataclass(frozen=True)
class StoredSlice(Slice):
    """A slice of a tensor, and where it is kept."""

    file: str
    key: str
    """Its name in that file."""
    crc32: str
    """The checksum of its bytes: eight hexadecimal digits."""


@dataclass(frozen=True)
class TensorEntry:
    """A whole tensor, covered by the slices that files hold."""

    dtype: str
    """The data type by its name in safetensors: "F32", "BF16", "I64"."""
    shape: tuple[int, ...]
    chunks: tuple[StoredSlice, ...]

    def is_covered(self) -> bool:
        """Whether a tensor can have this shape, and its slices lie in it and hold as many values as it has."""
        sizes = [max(size, 1) for size in self.shape]
        if len(sizes) > _MOST_DIMENSIONS or min(self.shape, default=0) < 0 or math.prod(sizes) > _MOST_NUMBERS:
            return False
        num_held = sum(math.prod(chunk.sizes) for chunk in self.chunks)
        return num_held == math.prod(self.shape) and all(chunk.lies_in(self.shape) for chunk in self.chunks)


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but the numbers in its tensors."""

    step: NonNegativeInt
    world_size: PositiveInt
    """Workers that saved it; any number may load it."""
    saved_at: str
    """UTC, as in 2031-04-05T06:07:08Z."""
    versions: dict[str, str]
    """The versions of Paceline and of torch."""
    job: dict[str, Any]
    """What was trained."""
    values: dict[str, Any]
    """All state but tensors; see `tensors.flatten`."""
    workers: tuple[dict[str, Any], ...] = ()
    """For each worker, the part of `values` in which workers differ."""
    files: tuple[DataFile, ...] = ()
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    format: int = FORMAT

    def dump(self) -> bytes:
        """The file's content: canonical JSON with a checksum over the rest of it."""
        body = asdict(self)
        return _canonical({"sha256": _digest(body), **body})

    @classmethod
    def parse(cls, content: bytes) -> Manifest:
        """The manifest in a file's content. Raises `CheckpointError` where it is damaged, of another format, or
        contradicts itself; says which."""
        body: Any = None
        try:
            body = json.loads(content)
            is_whole = isinstance(body, dict) and _canonical(body) == content
            is_whole = is_whole and body.pop("sha256", None) == _digest(body)
        except (ValueError, RecursionError):
            is_whole = False
        if not is_whole:
            raise CheckpointError(f"{MANIFEST_FILE} is damaged")
        if body.get("format") != FORMAT:
            raise CheckpointError(f"it has format {body.get('format')!r}, and this release reads format {FORMAT}")
        try:
            manifest = from_mapping(cls, body)
            manifest._check()
        except (JobError, ValueError, OverflowError, OSError) as problem:
            raise CheckpointError(f"{MANIFEST_FILE} is not what a manifest should be: {problem}") from None
        return manifest

    @property
    def num_bytes(self) -> int:
        """The size of all data files together."""
        return sum(file.num_bytes for file in self.files)

    @property
    def saved_at_s(self) -> float:
        """Seconds since the epoch."""
        return datetime.fromisoformat(self.saved_at).timestamp()

    @property
    def metrics(self) -> dict[str, float]:
        """The finite metrics of the last evaluation before the checkpoint was saved."""
        metrics = self.values.get("metrics")
        entries = metrics.items() if isinstance(metrics, dict) else ()
        return {name: float(value) for name, value in entries if isinstance(value, int | float)}

    def _check(self) -> None:
        """Raise `ValueError` where the manifest contradicts itself, which a correct checksum does not rule out."""
        files = [file.name for file in self.files]
        used = {chunk.file for entry in self.tensors.values() for chunk in entry.chunks}
        _ = self.saved_at_s
        flaws = {
            f"{len(self.workers)} of {self.world_size} workers are listed": self.world_size != len(self.workers),
            "it names a file outside of the checkpoint": not all(map(_PLAIN_NAME.fullmatch, files)),
            "it lists a file twice": len(set(files)) < len(files),
            "it names tensors in files that it does not list": not used <= set(files),
        }
        for name, entry in self.tensors.items():
            flaws[f"the slices of '{name}' do not add up to it"] = not entry.is_covered()
            flaws[f"'{name}' has the dtype {entry.dtype!r}, which this release does not know"] = (
                entry.dtype not in DTYPES
            )
        for flaw, is_there in flaws.items():
            if is_there:
                raise ValueError(flaw)
        for values in (self.values, *self.workers):
            unflatten(values, self.tensors.__getitem__)


def _canonical(body: Mapping[str, Any]) -> bytes:
    """Equal values give equal bytes, and no byte can change without changing a value or this form."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()


def checksum(content: bytearray | memoryview) -> str:
    """CRC-32, as eight hexadecimal digits."""
    return f"{zlib.crc32(content):08x}"


# --- where checkpoints are ---


Piece = bytes | bytearray | memoryview


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: str) -> int | None:
    """The step in the name of a checkpoint's folder; None for other names."""
    return int(found[1]) if (found := _FOLDER_NAME.fullmatch(folder)) else None


class Storage:
    """Named files in named folders, one level deep ("step-00000012/manifest.json"), and files beside them, wherever
    fsspec finds them. Whatever goes wrong raises `OSError`, as it does for plain files."""

    def __init__(self, address: str | Path) -> None:
        """Raises `CheckpointError` for an address that this installation cannot reach."""
        import fsspec.implementations.local  # 40 ms that a run without checkpoints does not need

        self.address = str(address)
        try:
            self._files, root = fsspec.core.url_to_fs(self.address)
        except (ImportError, ValueError) as problem:
            raise CheckpointError(f"Checkpoints cannot be kept at {address}: {problem}.") from None
        self._root = root.rstrip("/")
        self.folder = Path(root) if isinstance(self._files, fsspec.implementations.local.LocalFileSystem) else None
        """The folder, if it is one of a file system."""

    def write(self, name: str, pieces: Iterable[Piece]) -> None:
        """Make or replace a file. In a folder it has its name only once it is complete and would survive a power cut;
        an object of a store is complete or absent."""
        if self.folder is None:
            with _as_os_error(), self._files.open(self._path(name), "wb") as file:
                for piece in pieces:
                    file.write(piece)
            return
        path = self.folder / name
        if not path.parent.is_dir():
            make_run_folder(path.parent)
            make_durable(path.parent.parent)
        write_file(path, pieces, run_file_mode(), durable=True)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytearray:
        """Bytes start … stop - 1 of a file, or as many of them as there are; None: to its end."""
        with _as_os_error():
            return bytearray(self._files.cat_file(self._path(name), start=start, end=stop))

    def names(self, folder: str = "") -> list[str]:
        """The names in a folder, sorted, those of folders with a slash behind; empty if there is no such folder."""
        path = self._path(folder)
        with _as_os_error():
            self._files.invalidate_cache()
            try:
                found = [(str(one["name"]).rstrip("/"), one["type"]) for one in self._files.ls(path, detail=True)]
            except (FileNotFoundError, NotADirectoryError):
                return []
        # Asked for a file, or a folder that is an object of its own, some storages answer with just that.
        inside = [(name, kind) for name, kind in found if name.strip("/") != path.strip("/")]
        return sorted(name.rpartition("/")[2] + "/" * (kind == "directory") for name, kind in inside)

    def checkpoints(self) -> dict[str, bool]:
        """The folders with the name of a checkpoint, oldest first, and whether each is complete, good or damaged. Into
        others a process writes now, or it ended while it wrote or deleted. Folders of other names are ignored."""
        folders = [name.rstrip("/") for name in self.names() if name.endswith("/")]
        steps = sorted((step, name) for name in folders if (step := step_of(name)) is not None)
        return {name: MANIFEST_FILE in self.names(name) for _, name in steps}

    def remove(self, name: str) -> None:
        """Delete a file, or a folder with all that is in it; nothing happens where there is none."""
        # A checkpoint without its manifest is none any more, whatever happens next.
        for path in (f"{name}/{MANIFEST_FILE}", name):
            with _as_os_error(), contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._files.rm(self._path(path), recursive=True)

    def claim(self, folder: str) -> bool:
        """Make a folder; returns whether this call made it, and no other process. Stores of objects have no folders:
        two may both be told yes, and then write the same."""
        if self.folder is None:
            return not self.names(folder)
        path = self.folder / folder
        make_run_folder(path.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return True
        return False

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as problem:  # every kind of storage has errors of its own
        raise OSError(f"{type(problem).__name__}: {problem}") from problem


# --- which of them are kept ---


@dataclass(frozen=True)
class KnownCheckpoint:
    """The facts about a checkpoint that the retention rules use."""

    name: str
    saved_at_s: float
    """Seconds since the epoch."""
    metrics: dict[str, float]


def wanted(known: Sequence[KnownCheckpoint], spec: CheckpointSpec) -> set[str]:
    """The names of the checkpoints that the rules keep, of `known`, oldest first.

    The last `keep_last`; of every span of `keep_every_hours` hours the first; the best by `keep_best`.
    """
    keep = {one.name for one in known[-spec.keep_last :]}
    if spec.keep_every_hours is not None:
        span_s = spec.keep_every_hours * 3600
        keep |= {*{int(one.saved_at_s // span_s): one.name for one in reversed(known)}.values()}
    best = best_of(known, spec)
    return keep if best is None else keep | {best}


def best_of(known: Sequence[KnownCheckpoint], spec: CheckpointSpec) -> str | None:
    """The name of the best by `keep_best` of `known`, oldest first; of equals the oldest: later ones have other
    weights, not evaluated yet."""
    if spec.keep_best is None:
        return None
    values = [one.metrics.get(spec.keep_best, math.nan) for one in known]
    place = best_place(values, spec.keep_best, spec.best_mode)
    return None if place is None else known[place].name
