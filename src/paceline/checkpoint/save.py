"""Saving: training waits for a copy in memory, a thread writes the files, and rank 0 completes the checkpoint.

Every worker writes its own data file and, when that is safe on the storage, a receipt. Rank 0 waits for all receipts
and writes the manifest, which makes the folder a checkpoint; then it removes checkpoints that retention does not keep.
No worker waits for another one, and only names and sizes travel, so a worker that dies can only leave a folder without
a manifest. Whatever the storage does, training goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch.distributed as dist

from paceline import __version__
from paceline.checkpoint.data_file import ChecksumStream, StagedFile, data_file_name
from paceline.checkpoint.load import LATEST_FILE, folder_name, is_complete, list_unfinished, worker_prefix
from paceline.checkpoint.manifest import MANIFEST_FILE, DataFile, Manifest
from paceline.checkpoint.retention import discard, prune
from paceline.checkpoint.state_tree import flatten_state
from paceline.checkpoint.storage import Storage
from paceline.checkpoint.write_plan import WritePlan, plan_writes
from paceline.errors import PacelineError, reason_of
from paceline.object_collectives import broadcast_object
from paceline.spec.codec import from_mapping, to_mapping
from paceline.spec.job import CheckpointSpec

BEST_FILE = "best"
"""Names the best checkpoint by `keep_best`, likewise."""

_LOOK_S = 0.01
"""The interval at which rank 0 looks for receipts."""

_SLOW_S = 60.0
"""The user is told of a checkpoint that takes longer."""

_RANK_0_S = 5.0
"""After an error, the time that rank 0 has to complete a checkpoint that all workers had begun, or to discard it."""

_ALONE = "alone"
"""A folder in an abandoned checkpoint, made by the one worker that writes its files anew."""

_PATIENCE_S = 300.0
"""At the end of a run, a storage that has accepted nothing for so long is not waited for any more."""

_NICENESS = 10
"""Writing has a lower priority than training."""


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
    """What another worker reports to rank 0, through the storage."""

    attempt: str
    values: dict[str, Any]
    file: DataFile | None
    problem: str = ""
    """The reason why there is no file."""
    shared: dict[str, Any] | None = None
    """This worker's entries of the shared state, where workers have different ones (stages of a pipeline)."""


