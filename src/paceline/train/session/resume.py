"""Reading the newest good checkpoint, by all workers of a run together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint import newest_good, newest_that, read_together
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.storage import Storage
from paceline.errors import CheckpointError, reason_of
from paceline.object_collectives import broadcast_object, scatter_objects


@dataclass(frozen=True)
class Found:
    """The part of a checkpoint that this worker needs."""

    name: str
    shared: dict[str, Any]
    """The state common to all workers, and the job."""
    own: dict[str, Any]
    """The per-worker state, redistributed among the workers of this run."""


@dataclass(frozen=True)
class CheckpointReader:
    """Finds the checkpoint to resume from."""

    storage: Storage
    group: dist.ProcessGroup | None
    """All workers, using CPU memory; None: there is one worker."""
    say: Callable[[str], None]
    """Receives, on rank 0, messages about unusable checkpoints."""
    wanted: Callable[[dict[str, Any]], dict[str, Any]] | None
    """Maps the common state, not read yet, to the slices that this worker reads (`Trained.own_shards`); None: every
    worker holds all of it."""

    def newest(self) -> Found | None:
        """The newest good checkpoint. A collective.

        Raises:
            CheckpointError: there are checkpoints, and none is good.
        """
        if self.group is None or self.wanted is None:
            return self._read_on_rank_0()
        return self._read_shards(self.group, self.wanted)

    def _read_on_rank_0(self) -> Found | None:
        """Read and check the checkpoint on rank 0, and broadcast it."""
        name = why_not = shared = None
        owns: list[dict[str, Any]] = []
        if self.group is None or dist.get_rank(self.group) == 0:
            try:
                checkpoint, problems = newest_good(self.storage)
                self._tell(problems, is_found=checkpoint is not None)
                if checkpoint is not None:
                    self._check_is_run(checkpoint.name, checkpoint.manifest)
                    name = checkpoint.name
                    shared = {"job": checkpoint.manifest.job, **checkpoint.shared}
                    owns = [checkpoint.own(rank) for rank in range(checkpoint.manifest.world_size)]
            except (CheckpointError, OSError) as problem:
                name, why_not = None, reason_of(problem)
        name, why_not, shared = broadcast_object((name, why_not, shared), self.group)
        if why_not is not None:
            raise CheckpointError(why_not)
        if name is None:
            return None
        num_workers = 1 if self.group is None else dist.get_world_size(self.group)
        return Found(name, shared, scatter_objects(redistribute(owns, num_workers), self.group))

    def _read_shards(
        self, group: dist.ProcessGroup, wanted: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> Found | None:
        """Read each worker's shards; together they check every byte. There is no per-worker state."""

        def read(name: str) -> tuple[str, Manifest, dict[str, Any]]:
            return name, *read_together(
                self.storage, name, group, lambda shared: wanted(shared) if _is_run(shared) else {}
            )

        try:
            found, problems = newest_that(read, self.storage, group)
        except OSError as failure:
            raise CheckpointError(reason_of(failure)) from None
        self._tell(problems, is_found=found is not None)
        if found is None:
            return None
        name, manifest, shared = found
        self._check_is_run(name, manifest)
        if any(manifest.workers):
            raise CheckpointError(
                f"{name} in {self.storage.address} holds state of each worker's own (means of weights that differed, "
                "or gradients not sent yet), from which a sharded model cannot resume; resume it with strategy = 'dp'."
            )
        return Found(name, {"job": manifest.job, **shared}, {})

    def _tell(self, problems: Sequence[str], *, is_found: bool) -> None:
        for problem in problems:
            self.say(problem)
        if problems and not is_found:
            self.say("There is no other checkpoint: the run starts from the beginning.")

    def _check_is_run(self, name: str, manifest: Manifest) -> None:
        if not _is_run(manifest.values):
            raise CheckpointError(f"{name} in {self.storage.address} was not saved by a run; begin in another folder.")


def _is_run(shared: Mapping[str, Any]) -> bool:
    return {"progress", "models"} <= shared.keys()


def redistribute(owns: Sequence[dict[str, Any]], num_workers: int) -> list[dict[str, Any]]:
    """Redistribute the per-worker states of a checkpoint among `num_workers` workers.

    As many workers get the saved states. Another number gets equal amounts, which keep the sum over all workers of
    values under "sums", and the mean of values under "means".
    """
    if len(owns) == num_workers or not owns:
        return list(owns)
    each = {
        "sums": _scaled_sum([own.get("sums", {}) for own in owns], 1 / num_workers),
        "means": _scaled_sum([own.get("means", {}) for own in owns], 1 / len(owns)),
    }
    return [each] * num_workers


def _scaled_sum(values: Sequence[Any], factor: float) -> Any:
    """The sum of trees times a factor; integers and non-numbers are taken from the first tree."""
    first = values[0]
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for value in values for key in value)  # a worker without samples has no momentum yet
        return {key: _scaled_sum([value[key] for value in values if key in value], factor) for key in keys}
    if isinstance(first, list | tuple):
        return type(first)(_scaled_sum(items, factor) for items in zip(*values, strict=True))
    if isinstance(first, Tensor) and first.is_floating_point():
        return torch.stack([value.double() for value in values]).sum(0).mul_(factor).to(first.dtype)
    return sum(values) * factor if isinstance(first, float) else first
