"""Saving: training waits for a copy in memory, a thread writes the files, and rank 0 completes the checkpoint.

Every worker writes its own data file and then tells rank 0, over a process group of the savers alone, what it has
written. Rank 0 writes the manifest, which makes the folder a checkpoint, removes checkpoints that retention does not
keep, and tells the others what came of it. Nothing that was written is read again. Files of one attempt have names that
no other attempt uses, so a checkpoint that is saved again stays complete until its manifest is replaced. Whatever the
storage does, training goes on.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline import __version__
from paceline.checkpoint.format import (
    BEST_FILE,
    DTYPES,
    LATEST_FILE,
    MANIFEST_FILE,
    DataFile,
    KnownCheckpoint,
    Manifest,
    Slice,
    Storage,
    StoredSlice,
    TensorEntry,
    best_of,
    checksum,
    folder_name,
    wanted,
)
from paceline.checkpoint.load import known_checkpoints
from paceline.errors import CheckpointError, PacelineError, reason_of
from paceline.object_collectives import all_gather_objects, broadcast_object, gather_objects, open_host_group
from paceline.spec.job import CheckpointSpec
from paceline.tensors import flatten, is_dtensor, local_shard, shard_slice

_SLOW_S = 60.0
"""The user is told of a checkpoint that takes longer."""

_PATIENCE_S = 300.0
"""At the end of a run, a storage that has accepted nothing for so long is not waited for any more."""

_LONGEST_WRITE_S = 24 * 3600.0
"""How long a worker that has written waits for the others."""

_MOST_SLICE_BYTES = 16 << 20
"""Larger tensors are written in slices of rows: a worker that needs some rows reads few others to check them."""

_PIECE_BYTES = 8 << 20
"""Bytes written at a time."""

_ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector of a processor. Copies between places so aligned are the fastest."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_Held = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""What a worker holds of a tensor: its name, dtype and whole shape; the offsets and sizes of the slice."""


@dataclass(frozen=True)
class Snapshot:
    """The state that a checkpoint holds, as tensors in dictionaries; the same tree on every worker except `own`."""

    step: int
    job: dict[str, Any]
    shared: Mapping[str, Any]
    """State that all workers have alike, or each a shard of."""
    own: Mapping[str, Any]
    """State that only this worker has."""
    is_part: bool = False
    """Whether other workers have other entries of `shared`: stages of a pipeline have their own layers."""


@dataclass(frozen=True)
class _Receipt:
    """What a worker tells rank 0 once it has written its file, or could not."""

    problem: str
    """The reason why there is no file."""
    num_bytes: int = 0
    checksums: dict[str, str] = field(default_factory=dict)
    """The checksums of the file's slices, by their keys."""
    own: dict[str, Any] = field(default_factory=dict)
    """State that only this worker has, with names in the place of tensors."""
    shared: dict[str, Any] = field(default_factory=dict)
    """This worker's entries of the shared state, where workers have different ones."""


