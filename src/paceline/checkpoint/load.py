"""Reading checkpoints: which one is good, and what it holds. Whatever is read is checked as it is.

Files are read by plain reads, not by a memory map: where a disk cannot read a sector, that is an error to go on from,
not the end of the process.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor

from paceline.checkpoint.format import (
    DTYPES,
    LATEST_FILE,
    MANIFEST_FILE,
    DataFile,
    KnownCheckpoint,
    Manifest,
    Slice,
    Storage,
    StoredSlice,
    checksum,
    step_of,
    wanted,
)
from paceline.errors import CheckpointError, PacelineError, reason_of
from paceline.object_collectives import all_gather_objects, broadcast_object
from paceline.spec.job import CheckpointSpec
from paceline.tensors import memory_of, unflatten

_Read = TypeVar("_Read")


def _read_file(storage: Storage, folder: str, file: str, start: int = 0, stop: int | None = None) -> bytearray:
    try:
        return storage.read(f"{folder}/{file}", start, stop)
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing") from None
    except OSError as problem:
        raise CheckpointError(f"{file} cannot be read: {reason_of(problem)}") from None


def read_manifest(storage: Storage, name: str) -> Manifest:
    """Raises `CheckpointError` where there is none that can be trusted; its message does not name the checkpoint."""
    manifest = Manifest.parse(bytes(_read_file(storage, name, MANIFEST_FILE)))
    if step_of(name) not in (None, manifest.step):
        raise CheckpointError(f"{MANIFEST_FILE} is of step {manifest.step}")
    return manifest


class _FileReader:
    """Reads tensors of a data file."""

    def __init__(self, storage: Storage, folder: str, file: DataFile) -> None:
        """Raises `CheckpointError` if the file is not of the length in the manifest, or not in the format."""
        self._name = file.name
        self._read = functools.partial(_read_file, storage, folder, file.name)
        # Before anything is allocated for what the file is said to hold.
        if len(self._read(max(file.num_bytes - 1, 0), file.num_bytes + 1)) != 1:
            raise CheckpointError(f"{file.name} does not have {file.num_bytes:,} bytes")
        self._begin = 8 + int.from_bytes(self._read(0, 8), "little")
        """Where the header ends."""
        try:
            header = json.loads(self._read(8, min(self._begin, file.num_bytes)))
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict):
            raise CheckpointError(f"{file.name} is not a safetensors file")
        self._entries = header

    def tensor(self, name: str, dtype: str, chunk: StoredSlice) -> Tensor:
        """A stored slice of the tensor of this name. Raises `CheckpointError` if it is not what the manifest says."""
        num_bytes = math.prod(chunk.sizes) * DTYPES[dtype].itemsize
        match self._entries.get(chunk.key):
            case {"dtype": str(stored), "shape": list(shape), "data_offsets": [int(start), int(stop)]} if (
                stored == dtype and shape == list(chunk.sizes) and 0 <= start <= stop == start + num_bytes
            ):
                content = self._read(self._begin + start, self._begin + stop)
            case _:
                raise CheckpointError(f"{self._name} does not hold what the manifest says of '{name}'")
        if len(content) != num_bytes or checksum(content) != chunk.crc32:
            raise CheckpointError(f"{self._name} is damaged: the checksum of '{name}' is wrong")
        if not content:
            return torch.empty(chunk.sizes, dtype=DTYPES[dtype])
        return torch.frombuffer(content, dtype=DTYPES[dtype]).reshape(chunk.sizes)


def verify_checkpoint(storage: Storage, name: str) -> Manifest:
    """Check every byte of a checkpoint, a little at a time. Raises `CheckpointError`, which says what is wrong with it,
    and does not name the checkpoint."""
    manifest = read_manifest(storage, name)
    readers = {file.name: _FileReader(storage, name, file) for file in manifest.files}
    for tensor, entry in manifest.tensors.items():
        for chunk in entry.chunks:
            readers[chunk.file].tensor(tensor, entry.dtype, chunk)
    return manifest


def known_checkpoints(storage: Storage) -> tuple[list[KnownCheckpoint], dict[str, str]]:
    """The complete checkpoints in a storage, oldest first, and the problems of damaged manifests, by name."""
    known, damaged = [], {}
    for name, is_complete in storage.checkpoints().items():
        try:
            if is_complete:
                manifest = read_manifest(storage, name)
                known.append(KnownCheckpoint(name, manifest.saved_at_s, manifest.metrics))
        except PacelineError as problem:
            damaged[name] = str(problem)
    return known, damaged


@dataclass(frozen=True)
class Pruning:
    """The checkpoints to keep and to delete: names, oldest first."""

    stay: tuple[str, ...]
    """Checkpoints that were verified and are good."""
    go: tuple[str, ...]
    damaged: dict[str, str]
    """The problems of checkpoints that cannot replace others, by name; they are left as they are."""


def prune(storage: Storage, spec: CheckpointSpec, *, dry_run: bool = False) -> Pruning:
    """Remove the checkpoints that are good and that the rules do not keep; nothing with `dry_run`.

    Only what the rules would keep is read. One that turns out to be damaged does not count, and the rules are asked
    again, so the newest good one always stays.
    """
    known, damaged = known_checkpoints(storage)
    good: set[str] = set()
    while unread := wanted(known, spec) - good:
        for name in unread:
            try:
                verify_checkpoint(storage, name)
                good.add(name)
            except PacelineError as problem:
                damaged[name] = str(problem)
        known = [one for one in known if one.name not in damaged]
    go = tuple(one.name for one in known if one.name not in good)
    if not dry_run:
        for name in go:
            storage.remove(name)
    return Pruning(tuple(one.name for one in known if one.name in good), go, dict(sorted(damaged.items())))


def newest_that(
    read: Callable[[str], _Read], storage: Storage, group: dist.ProcessGroup | None = None
) -> tuple[_Read | None, list[str]]:
    """What `read` makes of the name of the newest checkpoint that it can read, and a sentence for each newer one that
    it cannot; where there are only unfinished ones, for the newest of them. A collective of `group`.

    Args:
        read: raises `CheckpointError` where one is not what it should be, on all workers alike.

    Raises:
        CheckpointError: there are checkpoints, or were, and none of them can be used.
        OSError: the storage cannot be read.
    """
    listed = problem = None
    if group is None or dist.get_rank(group) == 0:
        try:
            listed = storage.checkpoints(), LATEST_FILE in storage.names()
        except OSError as error:
            problem = reason_of(error)
    listed, problem = broadcast_object((listed, problem), group)
    if listed is None:
        raise OSError(problem)
    checkpoints, was_complete = listed
    complete = [name for name, is_complete in checkpoints.items() if is_complete]
    problems: list[str] = []
    for name in reversed(complete):
        try:
            return read(name), problems
        except PacelineError as error:
            problems.append(f"The checkpoint {name} cannot be used: {error}.")
    if complete or (checkpoints and was_complete):
        newest = problems[0] if complete else f"{[*checkpoints][-1]} has lost its {MANIFEST_FILE}."
        raise CheckpointError(
            f"None of the {len(complete or checkpoints)} checkpoints in {storage.address} can be used. {newest} Remove "
            "them to start from the beginning."
        )
    if checkpoints:
        problems.append(
            f"{[*checkpoints][-1]} in {storage.address} is not used: {MANIFEST_FILE}, the last file that is written, "
            "is missing there."
        )
    return None, problems


@dataclass(frozen=True)
class Stored:
    """A tensor in the checkpoint that was not read yet, or a slice of it."""

    name: str
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    slice: Slice


@dataclass(frozen=True)
class Loaded:
    """The values of a slice of a tensor that was read."""

    values: Tensor


def read_state(
    storage: Storage,
    name: str,
    group: dist.ProcessGroup | None,
    want: Callable[[dict[str, Any], list[dict[str, Any]]], _Read],
) -> tuple[Manifest, _Read]:
    """Read what a worker needs of the checkpoint in a folder, and check all that is read; a collective of `group`.
    Raises `CheckpointError` on all workers alike, which says what is wrong with it and does not name the checkpoint.

    Args:
        want: what this worker needs of the state that all workers had alike, and of what each had for itself; there,
            each tensor is a `Stored`.

    Returns:
        The manifest, and what `want` returned with tensors in their place: a slice of one as a `Loaded`.
    """
    rank, num_workers = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    found = problem = None
    try:
        manifest = read_manifest(storage, name)
        files = {file.name: file for file in manifest.files}
        reader = functools.cache(lambda file: _FileReader(storage, name, files[file]))
        for file in [*files][rank::num_workers]:  # there may be one that nobody needs
            reader(file)
        read = functools.cache(lambda stored: _read_slice(stored, manifest, reader))
        shapes = {tensor: entry.shape for tensor, entry in manifest.tensors.items()}
        shared, *workers = (
            unflatten(values, lambda tensor: Stored(tensor, shapes[tensor], Slice.whole(shapes[tensor])))
            for values in (manifest.values, *manifest.workers)
        )
        found = manifest, _in_place(want(shared, workers), read)
    except CheckpointError as error:
        problem = str(error)
    for first in all_gather_objects(problem, group):
        if first is not None:
            raise CheckpointError(first)
    return cast(tuple[Manifest, _Read], found)


def _in_place(tree: Any, read: Callable[[Stored], Tensor]) -> Any:
    """Dictionaries, lists and tuples of the same form, with what was read in the place of what is stored."""
    match tree:
        case dict():
            return type(tree)({key: _in_place(item, read) for key, item in tree.items()})
        case list() | tuple():
            return type(tree)(_in_place(item, read) for item in tree)
        case Stored():
            return read(tree) if tree.slice.sizes == tree.shape else Loaded(read(tree))
    return tree


def _read_slice(wanted: Stored, manifest: Manifest, reader: Callable[[str], _FileReader]) -> Tensor:
    entry = manifest.tensors[wanted.name]
    for chunk in entry.chunks:
        if (chunk.offsets, chunk.sizes) == (wanted.slice.offsets, wanted.slice.sizes):
            return reader(chunk.file).tensor(wanted.name, entry.dtype, chunk)
    found = torch.zeros(wanted.slice.sizes, dtype=DTYPES[entry.dtype])
    for chunk in entry.chunks:
        if (both := wanted.slice.overlap(chunk)) is not None:
            values = reader(chunk.file).tensor(wanted.name, entry.dtype, chunk)
            found[both.slices_in(wanted.slice)] = values[both.slices_in(chunk)]
    return found


def read_weights(storage: Storage, name: str) -> tuple[Manifest, dict[str, Tensor]]:
    """The weights of the model in a checkpoint, or of the first of several, by name, in whole shapes. Raises
    `CheckpointError` where the checkpoint is damaged, or holds no model."""

    def first_model(shared: dict[str, Any], _workers: list[dict[str, Any]]) -> dict[str, Any]:
        models = shared.get("models")
        first = next(iter(models.values()), None) if isinstance(models, dict) else shared
        model = first.get("model") if isinstance(first, dict) else None
        weights = {k: v for k, v in model.items() if isinstance(v, Stored)} if isinstance(model, dict) else {}
        if not weights:
            raise CheckpointError("it holds no model")
        return weights

    return read_state(storage, name, None, first_model)


def save_weights(weights: Mapping[str, Tensor], storage: Storage, name: str) -> None:
    """Write a model's state_dict, of any shapes, as one safetensors file; it is complete or absent.

    Tied tensors, the same memory under several names, are stored as the first of these in alphabetical order. The
    file's metadata has the other names, as `safetensors.torch.load_model` expects. Raises `OSError` where it cannot be
    written.
    """
    first: dict[object, str] = {}
    names = sorted(name for name, one in weights.items() if isinstance(one, Tensor))  # not a module's extra state
    first_of = {alias: first.setdefault(memory_of(weights[alias]) or alias, alias) for alias in names}
    tied = {alias: one for alias, one in first_of.items() if alias != one}
    tensors = {one: weights[one].detach().contiguous() for one in first.values()}
    storage.write(name, [save(tensors, {"format": "pt", **tied})])
