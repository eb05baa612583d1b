"""Saving: training waits for a copy in memory, a thread writes it down, and rank 0 says when all is there.

Every worker writes its own part and, when that is safe on the storage, a receipt. Rank 0 waits for all receipts and
writes the manifest, which makes a checkpoint of the folder; then it removes what is no longer wanted. No worker waits
for another one, and nothing travels but names and sizes, so a worker that dies can only leave a folder without a
manifest. Whatever the storage does, training goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch.distributed as dist

from paceline.checkpoint.load import folder_name, list_unfinished, worker_prefix
from paceline.checkpoint.manifest import MANIFEST_FILE, Manifest, PartFile
from paceline.checkpoint.part import Part, Summed
from paceline.checkpoint.retention import prune
from paceline.checkpoint.share import divide, part_name
from paceline.checkpoint.storage import Storage
from paceline.checkpoint.tree import take_apart
from paceline.errors import PacelineError
from paceline.spec.codec import from_mapping, to_mapping
from paceline.spec.job import CheckpointSpec

LATEST_FILE = "latest"
"""Names the newest checkpoint, for people and scripts; nothing here relies on it."""

_LOOK_S = 0.01
"""How often rank 0 looks for receipts."""

_NICENESS = 10
"""Writing gives way to training."""


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint is made of, as tensors in dictionaries; the same tree on every worker but for `own`."""

    step: int
    job: dict[str, Any]
    shared: Mapping[str, Any]
    """What all workers have alike, or each a shard of."""
    own: Mapping[str, Any]
    """What only this worker has."""


@dataclass(frozen=True)
class _Receipt:
    file: PartFile
    values: dict[str, Any]
    run: str


class Saver:
    """One worker's side of all checkpoints of a run."""

    def __init__(
        self,
        storage: Storage,
        spec: CheckpointSpec,
        group: dist.ProcessGroup | None,
        say: Callable[[str], None],
    ) -> None:
        """A common act of all workers of `group`, whose backend has to carry plain objects.

        Args:
            say: told a sentence when a checkpoint could not be written, on rank 0, from another thread.
        """
        self._storage = storage
        self._spec = spec
        self._group = group
        self._say = say
        self._rank = 0 if group is None else dist.get_rank(group)
        self._world_size = 1 if group is None else dist.get_world_size(group)
        # Workers of an earlier run may still be writing somewhere: their receipts carry another name.
        names = [f"{time.time_ns():x}"]
        if group is not None:
            dist.broadcast_object_list(names, group_src=0, group=group)
        self._run = names[0]
        self._part = Part()
        self._thread: threading.Thread | None = None
        self._given_up = threading.Event()
        self._problem: str | None = None
        self.last_step: int | None = None
        """Of the newest checkpoint that was begun."""
        self.stalls_s: list[float] = []
        """For how long training waited, each time."""
        if self._rank == 0:
            self._remove_unfinished()

    @property
    def busy(self) -> bool:
        """Whether this worker is still writing."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether this worker could not write its part of the newest checkpoint."""
        return self._problem is not None

    def begin(self, snapshot: Snapshot) -> None:
        """Copy `snapshot`, and write it down in the background. A common act of all workers; nobody may be busy.

        Raises:
            CheckpointError: something in it that a checkpoint cannot hold.
        """
        began = time.perf_counter()
        self._given_up.clear()
        self._problem = None
        self.last_step = snapshot.step
        values, tensors = take_apart(snapshot.shared)
        own_values, own_tensors = take_apart(snapshot.own, worker_prefix(self._rank))
        share = divide(tensors | own_tensors, self._group)
        self._part.stage(share.tensors)
        manifest = None
        if self._rank == 0:
            manifest = Manifest(
                step=snapshot.step,
                world_size=self._world_size,
                saved_at=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
                versions={name: version(name) for name in ("paceline", "torch")},
                job=snapshot.job,
                values=values,
                tensors=share.entries,
            )
        self._thread = threading.Thread(
            target=self._write, args=(snapshot.step, own_values, manifest), name="checkpoint", daemon=True
        )
        self._thread.start()
        self.stalls_s.append(time.perf_counter() - began)

    def wait(self) -> None:
        """Until this worker has written what it is writing."""
        if self._thread is not None:
            self._thread.join()

    def give_up(self) -> None:
        """Another worker could not write its part: do not wait for it."""
        self._given_up.set()

    def _write(self, step: int, own_values: dict[str, Any], manifest: Manifest | None) -> None:
        folder = folder_name(step)
        with contextlib.suppress(OSError, AttributeError):  # on Linux a thread can be made to stand back
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            summed = Summed(self._part.pieces())
            self._storage.write(f"{folder}/{part_name(self._rank)}", summed)
            receipt = _Receipt(summed.file(part_name(self._rank)), own_values, self._run)
            if manifest is None:
                self._storage.write(f"{folder}/{_receipt_name(self._rank)}", [json.dumps(to_mapping(receipt)).encode()])
            else:
                self._commit(folder, manifest, receipt)
        except (OSError, PacelineError) as problem:
            self._problem = str(problem)
            if manifest is not None:
                self._say(
                    f"The checkpoint of step {step} could not be written to {self._storage.address}: {problem}. "
                    "Training goes on; earlier checkpoints are still there."
                )
                with contextlib.suppress(OSError):
                    self._storage.remove(folder)

    def _commit(self, folder: str, manifest: Manifest, own: _Receipt) -> None:
        receipts = [own, *(self._receipt(folder, rank) for rank in range(1, self._world_size))]
        complete = Manifest(
            **{
                **vars(manifest),
                "files": tuple(receipt.file for receipt in receipts),
                "workers": tuple(receipt.values for receipt in receipts),
            }
        )
        self._storage.write(f"{folder}/{MANIFEST_FILE}", [complete.dump()])
        for rank in range(1, self._world_size):
            self._storage.remove(f"{folder}/{_receipt_name(rank)}")
        self._storage.write(LATEST_FILE, [f"{folder}\n".encode()])
        prune(self._storage, self._spec)

    def _receipt(self, folder: str, rank: int) -> _Receipt:
        while not self._given_up.wait(_LOOK_S):
            try:
                receipt = from_mapping(_Receipt, json.loads(self._storage.read(f"{folder}/{_receipt_name(rank)}")))
            except FileNotFoundError:
                continue
            if receipt.run == self._run:
                return receipt
        raise OSError(f"worker {rank} or another one could not write its part; its log says why")

    def _remove_unfinished(self) -> None:
        try:
            for folder in list_unfinished(self._storage):
                self._storage.remove(folder)
        except OSError as problem:
            self._say(f"What an earlier run left in {self._storage.address} cannot be removed: {problem}.")


def _receipt_name(rank: int) -> str:
    return f"worker-{rank:05d}.json"
