"""Reading checkpoints: which ones exist, which one is good, and what it holds."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from paceline.checkpoint.data_file import DTYPES, Position, read_data_file, verify_data_file
from paceline.checkpoint.manifest import MANIFEST_FILE, DataFile, Manifest, StoredSlice, TensorEntry
from paceline.checkpoint.slice import Slice
from paceline.checkpoint.state_tree import tensor_names, unflatten_state
from paceline.checkpoint.storage import Catalogue, Storage
from paceline.errors import CheckpointError, PacelineError, reason_of

FOLDER_PREFIX = "step-"

LATEST_FILE = "latest"
"""Names the newest checkpoint, for people and scripts; what is resumed from does not rely on it."""

_FOLDER_NAME = re.compile(rf"{FOLDER_PREFIX}([0-9]{{8,18}})")

_Held = TypeVar("_Held", Tensor, Position)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read whole and found to be what its manifest says."""

    name: str
    manifest: Manifest
    parts: dict[str, dict[str, Tensor]]
    """The tensors of every file, by file and by their name there."""

    @property
    def shared(self) -> dict[str, Any]:
        """The state that all workers had alike, as it was given to be saved."""
        return cast(dict[str, Any], self._whole(self.manifest.values))

    def own(self, rank: int) -> dict[str, Any]:
        """The state that only one of the workers had that saved it."""
        return cast(dict[str, Any], self._whole(self.manifest.workers[rank]))

    @property
    def weights(self) -> dict[str, Tensor]:
        """The model's weights by name, in whole shapes. Raises `CheckpointError` if the checkpoint holds no model."""
        model = self._whole(self.manifest.values.get("model"))
        weights = {k: v for k, v in model.items() if isinstance(v, Tensor)} if isinstance(model, dict) else {}
        if not weights:
            raise CheckpointError(f"The checkpoint {self.name} holds no model.")
        return weights

    def _tensor(self, name: str) -> Tensor:
        entry = self.manifest.tensors[name]
        tensor, whole = torch.empty(entry.shape, dtype=DTYPES[entry.dtype]), Slice.whole(entry.shape)
        for chunk in entry.chunks:
            tensor[chunk.slices_in(whole)] = self.parts[chunk.file][chunk.key]
        return tensor

    def _whole(self, plain: Any) -> Any:
        return unflatten_state(plain, {name: self._tensor(name) for name in tensor_names(plain)}.__getitem__)


def worker_prefix(rank: int) -> str:
    """How the names of the tensors begin that only this worker has."""
    return f"worker:{rank}"


def folder_name(step: int) -> str:
    return f"{FOLDER_PREFIX}{step:08d}"


def list_folders(storage: Catalogue) -> list[str]:
    """The folders with the name of a checkpoint, oldest first; other folders are ignored."""
    named = [(int(found[1]), name) for name in storage.folders() if (found := _FOLDER_NAME.fullmatch(name))]
    return [name for _, name in sorted(named)]


def is_complete(storage: Catalogue, name: str) -> bool:
    """Whether a checkpoint was finished, good or not. One that was not is being written, or was abandoned."""
    return MANIFEST_FILE in storage.names(name)


def list_checkpoints(storage: Catalogue) -> list[str]:
    """All complete ones, whether good or damaged, oldest first."""
    return [name for name in list_folders(storage) if is_complete(storage, name)]


def list_unfinished(storage: Catalogue) -> list[str]:
    """Folders without a manifest: another process writes there now, or ended while it wrote or deleted."""
    return [name for name in list_folders(storage) if not is_complete(storage, name)]


def read_manifest(storage: Catalogue, name: str) -> Manifest:
    """Raises `CheckpointError` where there is none that can be trusted; its message does not name the checkpoint."""
    try:
        manifest = Manifest.parse(storage.read(f"{name}/{MANIFEST_FILE}"))
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST_FILE} is missing: it was never finished") from None
    except OSError as problem:
        raise CheckpointError(f"{MANIFEST_FILE} cannot be read: {reason_of(problem)}") from None
    if _FOLDER_NAME.fullmatch(name) and name != folder_name(manifest.step):
        raise CheckpointError(f"{MANIFEST_FILE} is of step {manifest.step}")
    return manifest


def read_checkpoint(storage: Storage, name: str) -> Checkpoint:
    """The checkpoint in a folder, every byte of it checked.

    Raises:
        CheckpointError: what is wrong with it; the message does not name the checkpoint.
    """
    manifest = read_manifest(storage, name)
    return Checkpoint(name, manifest, _parts(storage, name, manifest, read_data_file))


