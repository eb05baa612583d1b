"""Evaluation that counts every sample exactly once, on any number of devices, to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.data.order import EpochOrder
from paceline.errors import ModelError
from paceline.object_collectives import broadcast_object
from paceline.train.process_group import World

Measure = Callable[[nn.Module, Any], dict[str, Tensor]]
"""measure(model, batch): for every metric one value per sample, of shape (samples in batch,)."""


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """A context in which `model` is in evaluation mode; restores each module's mode, as some may be frozen."""
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in was_training:
            module.training = True


def own_chunks(num_chunks: int, rank: int, num_assignments: int, *, in_step: bool) -> list[int]:
    """Numbers of the chunks that worker `rank` of `num_assignments` evaluates; rank 0 has one if any rank has.

    Args:
        in_step: whether all ranks must compute equally many because each chunk has collectives: a rank with fewer
            repeats chunks of the next rank.
    """
    first, last = (-(-one * num_chunks // num_assignments) for one in (rank, rank + 1))
    most = -(-num_chunks // num_assignments)
    return [number % num_chunks for number in range(first, first + most if in_step else last)]


def evaluate(
    batches: Iterable[tuple[int, Any]],
    chunks: EpochOrder,
    given: Collection[int],
    model: nn.Module,
    measure: Measure,
    world: World,
) -> dict[str, float]:
    """Mean of every metric over all samples.

    Each chunk is summed in float64 by its worker. The sums are all-reduced as a table with a row for each chunk, which
    one worker fills (adding zeros is exact), and the rows are added in order, so the result does not depend on the
    assignment.

    Args:
        batches: the chunks that this worker computes, with their numbers.
        chunks: the samples of every chunk.
        given: the numbers of the chunks whose rows this worker fills; each belongs to one worker.

    Raises:
        ModelError: a metric that is not one value per sample.
    """
    sums: dict[int, dict[str, float]] = {}
    for number, batch in batches:
        values = measure(model, batch)
        sums[number] = {name: _chunk_sum(name, value, len(chunks.batch(number))) for name, value in values.items()}
    names = _agreed_names(list(next(iter(sums.values()), {})), world)
    table = torch.zeros(chunks.num_batches, len(names), dtype=torch.float64, device=world.device)
    for number in given:
        table[number] = torch.tensor([sums[number][name] for name in names], dtype=torch.float64)
    if world.group is not None:
        dist.all_reduce(table, group=world.group)
    totals = [sum(column) for column in table.t().tolist()]
    return {name: total / chunks.num_samples for name, total in zip(names, totals, strict=True)}


def _chunk_sum(name: str, value: Tensor, num_samples: int) -> float:
    if not isinstance(value, Tensor) or value.shape != (num_samples,):
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ModelError(f"The metric '{name}' should be one value per sample, shape ({num_samples},), but is {got}.")
    return float(value.detach().to("cpu", torch.float64).sum())


def _agreed_names(names: list[str], world: World) -> list[str]:
    """Rank 0's metric names; it always has a chunk, others may not."""
    agreed: list[str] = broadcast_object(names, world.group)
    return agreed