class Saver:
    """Saves the checkpoints of a run; one on every worker."""

    def __init__(
        self,
        storage: Storage,
        spec: CheckpointSpec,
        group: dist.ProcessGroup | None,
        say: Callable[[str], None],
        *,
        resumed_step: int | None = None,
        is_rescue: bool = False,
    ) -> None:
        """A collective of all workers of `group`, whose backend handles host memory; None: this worker saves alone.

        Args:
            say: told a sentence when a checkpoint could not be written, from another thread.
            resumed_step: the checkpoint that the run goes on from. Newer ones could not be used: they do not count, and
                are left for somebody to look at.
            is_rescue: whether others may be writing there: nothing is removed.
        """
        self._storage, self._spec, self._group, self._say = storage, spec, group, say
        self._rank = 0 if group is None else dist.get_rank(group)
        # Workers of an earlier run may still be writing somewhere: their files have another name. Writers' collectives
        # would mix with those of training, and with those of an earlier run of these processes.
        is_writing = any(one.name == "checkpoint" for one in threading.enumerate())
        found = all_gather_objects((secrets.token_hex(3), is_writing), group)
        self._run: str = found[0][0]
        purpose = f"receipts of writers {self._run if any(one for _, one in found) else ''}"
        self._writers = None if group is None else open_host_group(group, purpose, _LONGEST_WRITE_S)
        self._num_begun = 0
        self._staged = StagedFile()
        self._plan: WritePlan | None = None
        self._is_rescue = is_rescue
        self._known: list[KnownCheckpoint] = []
        """The checkpoints that retention counts, oldest first; on rank 0."""
        self._thread: threading.Thread | None = None
        self._moved_at_s = 0.0
        """When the storage has last accepted something, by the monotonic clock."""
        self._is_given_up = False
        self._problem = self._told = ""
        """Why the newest checkpoint could not be written, and what the user was last told of."""
        self.last_step = self.written_step = resumed_step
        """The steps of the newest checkpoint that was begun, and of the newest that is complete."""
        if self._rank == 0 and not is_rescue:
            try:
                for folder, is_complete in storage.checkpoints().items():
                    if not is_complete:
                        storage.remove(folder)
                known, _ = known_checkpoints(storage)
                self._known = [one for one in known if one.name <= folder_name(resumed_step or 0)]
            except OSError as problem:
                say(f"What an earlier run left in {storage.address} cannot be removed: {reason_of(problem)}.")

    @property
    def busy(self) -> bool:
        """Whether the newest checkpoint is still being written."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether the newest checkpoint could not be written."""
        return self._is_given_up or bool(self._problem)

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises `CheckpointError` for what a checkpoint cannot hold."""
        plan_writes(_flattened(state)[1], None)

    def begin(self, snapshot: Snapshot) -> None:
        """Copy `snapshot`, and write it in the background, unless some worker still writes the one before. A collective
        of all workers. Raises `CheckpointError` for something that a checkpoint cannot hold."""
        if any(all_gather_objects(self.busy, self._group)):
            return  # its storage does not respond, as was said
        self.last_step = snapshot.step
        values, tensors = _flattened(snapshot.shared)
        own_values, own_tensors = _flattened(snapshot.own, f"worker:{self._rank}")
        state = tensors | own_tensors
        self._plan = plan_writes(state, self._group, self._plan)
        mine = self._plan.slices[self._rank].items()
        self._staged.stage({key: local_shard(state[one.name])[one.index] for key, one in mine})
        self._num_begun += 1
        self._moved_at_s = time.monotonic()
        self._is_given_up, self._problem = False, ""
        named = replace(snapshot, shared=values, own=own_values)  # with names in the place of tensors
        self._thread = threading.Thread(target=self._write, args=(named,), name="checkpoint", daemon=True)
        self._thread.start()

    def save_alone(self, snapshot: Snapshot) -> None:
        """Write `snapshot`, which has to be complete, without the other workers; unless one of them does so already,
        or all of them have written it."""
        folder = folder_name(snapshot.step)
        with contextlib.suppress(OSError):
            if MANIFEST_FILE not in self._storage.names(folder) and self._storage.claim(f"{folder}/rescue"):
                alone = Saver(self._storage, self._spec, None, self._say, is_rescue=True)
                alone.begin(snapshot)
                alone.wait()

    def wait(self) -> None:
        """Wait until the checkpoint in progress is written, or the storage has accepted nothing for too long."""
        while self._thread is not None and self._thread.is_alive() and not self._is_given_up:
            left_s = self._moved_at_s + _PATIENCE_S - time.monotonic()
            self._thread.join(max(left_s, 0.0))
            if left_s <= 0:
                self._is_given_up = True
                self._tell(self.last_step, f"nothing has moved for {_PATIENCE_S:.0f} seconds")

    def give_up(self, after_s: float = 0.0) -> None:
        """Wait for at most `after_s` seconds more for the checkpoint in progress."""
        if self._thread is not None:
            self._thread.join(after_s)
            self._is_given_up = self._thread.is_alive()

    def _write(self, snapshot: Snapshot) -> None:
        """Training goes on whatever goes wrong in here."""
        with contextlib.suppress(OSError, AttributeError):  # on Linux a thread can stand back behind training
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        sentence = (
            f"The checkpoint of step {snapshot.step} is still being written to {self._storage.address} after "
            f"{_SLOW_S:.0f} seconds. Training goes on; the next checkpoint waits for it."
        )
        slow = threading.Timer(_SLOW_S, self._say, [sentence])
        slow.daemon = True
        slow.start()
        try:
            receipts = gather_objects(self._write_file(snapshot), self._writers, [_Receipt])
            problem = "" if receipts is None else self._commit(snapshot, receipts)
            problem = broadcast_object(problem, self._writers)
        except RuntimeError:  # torch's, where a connection has ended
            problem = "another worker has ended meanwhile"
        finally:
            slow.cancel()
        self._tell(snapshot.step, problem)
        if not problem:
            self.written_step = snapshot.step

    def _file_name(self, rank: int) -> str:
        kind = "rescue" if self._is_rescue else f"worker-{rank:05d}"  # only the latter are ever removed
        return f"{kind}-{self._run}{self._num_begun}.safetensors"

    def _write_file(self, snapshot: Snapshot) -> _Receipt:
        """Write this worker's data file."""
        path = f"{folder_name(snapshot.step)}/{self._file_name(self._rank)}"
        try:
            self._storage.write(path, self._moving(self._staged.pieces()))
        except Exception as problem:  # the others would wait for this worker
            return _Receipt(_reason(problem))
        shared = dict(snapshot.shared) if snapshot.is_part else {}
        return _Receipt("", self._staged.num_bytes, self._staged.checksums(), dict(snapshot.own), shared)

    def _moving(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        """Passes bytes on and notes the time."""
        for piece in pieces:
            yield piece
            self._moved_at_s = time.monotonic()

    def _commit(self, snapshot: Snapshot, receipts: Sequence[_Receipt]) -> str:
        """Make a checkpoint of what all workers have written; returns what went wrong, with nothing left of it."""
        folder = folder_name(snapshot.step)
        failed = [rank for rank, one in enumerate(receipts) if one.problem]
        try:
            if not failed:
                manifest = self._manifest(snapshot, receipts)
                self._storage.write(f"{folder}/{MANIFEST_FILE}", [manifest.dump()])
                self._tidy(folder, manifest)
                return ""
            reason = f"worker {failed[0]} says: {receipts[failed[0]].problem}" if failed[0] else receipts[0].problem
        except Exception as problem:  # the others wait for this worker
            reason = _reason(problem)
        with contextlib.suppress(OSError):
            if MANIFEST_FILE not in self._storage.names(folder):
                self._storage.remove(folder)
        return reason

    def _manifest(self, snapshot: Snapshot, receipts: Sequence[_Receipt]) -> Manifest:
        assert self._plan is not None
        values = dict(snapshot.shared)
        tensors: dict[str, TensorEntry] = {}
        chunks: dict[str, list[StoredSlice]] = {}
        for rank, (receipt, slices) in enumerate(zip(receipts, self._plan.slices, strict=True)):
            values = _merged(values, receipt.shared)
            for key, one in slices.items():
                stored = StoredSlice(
                    one.place.offsets, one.place.sizes, self._file_name(rank), key, receipt.checksums[key]
                )
                chunks.setdefault(one.name, []).append(stored)
                tensors[one.name] = TensorEntry(one.dtype, one.shape, ())
        return Manifest(
            step=snapshot.step,
            world_size=len(receipts),
            saved_at=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            versions={"paceline": __version__, "torch": str(torch.__version__)},
            job=snapshot.job,
            values=values,
            workers=tuple(receipt.own for receipt in receipts),
            files=tuple(DataFile(self._file_name(rank), one.num_bytes) for rank, one in enumerate(receipts)),
            tensors={name: replace(entry, chunks=tuple(chunks[name])) for name, entry in tensors.items()},
        )

    def _tidy(self, folder: str, manifest: Manifest) -> None:
        """Clean up after a complete checkpoint; a failure here must not undo it."""
        if self._is_rescue:
            return
        new = KnownCheckpoint(folder, manifest.saved_at_s, manifest.metrics)
        self._known = [one for one in self._known if one.name != folder] + [new]
        keep, files = wanted(self._known, self._spec), {file.name for file in manifest.files}
        try:
            for file in self._storage.names(folder):
                if file.startswith("worker-") and file not in files:  # of an earlier attempt
                    self._storage.remove(f"{folder}/{file}")
            self._storage.write(LATEST_FILE, [f"{folder}\n".encode()])
            for one in [one for one in self._known if one.name not in keep]:
                self._storage.remove(one.name)
                self._known.remove(one)
            if (best := best_of(self._known, self._spec)) is not None:
                self._storage.write(BEST_FILE, [f"{best}\n".encode()])
        except OSError as problem:
            self._say(
                f"The checkpoint of step {manifest.step} is complete, but older ones in {self._storage.address} could "
                f"not be removed: {reason_of(problem)}. Training goes on."
            )

    def _tell(self, step: int | None, problem: str) -> None:
        """Tell the user of a problem once, however often it comes in a row: a full disk stays full for a while."""
        self._problem = problem
        if problem and problem != self._told:
            self._say(
                f"The checkpoint of step {step} could not be written to {self._storage.address}: {problem}. Training "
                "goes on, earlier checkpoints are not touched, and later ones are tried."
            )
        self._told = problem


def _flattened(state: Mapping[str, Any], path: str = "") -> tuple[Any, dict[str, Tensor]]:
    try:
        return flatten(state, path)
    except TypeError as problem:
        raise CheckpointError(f"A checkpoint cannot hold this state: {problem}.") from None


def _reason(problem: Exception) -> str:
    if not isinstance(problem, OSError | PacelineError):  # a bug keeps its traceback
        traceback.print_exc()
    return reason_of(problem) or type(problem).__name__


def _merged(some: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """The entries of both, in dictionaries in them too; of what both have, those of `some`."""
    found = some.copy()
    for key, value in others.items():
        mine = found.setdefault(key, value)
        if isinstance(mine, dict) and isinstance(value, dict):
            found[key] = _merged(mine, value)
    return found


# --- what a worker writes: planned by all workers together, and staged in host memory as one file ---


@dataclass(frozen=True)
class PlannedSlice:
    """A slice of a tensor that one worker writes."""

    name: str
    """The tensor's name in the state."""
    dtype: str
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    place: Slice
    index: tuple[slice, ...]
    """Where the slice lies in what the worker holds of the tensor."""


@dataclass(frozen=True)
class WritePlan:
    """Which worker writes what, so that each number is written by exactly one; valid while they hold the same."""

    held: tuple[_Held, ...]
    """What this worker holds."""
    slices: tuple[dict[str, PlannedSlice], ...]
    """Slices by rank and by their names in the file: those of all workers on rank 0, of this worker alone on others."""


def plan_writes(
    state: Mapping[str, Tensor], group: dist.ProcessGroup | None, before: WritePlan | None = None
) -> WritePlan:
    """Decide which worker writes what of `state`. A collective of `group`, whose backend handles host memory. Raises
    `CheckpointError` for a dtype that the format lacks.

    Tensors that all workers have are distributed evenly by size; of a sharded tensor (a DTensor) every worker writes
    its own shard; what only one worker has, that worker writes.

    Args:
        before: the plan of an earlier state. It is returned again unless some worker holds other tensors now.
    """
    own = tuple(_held(name, tensor) for name, tensor in state.items())
    if before is not None and not any(all_gather_objects(own != before.held, group)):
        return before
    rank = 0 if group is None else dist.get_rank(group)
    gathered = all_gather_objects(own, group)
    holders: dict[_Held, list[int]] = {}
    for worker, tensors in enumerate(gathered):
        for held in tensors:
            holders.setdefault(held, []).append(worker)
    num_bytes = [0] * len(gathered)
    """What each worker writes."""
    slices: tuple[dict[str, PlannedSlice], ...] = tuple({} for _ in gathered)
    for (name, dtype, shape, offsets, sizes), workers in holders.items():
        outer = Slice(offsets, sizes)
        for inner in _row_slices(outer, DTYPES[dtype].itemsize):
            writer = min(workers, key=num_bytes.__getitem__)
            num_bytes[writer] += math.prod(inner.sizes) * DTYPES[dtype].itemsize
            if rank in (0, writer):
                # The name of a slice in the file, or of what looks like one, also says where the slice begins.
                is_whole = inner.sizes == shape and "@" not in name
                key = name if is_whole else f"{name}@{','.join(map(str, inner.offsets))}"
                slices[writer][key] = PlannedSlice(name, dtype, shape, inner, inner.slices_in(outer))
    return WritePlan(own, slices)


def _held(name: str, tensor: Tensor) -> _Held:
    if tensor.dtype not in _NAMES or tensor.layout != torch.strided:
        kind = f"{tensor.dtype}, {tensor.layout}"
        raise CheckpointError(f"A checkpoint cannot hold the tensor '{name}' ({kind}); keep it out of the state.")
    shape = tuple(tensor.shape)
    offsets, sizes = shard_slice(tensor) if is_dtensor(tensor) else ((0,) * tensor.dim(), shape)
    return name, _NAMES[tensor.dtype], shape, offsets, sizes


def _row_slices(outer: Slice, itemsize: int) -> Iterator[Slice]:
    """A slice, or slices of its rows that are not too large."""
    num_bytes = math.prod(outer.sizes) * itemsize
    if num_bytes <= _MOST_SLICE_BYTES:
        yield outer
        return
    (first, *offsets), (num_rows, *sizes) = outer.offsets, outer.sizes
    step = max(1, _MOST_SLICE_BYTES * num_rows // num_bytes)
    for start in range(0, num_rows, step):
        yield Slice((first + start, *offsets), (min(step, num_rows - start), *sizes))


class StagedFile:
    """A block of host memory that holds the data file of one worker, in the safetensors format: eight bytes that say
    how long the header is, a JSON header with the dtype, shape and place of every tensor, then the numbers.

    Training waits only while tensors are copied into the block; what is written later comes straight from there, so
    nothing is copied twice, and the block serves every checkpoint of a run.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._places: dict[str, tuple[int, int]] = {}
        """Where each tensor begins and ends in the block."""

    def stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors of any shape into the block; when this returns, they may change."""
        header, self._places, num_bytes = _layout(tensors)
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        if len(self._block) != num_bytes:
            self._block = torch.empty(0, dtype=torch.uint8)  # two would be one too many
            # A forked process (a data loader) shares a mapping, where it would leave pages to be copied at each write.
            if on_gpu:
                self._block = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            else:
                self._block = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        self._block[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        for name, tensor in tensors.items():
            start, stop = self._places[name]
            place = self._block[start:stop].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()

    @property
    def num_bytes(self) -> int:
        return len(self._block)

    def pieces(self) -> Iterator[memoryview]:
        """The bytes of the file, in pieces of limited size."""
        whole = self._block.numpy().data
        for start in range(0, self.num_bytes, _PIECE_BYTES):
            yield whole[start : start + _PIECE_BYTES]

    def checksums(self) -> dict[str, str]:
        """The CRC-32 of each tensor's bytes, by its name."""
        whole = self._block.numpy().data
        return {name: checksum(whole[start:stop]) for name, (start, stop) in self._places.items()}


def _layout(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, tuple[int, int]], int]:
    """The header, where each tensor begins and ends in the file, and the length of the file in bytes.

    The format allows no gaps between tensors: the widest dtypes come first, and among them the tensors that fill whole
    cache lines, so that all are aligned to their dtype and almost all bytes to cache lines.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[1].nbytes % _ALIGNMENT != 0))
    entries: dict[str, object] = {}
    places, end = {}, 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        places[name] = start, end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, {k: (len(header) + i, len(header) + j) for k, (i, j) in places.items()}, len(header) + end
