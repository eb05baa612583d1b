"""`dp_one_process`: one process drives several devices, as textbooks describe data parallelism.

Every step: copy the parameters from the first device, scatter the batch, compute forward and backward on every device,
and sum losses and gradients on the first device, which alone updates. (Zhang et al., "Dive into Deep Learning", section
13.5; torch's `nn.DataParallel` gathers outputs instead, so that one device computes all of the loss, and refuses CPUs.)

The devices are given their work in turn, since the random generators of the host, which are seeded for every virtual
shard, belong to the process; GPUs still compute side by side, as far as the host does not wait for them. Prefer a
process for each device, in which what travels hides behind computing.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import JobError
from paceline.parallel.blocks import copy_of_modules
from paceline.parallel.engine import Passes, Reducer
from paceline.parallel.layout import Layout
from paceline.parallel.step_input import StepInput, shards_of_rank
from paceline.spec import Plan
from paceline.tensors import to_device


class Copies:
    """Takes shards through copies of a model on several devices; the first device holds the model itself.

    Equal to one device up to rounding.
    """

    def __init__(self, model: nn.Module, plan: Plan, first: torch.device) -> None:
        """
        Args:
            first: the others are the next GPUs, or the CPU again.

        Raises:
            JobError: the plan has more GPUs than this process sees.
        """
        start, count = first.index or 0, plan.devices_in_process
        if first.type == "cuda" and start + count > torch.cuda.device_count():
            raise JobError(
                f"dp_one_process should drive {count} GPUs from GPU {start} on, but this process sees "
                f"{torch.cuda.device_count()}; use fewer devices."
            )
        self.note = (
            f"One process drives {count} devices, one after the other, because the generators of random numbers, which "
            "belong to a virtual shard, are the process's."
        )
        others = [torch.device("cuda", start + place) if first.type == "cuda" else first for place in range(1, count)]
        self._copies = [(copy_of_modules(model, {}).to(device), device) for device in others]
        self._passes: list[Passes] = []

    def run(self, step: StepInput, passes: Passes, reducer: Reducer, layout: Layout) -> None:  # noqa: ARG002 - whole
        """The step's shards, device by device; leaves the sum of gradients on the first one."""
        if not self._passes:
            self._passes = [
                Passes(model, device, passes.layouts, passes.like.to(device), buffers=passes.buffers)
                for model, device in self._copies
            ]
        first, stop = step.assignment.own
        busy = [passes, *self._passes][: stop - first]
        for other in busy[1:]:
            _take_over(other.model, passes.model)
        for place, own in enumerate(busy):

            def loss_of(model: nn.Module, content: Any, device: torch.device = own.device) -> Any:
                return step.loss_of(model, to_device(content, device))

            here = replace(step, loss_of=loss_of)
            with torch.cuda.device(own.device) if own.device.type == "cuda" else nullcontext():
                for shard in range(*(first + bound for bound in shards_of_rank(place, len(busy), stop - first))):
                    own.enter(here, shard)
                    _copy(passes.model.buffers(), own.model.buffers())
                    loss = own.read(here, shard)
                    _copy(own.model.buffers(), passes.model.buffers())
                    statistics = own.statistics(here, shard, loss).to(passes.device)
                    reducer.forward_made(statistics, is_last=shard == stop - 1)
                    own.backward(here, loss)
                    if shard == first:
                        reducer.pass_made(0, loss)
        for other in busy[1:]:
            _add_gradients(other.model, passes.model)


@torch.no_grad()
def _copy(source: Iterable[Tensor], target: Iterable[Tensor]) -> None:
    for value, place in zip(source, target, strict=True):
        if value is not place:
            place.copy_(value, non_blocking=True)


@torch.no_grad()
def _take_over(mine: nn.Module, model: nn.Module) -> None:
    """Give a copy the parameters, modes and settings (a dropout rate) of `model`; no gradients."""
    for module, original in zip(mine.modules(), model.modules(), strict=True):
        settings = {key: value for key, value in vars(original).items() if isinstance(value, bool | int | float)}
        vars(module).update(settings)
    _copy(model.parameters(), mine.parameters())
    for own, other in zip(mine.parameters(), model.parameters(), strict=True):
        own.requires_grad_(other.requires_grad)
        own.grad = None


@torch.no_grad()
def _add_gradients(mine: nn.Module, model: nn.Module) -> None:
    """Add the gradients of a copy to those of `model`."""
    for own, total in zip(mine.parameters(), model.parameters(), strict=True):
        if own.grad is not None:
            gradient = own.grad.to(total.device, non_blocking=True)
            total.grad = gradient if total.grad is None else total.grad.add_(gradient)
            own.grad = None
