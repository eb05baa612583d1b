"""Reading checkpoints: which there are, which of them is good, and what is in it."""

from __future__ import annotations

import contextlib
import re
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

from paceline.checkpoint.manifest import MANIFEST_FILE, Chunk, Manifest, PartFile, TensorEntry
from paceline.checkpoint.part import DTYPES, read_part, verify_part
from paceline.checkpoint.storage import Storage
from paceline.checkpoint.tree import put_together, tensor_names
from paceline.errors import CheckpointError, PacelineError

FOLDER_PREFIX = "step-"
WORKER_PREFIX = "worker:"

_FOLDER_NAME = re.compile(rf"{FOLDER_PREFIX}([0-9]{{8,18}})")


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
        shared: dict[str, Any] = self._whole(self.manifest.values)
        return shared

    def own(self, rank: int) -> dict[str, Any]:
        """The state that only one of the workers had that saved it."""
        own: dict[str, Any] = self._whole(self.manifest.workers[rank])
        return own

    @property
    def weights(self) -> dict[str, Tensor]:
        """Of the model alone, under its own names. Raises `CheckpointError` where there is no model in it."""
        model = self._whole(self.manifest.values.get("model"))
        weights = {k: v for k, v in model.items() if isinstance(v, Tensor)} if isinstance(model, dict) else {}
        if not weights:
            raise CheckpointError(f"The checkpoint {self.name} holds no model.")
        return weights

    def tensors(self, wanted: Callable[[str], bool] = lambda _name: True) -> dict[str, Tensor]:
        """Those whose names are wanted, whole."""
        entries = {name: entry for name, entry in self.manifest.tensors.items() if wanted(name)}
        found = {name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype]) for name, entry in entries.items()}
        self.fill(found)
        return found

    def fill(self, state: dict[str, Tensor]) -> None:
        """Write what was saved into the tensors of `state`, each whole or sharded however they are now (a DTensor).

        Raises:
            CheckpointError: a tensor that is not in the checkpoint, or has another shape there.
        """
        for name, tensor in state.items():
            entry = self.manifest.tensors.get(name)
            if entry is None or entry.shape != tuple(tensor.shape):
                there = "is not in it" if entry is None else f"has the shape {entry.shape} there"
                raise CheckpointError(f"The checkpoint {self.name} is of something else: '{name}' {there}.")
        if state:
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there is nobody to talk to is what is meant
                load(dict(state), storage_reader=_Reader(self), planner=planner, no_dist=True)

    def _whole(self, plain: Any) -> Any:
        return put_together(plain, self.tensors(tensor_names(plain).__contains__).__getitem__)


def worker_prefix(rank: int) -> str:
    """How the names of the tensors begin that only this worker has."""
    return f"{WORKER_PREFIX}{rank}"


def folder_name(step: int) -> str:
    return f"{FOLDER_PREFIX}{step:08d}"


def list_folders(storage: Storage) -> list[str]:
    """Those that are called like a checkpoint, oldest first; whatever else lies there is somebody else's."""
    named = [(int(found[1]), name) for name in storage.folders() if (found := _FOLDER_NAME.fullmatch(name))]
    return [name for _, name in sorted(named)]


def is_complete(storage: Storage, name: str) -> bool:
    """Whether it was finished; that does not mean that it is good. What is not is being written, or was left so."""
    return MANIFEST_FILE in storage.names(name)


def list_checkpoints(storage: Storage) -> list[str]:
    """All complete ones, whether good or damaged, oldest first."""
    return [name for name in list_folders(storage) if is_complete(storage, name)]


def list_unfinished(storage: Storage) -> list[str]:
    """Folders without a manifest: somebody writes there now, or died while writing or deleting."""
    return [name for name in list_folders(storage) if not is_complete(storage, name)]


def read_manifest(storage: Storage, name: str) -> Manifest:
    """Raises `CheckpointError` where there is none that can be trusted; its message does not name the checkpoint."""
    try:
        manifest = Manifest.parse(storage.read(f"{name}/{MANIFEST_FILE}"))
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST_FILE} is missing: it was never finished") from None
    except OSError as problem:
        raise CheckpointError(f"{MANIFEST_FILE} cannot be read: {problem}") from None
    if _FOLDER_NAME.fullmatch(name) and name != folder_name(manifest.step):
        raise CheckpointError(f"{MANIFEST_FILE} is of step {manifest.step}")
    return manifest


def read_checkpoint(storage: Storage, name: str) -> Checkpoint:
    """The checkpoint in a folder, every byte of it checked.

    Raises:
        CheckpointError: what is wrong with it; the message does not name the checkpoint.
    """
    manifest = read_manifest(storage, name)
    return Checkpoint(name, manifest, _parts(storage, name, manifest, read_part))


def verify_checkpoint(storage: Storage, name: str) -> Manifest:
    """Check as much as `read_checkpoint` does, a little at a time; the least that can be done to be sure.

    Raises:
        CheckpointError: what is wrong with it; the message does not name the checkpoint.
    """
    manifest = read_manifest(storage, name)
    _parts(storage, name, manifest, verify_part)
    return manifest


def _parts(
    storage: Storage,
    name: str,
    manifest: Manifest,
    read: Callable[[Iterator[bytes], PartFile], dict[str, Tensor]],
) -> dict[str, dict[str, Tensor]]:
    parts = {}
    for file in manifest.files:
        with _readable(file.name):
            parts[file.name] = read(storage.pieces(f"{name}/{file.name}"), file)
    for tensor, entry in manifest.tensors.items():
        _check(tensor, entry, parts)
    for values in (manifest.values, *manifest.workers):
        for tensor in tensor_names(values) - manifest.tensors.keys():
            raise CheckpointError(f"the tensor '{tensor}' is missing")
    return parts


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
    """That the chunks of a tensor are in the parts, and cover it; the manifest has seen to it that they can."""
    for chunk in entry.chunks:
        values = parts[chunk.file].get(chunk.key)
        if values is None or tuple(values.shape) != chunk.sizes or values.dtype != DTYPES.get(entry.dtype):
            raise CheckpointError(f"{chunk.file} does not hold what the manifest says of '{name}'")
    if entry.dtype not in DTYPES:
        raise CheckpointError(f"'{name}' has the dtype {entry.dtype!r}, which this release does not know")
    if len(entry.chunks) > 1:  # there are as many numbers as it needs, so one that is missing lies under another
        covered = torch.zeros(entry.shape, dtype=torch.bool)
        for chunk in entry.chunks:
            box = zip(chunk.offsets, chunk.sizes, strict=True)
            covered[tuple(slice(start, start + size) for start, size in box)] = True
        if not covered.all():
            raise CheckpointError(f"parts of '{name}' are missing")


def _filled(entry: TensorEntry) -> list[Chunk]:
    """The chunks with numbers in them: only they have places of their own."""
    return [chunk for chunk in entry.chunks if all(chunk.sizes)]


class _Reader(StorageReader):
    """Serves torch's own resharding from parts that have been read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._parts = checkpoint.parts
        self._entries = checkpoint.manifest.tensors
        self._at = {
            MetadataIndex(name, chunk.offsets): chunk
            for name, entry in self._entries.items()
            for chunk in _filled(entry)
        }

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        def described(entry: TensorEntry) -> TensorStorageMetadata:
            chunks = [ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes)) for one in _filled(entry)]
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
