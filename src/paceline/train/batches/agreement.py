"""Checks that all workers have the same data, weights and learning rates, before they train on with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.containers import tensors
from paceline.errors import DataError, DivergenceError
from paceline.object_collectives import all_gather_objects
from paceline.words import name_ranks


def check_same_order(digest: str | None, epoch: int | None, group: dist.ProcessGroup | None) -> None:
    """A collective at the beginning of every epoch and evaluation.

    Args:
        digest: the fingerprint of the order of samples on this worker.
        epoch: None: of an evaluation.

    Raises:
        DataError: on all workers, if workers have orders that differ.
    """
    digests = all_gather_objects(digest, group)
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if others:
        raise DataError(
            f"In {_where(epoch)} {name_ranks(others)} would read other samples than rank 0, or in another order; build "
            "the data set and the sampler alike on all workers, and draw from torch's, NumPy's or random's global "
            "generator only."
        )


def check_same_samples(content: Any, epoch: int | None, group: dist.ProcessGroup | None) -> None:
    """A collective at the beginning of every epoch and evaluation.

    Sums are compared up to rounding, since nodes may have other processors. Texts are not: they may be paths.

    Args:
        content: of samples with the same numbers on every worker.
        epoch: None: of an evaluation.

    Raises:
        DataError: on all workers, if their samples differ.
    """
    of_all = all_gather_objects([number for one in tensors(content) for number in _sums(one)], group)
    first = torch.tensor(of_all[0], dtype=torch.float64)
    others = [
        rank
        for rank, sums in enumerate(of_all)
        if len(sums) != len(first) or not torch.allclose(first.new_tensor(sums), first, rtol=1e-5, atol=0.0)
    ]
    if others:
        raise DataError(
            f"In {_where(epoch)} {name_ranks(others)} read other values than rank 0 in samples of the same numbers; "
            "build and split the data set after paceline.init, which seeds the global generators alike on all workers, "
            "or with a seed of its own, and leave it as it is: what the script writes into it, it writes on one worker."
        )


def _sums(tensor: Tensor) -> Iterator[float]:
    """The sum of the positive and of the negative numbers in a tensor, neither of which cancels, and of squares."""
    whole = torch.cat([one.flatten() for one in tensor.unbind()]) if tensor.is_nested else tensor.to_dense()
    numbers = (torch.view_as_real(whole) if whole.is_complex() else whole).detach().double().nan_to_num()
    yield from (float(numbers.clamp(min=0).sum()), float(numbers.clamp(max=0).sum()), float(numbers.square().sum()))


def _where(epoch: int | None) -> str:
    return "the evaluation" if epoch is None else f"epoch {epoch}"


def check_same_state(
    model: nn.Module, optimizer: Optimizer, group: dist.ProcessGroup | None, *, holds_all: bool
) -> None:
    """A collective after what may have changed weights or learning rates on one worker only.

    Args:
        holds_all: whether every worker holds all weights, so that sums of them are alike where they are.

    Raises:
        DivergenceError: on all workers, if these differ.
    """
    parameters = [parameter.detach() for parameter in model.parameters()] if holds_all else []
    sums = [torch.stack([one.double().sum(), one.double().square().sum()]) for one in parameters]
    weights = torch.stack(sums).flatten().tolist() if sums else []
    rates = [float(one["lr"]) for one in optimizer.param_groups]
    states = all_gather_objects([repr(weights), repr(rates)], group)
    for rank, state in enumerate(states):
        for what, mine, theirs in zip(("weights", "learning rates"), states[0], state, strict=True):
            if mine != theirs:
                raise DivergenceError(
                    f"Worker {rank} has other {what} than rank 0: something, such as a callback, changed them on some "
                    "workers only; do the same on every worker."
                )