@dataclass(eq=False)
class _Writing:
    """The writing of one worker's data file of one checkpoint."""

    attempt: str
    """Names this checkpoint on all workers; the same step may be saved twice."""
    step: int
    manifest: Manifest | None
    """Only on rank 0, which completes the checkpoint."""
    own_values: dict[str, Any]
    shared: dict[str, Any] | None
    """This worker's entries of the shared state, where workers have different ones."""
    thread: threading.Thread | None = None
    given_up: threading.Event = field(default_factory=threading.Event)
    problem: str | None = None
    moved_at_s: float = field(default_factory=time.monotonic)

    @property
    def folder(self) -> str:
        return folder_name(self.step)

    def moving(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        """Passes bytes on and notes the time."""
        for piece in pieces:
            yield piece
            self.moved_at_s = time.monotonic()


class Saver:
    """Saves the checkpoints of a run; one on every worker."""

    def __init__(
        self,
        storage: Storage,
        spec: CheckpointSpec,
        group: dist.ProcessGroup | None,
        say: Callable[[str], None],
        *,
        cleans: bool = True,
    ) -> None:
        """A collective of all workers of `group`, whose backend handles host memory.

        Args:
            say: told a sentence when a checkpoint could not be written, on rank 0, from another thread.
            cleans: whether to remove what is unfinished there; nobody else may be writing then.
        """
        self._storage = storage
        self._spec = spec
        self._group = group
        self._say = say
        self._rank = 0 if group is None else dist.get_rank(group)
        self._world_size = 1 if group is None else dist.get_world_size(group)
        # Workers of an earlier run may still be writing somewhere: their receipts carry another name.
        self._run: str = broadcast_object(f"{time.time_ns():x}", group)
        self._versions = {"paceline": __version__, "torch": version("torch")}  # a checkout need not be installed
        self._part = StagedFile()
        self._write_plan: WritePlan | None = None
        self._writing: _Writing | None = None
        self._num_begun = 0
        self._good: tuple[str, ...] = ()
        """Checkpoints that were found good when others were last removed."""
        self._was_slow = False
        self._told: object = None
        """The kind of problem that the user was last told of."""
        self._is_given_up = False
        """Whether the storage accepted nothing of the newest checkpoint for too long."""
        self.last_step: int | None = None
        """The step of the newest checkpoint that was begun."""
        self.written_step: int | None = None
        """The step of the newest complete checkpoint; on other workers than rank 0, of their newest data file."""
        self.stalls_s: list[float] = []
        """How long training waited, for each checkpoint."""
        self._cleans = cleans
        if self._rank == 0 and cleans:
            self._remove_unfinished()

    @property
    def busy(self) -> bool:
        """Whether this worker is still writing."""
        thread = None if self._writing is None else self._writing.thread
        return thread is not None and thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether this worker could not write its data file of the newest checkpoint."""
        return self._is_given_up or (self._writing is not None and self._writing.problem is not None)

    def begin(self, snapshot: Snapshot) -> None:
        """Copy `snapshot`, and write it in the background. A collective of all workers; none of them may be busy.
        Raises `CheckpointError` for something that a checkpoint cannot hold."""
        began = time.perf_counter()
        self.last_step = snapshot.step
        self._is_given_up = False
        values, tensors = flatten_state(snapshot.shared)
        own_values, own_tensors = flatten_state(snapshot.own, worker_prefix(self._rank))
        state = tensors | own_tensors
        self._write_plan = plan_writes(state, self._group, self._write_plan)
        self._part.stage(self._write_plan.tensors_to_write(state))
        manifest = None
        if self._rank == 0:
            manifest = Manifest(
                step=snapshot.step,
                world_size=self._world_size,
                saved_at=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
                versions=self._versions,
                job=snapshot.job,
                values=values,
                tensors=self._write_plan.entries,
            )
        self._num_begun += 1
        attempt = f"{self._run}-{self._num_begun}"
        writing = _Writing(attempt, snapshot.step, manifest, own_values, values if snapshot.is_part else None)
        writing.thread = threading.Thread(
            target=self._write, args=(writing, self._part), name="checkpoint", daemon=True
        )
        self._writing = writing
        writing.thread.start()
        self.stalls_s.append(time.perf_counter() - began)

    def save_alone(self, snapshot: Snapshot) -> None:
        """Write `snapshot`, which has to be complete, without the other workers; unless one of them does so already,
        or all of them have written it."""
        folder = folder_name(snapshot.step)
        try:
            is_abandoned = snapshot.step == self.last_step and self._is_abandoned(folder)
            if not self._storage.claim(f"{folder}/{_ALONE}" if is_abandoned else folder):
                return
            for name in self._storage.names(folder):
                if name != _ALONE:
                    self._storage.remove(f"{folder}/{name}")
        except OSError:
            return
        alone = Saver(self._storage, self._spec, None, self._say, cleans=False)
        alone.begin(snapshot)
        alone.wait()

    def _is_abandoned(self, folder: str) -> bool:
        """Whether the checkpoint that all workers had begun has no manifest and will not get one."""
        deadline = time.monotonic() + _RANK_0_S
        while time.monotonic() < deadline:
            if is_complete(self._storage, folder) or folder not in self._storage.folders():  # rank 0 has discarded it
                return False
            time.sleep(_LOOK_S)
        return True

    def wait(self) -> None:
        """Wait until this worker has written its file, or the storage has accepted nothing for too long."""
        writing = self._writing
        if writing is None or writing.thread is None:
            return
        while writing.thread.is_alive():
            left_s = writing.moved_at_s + _PATIENCE_S - time.monotonic()
            if left_s > 0:
                writing.thread.join(left_s)
                continue
            writing.given_up.set()
            writing.thread.join(1.0)  # one that only waits for others ends by itself, and says why
            if writing.thread.is_alive():
                self._report_problem(writing, TimeoutError(f"nothing has moved for {_PATIENCE_S:.0f} seconds"))
                # That thread may wake up again, and should find what it had.
                self._part, self._writing = StagedFile(), None
                self._is_given_up = True
            return

    def give_up(self, after_s: float = 0.0) -> None:
        """Stop waiting after `after_s` seconds for a checkpoint that another worker could not write its file of."""
        if self._writing is not None:
            if self._writing.thread is not None:
                self._writing.thread.join(after_s)
            self._writing.given_up.set()

    def _write(self, writing: _Writing, part: StagedFile) -> None:
        """Training goes on whatever goes wrong in here."""
        with contextlib.suppress(OSError, AttributeError):  # on Linux a thread can be made to stand back
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        slow = threading.Timer(_SLOW_S, self._note_slowness, [writing])
        slow.daemon = True
        slow.start()
        try:
            name = data_file_name(self._rank)
            if writing.manifest is not None:
                self._make_room(writing.folder)
            summed = ChecksumStream(writing.moving(part.pieces()))
            self._storage.write(f"{writing.folder}/{name}", summed)
            receipt = _Receipt(writing.attempt, writing.own_values, summed.file(name), shared=writing.shared)
            if writing.manifest is None:
                self._hand_in(writing.folder, receipt)
            else:
                self._commit(writing, writing.manifest, receipt)
                self._told = None
                self._tidy(writing)
            # A thread that was given up may wake up after a later checkpoint was written.
            self.written_step = max(writing.step, self.written_step or 0)
        except Exception as problem:
            with contextlib.suppress(OSError):  # first: once this worker has failed, rank 0 does not wait for why
                if writing.manifest is None:
                    self._hand_in(writing.folder, _Receipt(writing.attempt, {}, None, reason_of(problem)))
                else:
                    self._discard(writing.folder)
            self._report_problem(writing, problem)
            if not isinstance(problem, OSError | PacelineError):
                raise
        finally:
            slow.cancel()

    def _make_room(self, folder: str) -> None:
        """Remove what earlier attempts left, and the manifest of this step, whose files are about to change."""
        for unfinished in list_unfinished(self._storage) if self._cleans else []:
            if unfinished != folder:  # there, others may have begun
                self._storage.remove(unfinished)
        self._storage.remove(f"{folder}/{MANIFEST_FILE}")

    def _hand_in(self, folder: str, receipt: _Receipt) -> None:
        self._storage.write(f"{folder}/{_receipt_name(self._rank)}", [json.dumps(to_mapping(receipt)).encode()])

    def _commit(self, writing: _Writing, manifest: Manifest, own: _Receipt) -> None:
        receipts = [own, *(self._receipt(writing, rank) for rank in range(1, self._world_size))]
        files = tuple(receipt.file for receipt in receipts if receipt.file is not None)
        values = manifest.values
        for receipt in receipts:
            values = values if receipt.shared is None else _merged(values, receipt.shared)
        workers = tuple(receipt.values for receipt in receipts)
        complete = dataclasses.replace(manifest, values=values, files=files, workers=workers)
        self._storage.write(f"{writing.folder}/{MANIFEST_FILE}", [complete.dump()])

    def _receipt(self, writing: _Writing, rank: int) -> _Receipt:
        given_up = False
        while not given_up:
            given_up = writing.given_up.wait(_LOOK_S)  # a last look follows: the other may have said why
            try:
                content = self._storage.read(f"{writing.folder}/{_receipt_name(rank)}")
                receipt = from_mapping(_Receipt, json.loads(content))
            except (FileNotFoundError, ValueError, AttributeError, PacelineError):
                continue  # not there yet, or another program's
            if receipt.attempt != writing.attempt:
                continue
            if receipt.file is None:
                raise OSError(f"worker {rank} says: {receipt.problem}")
            writing.moved_at_s = time.monotonic()
            return receipt
        raise OSError(f"nothing was heard from worker {rank}")

    def _tidy(self, writing: _Writing) -> None:
        """Clean up after a complete checkpoint; a failure here must not undo it."""
        try:
            for rank in range(1, self._world_size):
                self._storage.remove(f"{writing.folder}/{_receipt_name(rank)}")
            self._storage.write(LATEST_FILE, [f"{writing.folder}\n".encode()])
            pruning = prune(self._storage, self._spec, self._good)
            self._good = pruning.stay
            if pruning.best is not None:
                self._storage.write(BEST_FILE, [f"{pruning.best}\n".encode()])
        except (OSError, PacelineError) as problem:
            self._say(
                f"The checkpoint of step {writing.step} is complete, but older ones in {self._storage.address} could "
                f"not be removed: {reason_of(problem)}. Training goes on."
            )

    def _report_problem(self, writing: _Writing, problem: Exception) -> None:
        """Tell the user once for each kind of problem in a row: a full disk stays full for a while."""
        writing.problem = reason_of(problem)
        kind = (type(problem), getattr(problem, "errno", None))
        if kind != self._told:
            self._told = kind
            self._say(
                f"The checkpoint of step {writing.step} could not be written to {self._storage.address}: "
                f"{writing.problem}. Training goes on, earlier checkpoints are not touched, and later ones are tried."
            )

    def _note_slowness(self, writing: _Writing) -> None:
        if self._was_slow:
            return
        self._was_slow = True
        self._say(
            f"The checkpoint of step {writing.step} is still being written to {self._storage.address} after "
            f"{_SLOW_S:.0f} seconds. Training goes on; the next checkpoint waits for it."
        )

    def _discard(self, folder: str) -> None:
        if folder in self._storage.folders():  # a file of that name is somebody else's
            discard(self._storage, folder)

    def _remove_unfinished(self) -> None:
        try:
            for folder in list_unfinished(self._storage):
                self._storage.remove(folder)
        except OSError as problem:
            self._say(f"What an earlier run left in {self._storage.address} cannot be removed: {reason_of(problem)}.")


def _receipt_name(rank: int) -> str:
    return f"worker-{rank:05d}.json"


def _merged(some: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """The entries of both, in dictionaries in them too; of what both have, those of `some`."""
    found = dict(some)
    for key, value in others.items():
        mine = found.setdefault(key, value)
        if isinstance(mine, dict) and isinstance(value, dict):
            found[key] = _merged(mine, value)
    return found
