"""Reading checkpoints: which ones exist, which one is good, and what it holds. Whatever is read is checked as it is."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint.data_file import DTYPES, DataFileReader
from paceline.checkpoint.manifest import MANIFEST_FILE, Manifest, Slice
from paceline.checkpoint.state_tree import map_leaves, tensor_names, unflatten_state
from paceline.checkpoint.storage import Storage
from paceline.errors import CheckpointError, PacelineError, reason_of
from paceline.object_collectives import all_gather_objects, broadcast_object

FOLDER_PREFIX = "step-"

LATEST_FILE = "latest"
"""Names the newest checkpoint, for people and scripts; what is resumed from does not rely on it."""

_FOLDER_NAME = re.compile(rf"{FOLDER_PREFIX}([0-9]{{8,18}})/")


def folder_name(step: int) -> str:
    return f"{FOLDER_PREFIX}{step:08d}"


def list_folders(storage: Storage) -> list[str]:
    """The folders with the name of a checkpoint, oldest first; other folders are ignored."""
    named = [(int(found[1]), name[:-1]) for name in storage.names() if (found := _FOLDER_NAME.fullmatch(name))]
    return [name for _, name in sorted(named)]


def is_complete(storage: Storage, name: str) -> bool:
    """Whether a checkpoint was finished, good or not. One that was not is being written, or was abandoned."""
    return MANIFEST_FILE in storage.names(name)


def sort_folders(storage: Storage) -> tuple[list[str], list[str]]:
    """The checkpoints, whether good or damaged, and those that are unfinished: another process writes there now, or
    ended while it wrote or deleted. Oldest first."""
    folders = list_folders(storage)
    complete = [name for name in folders if is_complete(storage, name)]
    return complete, [name for name in folders if name not in complete]


def read_manifest(storage: Storage, name: str) -> Manifest:
    """Raises `CheckpointError` where there is none that can be trusted; its message does not name the checkpoint."""
    try:
        manifest = Manifest.parse(bytes(storage.read(f"{name}/{MANIFEST_FILE}")))
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST_FILE} is missing: it was never finished") from None
    except OSError as problem:
        raise CheckpointError(f"{MANIFEST_FILE} cannot be read: {reason_of(problem)}") from None
    if _FOLDER_NAME.fullmatch(f"{name}/") and name != folder_name(manifest.step):
        raise CheckpointError(f"{MANIFEST_FILE} is of step {manifest.step}")
    for values in (manifest.values, *manifest.workers):
        for tensor in tensor_names(values) - manifest.tensors.keys():
            raise CheckpointError(f"the tensor '{tensor}' is missing")
    for tensor, entry in manifest.tensors.items():
        if entry.dtype not in DTYPES:
            raise CheckpointError(f"'{tensor}' has the dtype {entry.dtype!r}, which this release does not know")
    return manifest


@dataclass(frozen=True)
class Stored:
    """A tensor in the checkpoint that was not read yet, or a slice of it."""

    name: str
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    slice: Slice

    @property
    def is_whole(self) -> bool:
        return self.slice.sizes == self.shape

    def slice_at(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Stored:
        return replace(self, slice=Slice(offsets, sizes))


@dataclass(frozen=True)
class Loaded:
    """The values of a slice of a tensor that was read."""

    values: Tensor


class _Reading:
    """Reads tensors of a checkpoint."""

    def __init__(self, storage: Storage, name: str, manifest: Manifest) -> None:
        self._manifest = manifest
        files = {file.name: file for file in manifest.files}
        self.reader = functools.cache(lambda file: DataFileReader(storage, name, files[file]))

    def stored(self, tensor: str) -> Any:
        shape = self._manifest.tensors[tensor].shape
        return Stored(tensor, shape, Slice.whole(shape))

    def tensor(self, wanted: Stored) -> Tensor:
        entry = self._manifest.tensors[wanted.name]
        for chunk in entry.chunks:
            if chunk.sizes == wanted.slice.sizes and chunk.offsets == wanted.slice.offsets:
                return self.reader(chunk.file).tensor(wanted.name, entry.dtype, chunk)
        found = torch.zeros(wanted.slice.sizes, dtype=DTYPES[entry.dtype])
        for chunk in entry.chunks:
            if (both := wanted.slice.overlap(chunk)) is not None:
                values = self.reader(chunk.file).tensor(wanted.name, entry.dtype, chunk)
                found[both.slices_in(wanted.slice)] = values[both.slices_in(chunk)]
        return found


def verify_checkpoint(storage: Storage, name: str) -> Manifest:
    """Check every byte of a checkpoint, a little at a time.

    Raises:
        CheckpointError: what is wrong with it; the message does not name the checkpoint.
    """
    manifest = read_manifest(storage, name)
    readers = {file.name: DataFileReader(storage, name, file) for file in manifest.files}
    for tensor, entry in manifest.tensors.items():
        for chunk in entry.chunks:
            readers[chunk.file].tensor(tensor, entry.dtype, chunk)
    return manifest


_Read = TypeVar("_Read")


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
            listed = (*sort_folders(storage), LATEST_FILE in storage.names())
        except OSError as error:
            problem = reason_of(error)
    listed, problem = broadcast_object((listed, problem), group)
    if listed is None:
        raise OSError(problem)
    complete, unfinished, was_complete = listed
    problems: list[str] = []
    for name in reversed(complete):
        try:
            return read(name), problems
        except PacelineError as problem:
            problems.append(f"The checkpoint {name} cannot be used: {problem}.")
    if complete:
        newest = f"{complete[-1]}: {problems[0].partition(': ')[2]}"
    elif unfinished and was_complete:
        newest = f"{unfinished[-1]}: {MANIFEST_FILE} is missing, and one was complete before."
    else:
        newest = ""
    if newest:
        raise CheckpointError(
            f"None of the {len(complete or unfinished)} checkpoints in {storage.address} can be used; the newest, "
            f"{newest} Remove them to start from the beginning."
        )
    if unfinished:
        problems.append(
            f"{unfinished[-1]} in {storage.address} is not used: {MANIFEST_FILE}, the last file that is written, is "
            "missing there."
        )
    return None, problems


def read_state(
    storage: Storage,
    name: str,
    group: dist.ProcessGroup | None,
    want: Callable[[dict[str, Any], list[dict[str, Any]]], _Read],
) -> tuple[Manifest, _Read]:
    """Read what a worker needs of the checkpoint in a folder, and check all that is read; a collective of `group`.

    Args:
        want: what this worker needs of the state that all workers had alike, and of what each had for itself; there,
            each tensor is a `Stored`.

    Returns:
        The manifest, and what `want` returned with tensors in their place: a slice of one as a `Loaded`.

    Raises:
        CheckpointError: what is wrong with it, on all workers alike; the message does not name the checkpoint.
    """
    problem = None
    read: dict[Stored, Tensor] = {}
    found: Any = None

    def in_place(leaf: Any) -> Any:
        if not isinstance(leaf, Stored):
            return leaf
        if leaf not in read:
            read[leaf] = reading.tensor(leaf)
        return read[leaf] if leaf.is_whole else Loaded(read[leaf])

    try:
        manifest = read_manifest(storage, name)
        reading = _Reading(storage, name, manifest)
        rank, num_workers = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        for file in manifest.files[rank::num_workers]:  # there may be one that nobody needs
            reading.reader(file.name)
        shared, *workers = (unflatten_state(one, reading.stored) for one in (manifest.values, *manifest.workers))
        found = manifest, map_leaves(want(shared, workers), in_place)
    except CheckpointError as error:
        problem = str(error)
    for first in all_gather_objects(problem, group):
        if first is not None:
            raise CheckpointError(first)
    return cast(tuple[Manifest, _Read], found)