def verify_checkpoint(storage: Storage, name: str) -> Manifest:
    """Check as much as `read_checkpoint` does, a little at a time; the least that can be done to be sure.

    Raises:
        CheckpointError: what is wrong with it; the message does not name the checkpoint.
    """
    manifest = read_manifest(storage, name)
    _parts(storage, name, manifest, verify_data_file)
    return manifest


def _parts(
    storage: Storage,
    name: str,
    manifest: Manifest,
    read: Callable[[Iterator[bytes], DataFile], dict[str, _Held]],
) -> dict[str, dict[str, _Held]]:
    parts = {}
    for file in manifest.files:
        with readable(file.name):
            parts[file.name] = read(storage.pieces(f"{name}/{file.name}"), file)
    for tensor, entry in manifest.tensors.items():
        for chunk in entry.chunks:
            check_stored_slice(tensor, entry, chunk, parts[chunk.file].get(chunk.key))
        check_cover(tensor, Slice.whole(entry.shape), entry.chunks)
    check_manifest(manifest)
    return parts


def check_manifest(manifest: Manifest) -> None:
    """Raise `CheckpointError` if a manifest lacks a tensor that it names, or has one of an unknown dtype."""
    for values in (manifest.values, *manifest.workers):
        for tensor in tensor_names(values) - manifest.tensors.keys():
            raise CheckpointError(f"the tensor '{tensor}' is missing")
    for name, entry in manifest.tensors.items():
        if entry.dtype not in DTYPES:
            raise CheckpointError(f"'{name}' has the dtype {entry.dtype!r}, which this release does not know")


def check_stored_slice(name: str, entry: TensorEntry, chunk: StoredSlice, held: Tensor | Position | None) -> None:
    """Check that a data file holds the slice that the manifest names. Raises `CheckpointError`."""
    if held is None or tuple(held.shape) != chunk.sizes or held.dtype != DTYPES.get(entry.dtype, held.dtype):
        raise CheckpointError(f"{chunk.file} does not hold what the manifest says of '{name}'")


def check_cover(name: str, whole: Slice, boxes: Sequence[Slice]) -> None:
    """Raise `CheckpointError` if stored slices leave a part of a tensor, or of a slice of one, uncovered.

    Args:
        boxes: known to lie inside of `whole`, and to hold as many elements in all as it has.
    """
    if len(boxes) == 1 and boxes[0].sizes == whole.sizes:
        return
    # The boxes hold exactly as many elements as the tensor, so an uncovered element means that two boxes overlap.
    if all(whole.sizes):
        covered = torch.zeros(whole.sizes, dtype=torch.bool)
        for slice in boxes:
            covered[slice.slices_in(whole)] = True
        if not covered.all():
            raise CheckpointError(f"slices of '{name}' are missing")


@contextlib.contextmanager
def readable(file: str) -> Iterator[None]:
    """Raises a `CheckpointError` that names the file in place of an `OSError` of the storage."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing") from None
    except OSError as problem:
        raise CheckpointError(f"{file} cannot be read: {reason_of(problem)}") from None


_Read = TypeVar("_Read")


def newest_good(storage: Storage) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is what it should be, and a sentence for each newer one that is not; where there are
    only unfinished ones, for the newest of them.

    Raises:
        CheckpointError: there are checkpoints, or were, and none of them can be used.
    """
    return newest_that(lambda name: read_checkpoint(storage, name), storage)


def newest_that(read: Callable[[str], _Read], storage: Catalogue) -> tuple[_Read | None, list[str]]:
    """What `read` makes of the name of the newest checkpoint that it can read; else as `newest_good`.

    Args:
        read: raises `CheckpointError` where one is not what it should be.
    """
    problems: list[str] = []
    names = list_checkpoints(storage)
    for name in reversed(names):
        try:
            return read(name), problems
        except PacelineError as problem:
            problems.append(f"The checkpoint {name} cannot be used: {problem}.")
    if names:
        raise CheckpointError(
            f"None of the {len(names)} checkpoints in {storage.address} can be used; the newest, {names[-1]}: "
            f"{problems[0].partition(': ')[2]} Remove them to start from the beginning."
        )
    unfinished = list_unfinished(storage)
    if unfinished and LATEST_FILE in storage.names():  # which is written once a checkpoint is complete
        raise CheckpointError(
            f"None of the {len(unfinished)} checkpoints in {storage.address} can be used; of the newest, "
            f"{unfinished[-1]}, {MANIFEST_FILE} is missing, and one was complete before. Remove them to start from the "
            "beginning."
        )
    if unfinished:
        problems.append(
            f"{unfinished[-1]} in {storage.address} is not used: {MANIFEST_FILE}, the last file that is written, is "
            "missing there."
        )
    return None, problems
