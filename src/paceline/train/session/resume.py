"""Reading the newest good checkpoint, by all workers of a run together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint import newest_that, read_state
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.storage import Storage
from paceline.errors import CheckpointError, reason_of


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
        rank, num_workers = 0, 1
        if self.group is not None:
            rank, num_workers = dist.get_rank(self.group), dist.get_world_size(self.group)

        def needed(shared: dict[str, Any], owns: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
            if not _is_run(shared):
                return {}, owns
            mine = shared if self.wanted is None else self.wanted(shared)
            return mine, owns[rank : rank + 1] if len(owns) == num_workers else owns

        def read(name: str) -> tuple[str, Manifest, dict[str, Any], list[dict[str, Any]]]:
            manifest, (shared, owns) = read_state(self.storage, name, self.group, needed)
            return name, manifest, shared, owns

        try:
            found, problems = newest_that(read, self.storage, self.group)
        except OSError as failure:
            raise CheckpointError(reason_of(failure)) from None
        for problem in problems:
            self.say(problem)
        if found is None:
            if problems:
                self.say("There is no other checkpoint: the run starts from the beginning.")
            return None
        name, manifest, shared, owns = found
        if not _is_run(manifest.values):
            raise CheckpointError(f"{name} in {self.storage.address} was not saved by a run; begin in another folder.")
        if self.wanted is not None and any(manifest.workers):
            raise CheckpointError(
                f"{name} in {self.storage.address} holds state of each worker's own (means of weights that differed, "
                "or gradients not sent yet), from which a sharded model cannot resume; resume it with strategy = 'dp'."
            )
        own = owns[0] if len(manifest.workers) == num_workers else equal_part(owns, num_workers)
        return Found(name, {"job": manifest.job, **shared}, own)


def _is_run(shared: Mapping[str, Any]) -> bool:
    return {"progress", "models"} <= shared.keys()


def equal_part(owns: Sequence[dict[str, Any]], num_workers: int) -> dict[str, Any]:
    """What each of `num_workers` workers gets of the states of others: the sum over all workers of values under "sums"
    stays, and the mean of values under "means"."""
    return {
        "sums": _scaled_sum([own.get("sums", {}) for own in owns], 1 / num_workers),
        "means": _scaled_sum([own.get("means", {}) for own in owns], 1 / len(owns)),
    }


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
