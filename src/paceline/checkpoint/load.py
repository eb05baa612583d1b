"""Reading checkpoints: which there are, which of them is good, and what is in it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader

from paceline.checkpoint.manifest import MANIFEST_FILE, Manifest, TensorEntry
from paceline.checkpoint.part import DTYPES, read_part, verify_part
from paceline.checkpoint.storage import Storage
from paceline.checkpoint.tree import put_together
from paceline.errors import CheckpointError, PacelineError

FOLDER_PREFIX = "step-"
WORKER_PREFIX = "worker:"


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
        tensors = self.tensors(lambda name: not name.startswith(WORKER_PREFIX))
        shared: dict[str, Any] = put_together(self.manifest.values, tensors.__getitem__)
        return shared

    def own(self, rank: int) -> dict[str, Any]:
        """The state that only one of the workers had that saved it."""
        tensors = self.tensors(lambda name: name.startswith(f"{worker_prefix(rank)}/"))
        own: dict[str, Any] = put_together(self.manifest.workers[rank], tensors.__getitem__)
        return own

    def tensors(self, wanted: Callable[[str], bool] = lambda _name: True) -> dict[str, Tensor]:
        """Those whose names are wanted, whole."""
        entries = {name: entry for name, entry in self.manifest.tensors.items() if wanted(name)}
        found = {name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype]) for name, entry in entries.items()}
        self.fill(found)
        return found

    def fill(self, state: dict[str, Tensor]) -> None:
        """Write what was saved into the tensors of `state`, each whole or sharded however they are now (a DTensor)."""
        if state:
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there is nobody to talk to is what is meant
                load(dict(state), storage_reader=_Reader(self), planner=planner, no_dist=True)


def worker_prefix(rank: int) -> str:
    """How the names of the tensors begin that only this worker has."""
    return f"{WORKER_PREFIX}{rank}"


def folder_name(step: int) -> str:
    return f"{FOLDER_PREFIX}{step:08d}"


def list_checkpoints(storage: Storage) -> list[str]:
    """All complete ones, whether good or damaged, oldest first."""
    folders = [name for name in storage.names() if _step(name) is not None]
    complete = [name for name in folders if MANIFEST_FILE in storage.names(name)]
    return sorted(complete, key=lambda name: _step(name) or 0)


def list_unfinished(storage: Storage) -> list[str]:
    """Folders without a manifest: somebody writes there now, or died while writing or deleting."""
    return [name for name in storage.names() if _step(name) is not None and MANIFEST_FILE not in storage.names(name)]


def _step(name: str) -> int | None:
    digits = name.removeprefix(FOLDER_PREFIX)
    return int(digits) if name.startswith(FOLDER_PREFIX) and digits.isdecimal() and digits.isascii() else None


def read_manifest(storage: Storage, name: str) -> Manifest:
    """Raises `CheckpointError` where there is none that can be trusted; its message does not name the checkpoint."""
    try:
        return Manifest.parse(storage.read(f"{name}/{MANIFEST_FILE}"))
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST_FILE} is missing: it was never finished") from None
    except OSError as problem:
        raise CheckpointError(f"{MANIFEST_FILE} cannot be read: {problem}") from None


def read_checkpoint(storage: Storage, name: str) -> Checkpoint:
    """The checkpoint in a folder, every byte of it checked.

    Raises:
        CheckpointError: what is wrong with it; the message does not name the checkpoint.
    """
    manifest = read_manifest(storage, name)
    parts = {}
    for file in manifest.files:
        with _readable(file.name):
            parts[file.name] = read_part(storage.read(f"{name}/{file.name}"), file)
    for tensor, entry in manifest.tensors.items():
        _check(tensor, entry, parts)
    return Checkpoint(name, manifest, parts)


def verify_checkpoint(storage: Storage, name: str) -> Manifest:
    """Read every file and compare it with the manifest, a little at a time; the least that can be done to be sure.

    Raises:
        CheckpointError: what is wrong with it; the message does not name the checkpoint.
    """
    manifest = read_manifest(storage, name)
    for file in manifest.files:
        with _readable(file.name):
            verify_part(storage.pieces(f"{name}/{file.name}"), file)
    return manifest


@contextlib.contextmanager
def _readable(file: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing") from None
    except OSError as problem:
        raise CheckpointError(f"{file} cannot be read: {problem}") from None


def newest_good(storage: Storage) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is what it should be, and a sentence for each newer one that is not.

    Raises:
        CheckpointError: there are checkpoints, and none of them can be used.
    """
    problems: list[str] = []
    names = list_checkpoints(storage)
    for name in reversed(names):
        try:
            return read_checkpoint(storage, name), problems
        except PacelineError as problem:
            problems.append(f"The checkpoint {name} cannot be used: {problem}.")
    if names:
        raise CheckpointError(
            f"None of the {len(names)} checkpoints in {storage.address} can be used; the newest, {names[-1]}: "
            f"{problems[0].partition(': ')[2]} Remove them to start from the beginning."
        )
    return None, problems


def _check(name: str, entry: TensorEntry, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
    """That the chunks of a tensor are there and cover it."""
    covered = 0
    for chunk in entry.chunks:
        values = parts[chunk.file].get(chunk.key)
        if values is None or tuple(values.shape) != chunk.sizes or values.dtype != DTYPES.get(entry.dtype):
            raise CheckpointError(f"{chunk.file} does not hold what the manifest says of '{name}'")
        box = list(zip(chunk.offsets, chunk.sizes, entry.shape, strict=True))
        if any(offset < 0 or offset + size > length for offset, size, length in box):
            raise CheckpointError(f"a part of '{name}' lies outside of it")
        covered += values.numel()
    if covered != torch.Size(entry.shape).numel():
        raise CheckpointError(f"parts of '{name}' are missing")


class _Reader(StorageReader):
    """Serves torch's own resharding from parts that have been read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._parts = checkpoint.parts
        self._entries = checkpoint.manifest.tensors
        self._at = {
            MetadataIndex(name, chunk.offsets): chunk for name, entry in self._entries.items() for chunk in entry.chunks
        }

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        def described(entry: TensorEntry) -> TensorStorageMetadata:
            chunks = [ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes)) for one in entry.chunks]
            return TensorStorageMetadata(TensorProperties(DTYPES[entry.dtype]), torch.Size(entry.shape), chunks)

        return Metadata({name: described(entry) for name, entry in self._entries.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        for item in plan.items:
            chunk = self._at[item.storage_index]
            values = self._parts[chunk.file][chunk.key]
            for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                values = values.narrow(dimension, start, length)
            target = planner.resolve_tensor(item)
            target.detach().copy_(values)
            planner.commit_tensor(item, target)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, _checkpoint_id: Any) -> bool:
        return False
