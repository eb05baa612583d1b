"""`dp_one_process`: one process drives several devices, as textbooks describe data parallelism.

Every step: replicate the parameters from the first device, scatter the batch, compute forward and backward on every
device, gather the losses, and sum the gradients on the first device, which alone updates. The devices are given their
work in turn, since the random generators of the host, which are seeded for every virtual shard, belong to the process;
GPUs still compute side by side, as far as the host does not wait for them. (Zhang et al.,
"Dive into Deep Learning", section 13.5; torch's `nn.DataParallel` differs in that it gathers outputs, so that
one device computes all of the loss, and in that it refuses CPU.)

Prefer a process for each device. Here one Python interpreter launches the kernels of all devices; every step
copies all parameters to every device; and the first device holds the gradients, and the optimizer's state, of all,
while nothing that travels hides behind computing.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.containers import to_device
from paceline.errors import JobError, ModelError
from paceline.parallel.assignment import Assignment, shards_of_rank
from paceline.parallel.audit import audit
from paceline.parallel.clock import mark
from paceline.parallel.dtensor import rescale_gradients
from paceline.parallel.engine import Engine, StepInput
from paceline.parallel.gradients.gradient_norms import GradientNorms, mean_of_squares, squared_gradient_norm
from paceline.parallel.losses import LossLayouts, StepLoss
from paceline.parallel.passes import Passed, Passes
from paceline.spec import Job, Plan


def devices_of_process(plan: Plan, first: torch.device) -> tuple[torch.device, ...]:
    """The devices that one worker drives: GPUs from `first` on, or CPU threads.

    Raises:
        JobError: more GPUs than this process sees.
    """
    count = plan.devices_in_process
    if first.type != "cuda":
        return (first,) * count
    start = first.index or 0
    if start + count > torch.cuda.device_count():
        raise JobError(
            f"dp_one_process should drive {count} GPUs from GPU {start} on, but this process sees "
            f"{torch.cuda.device_count()}; use fewer devices."
        )
    return tuple(torch.device("cuda", start + place) for place in range(count))


def describe_one_process(num_devices: int) -> str:
    """Notes for the run's log and report."""
    return (
        f"One process drives {num_devices} devices, one after the other, because the generators of random numbers, "
        "which belong to a virtual shard, are the process's."
    )


class OneProcessDataParallel(Engine):
    """Equal to one device up to rounding; the first device holds the model itself, the others copies of it."""

    def __init__(self, model: nn.Module, job: Job, devices: Sequence[torch.device]) -> None:
        """
        Raises:
            JobError: parity = "bitwise", as devices' gradients are added in an order of their own.
        """
        if job.parity == "bitwise":
            raise JobError(
                "parity = 'bitwise' needs the strategy dp: dp_one_process is equal up to rounding only; use "
                "parity = 'numeric'."
            )
        first, *others = devices
        super().__init__(model, first, LossLayouts(None))
        self.notes = (describe_one_process(len(devices)),)
        models = [self.module, *(_copied(self.module).to(device) for device in others)]
        self._replicas = [
            _Replica(model, device, Passes(model, device, self.layouts))
            for model, device in zip(models, devices, strict=True)
        ]
        self.passes = self._replicas[0].passes
        self.buffers = self.passes.buffers

    def gradients(self, step: StepInput) -> StepLoss:
        assignments = _divide(step.assignment, len(self._replicas))
        busy = self._replicas[: len(assignments)]
        for replica in busy[1:]:
            replica.take_over(self.module)
        statistics = [
            self._compute(replica, step, assignment) for replica, assignment in zip(busy, assignments, strict=True)
        ]
        last_gradient = mark(self._device)
        small_sqrs = [squared_gradient_norm(replica.module) for replica in busy] if step.take_norms is not None else []
        for replica in busy[1:]:
            replica.add_gradients_to(self.module)
        every = torch.stack([one.to(self._device) for one in statistics])
        layout = self.layouts.of(step.loss_name)
        losses, moved = every.sum(0).split([layout.length, self.buffers.num_sums])
        self.buffers.combine(moved, functools.partial(_sum_moves, busy), lambda _values: None)
        result = StepLoss.of(losses, layout)
        rescale_gradients(self.module.parameters(), result.rescale)
        self.communication = last_gradient, mark(self._device)
        if step.take_norms is not None and len(busy) > 1:
            size = step.assignment.global_size
            parts = [*every[:, 1]] if layout.is_weighted else [sum(one.sizes) / size for one in assignments]
            means = [
                mean_of_squares(squared.to(self._device), part, result.rescale)
                for squared, part in zip(small_sqrs, parts, strict=True)
            ]
            large_sqr = squared_gradient_norm(self.module)
            step.take_norms(GradientNorms(torch.stack(means).sum(), size / len(busy), large_sqr, size))
        return result

    def audit(self, step: StepInput) -> None:
        audit(self.passes, step, None)

    def _compute(self, replica: _Replica, step: StepInput, assignment: Assignment) -> Tensor:
        """One device's part of a step: returns [losses, what buffers were moved by], leaves gradients with the
        replica."""
        passes = replica.passes
        with torch.cuda.device(replica.device) if replica.device.type == "cuda" else nullcontext():
            passed = Passed()
            for _, loss in passes.losses(_on_device(step, assignment, replica.device), replica.module):
                passed.add(loss)
                passes.backward(step, loss)
            if all(parameter.grad is None for parameter in replica.module.parameters()):
                raise ModelError(
                    "The loss did not go through the model that the loss function is given, which is another one on "
                    "each device of dp_one_process; call that model."
                )
            losses = passed.losses
            assert losses is not None  # a busy device has a shard
            return torch.cat([losses, passes.buffers.collect(losses)])


@dataclass(frozen=True)
class _Replica:
    """The model on one device."""

    module: nn.Module
    device: torch.device
    passes: Passes

    @torch.no_grad()
    def take_over(self, model: nn.Module) -> None:
        """Parameters, buffers, modes and settings (a dropout rate) of `model`; no gradients."""
        for mine, theirs in zip(self.module.modules(), model.modules(), strict=True):
            settings = {key: value for key, value in vars(theirs).items() if isinstance(value, bool | int | float)}
            vars(mine).update(settings)
        for own, other in zip(self.module.parameters(), model.parameters(), strict=True):
            own.copy_(other, non_blocking=True)
            own.requires_grad_(other.requires_grad)
            own.grad = None
        for kept, current in zip(self.module.buffers(), model.buffers(), strict=True):
            kept.copy_(current, non_blocking=True)
        self.passes.buffers.begin_step()

    @torch.no_grad()
    def add_gradients_to(self, model: nn.Module) -> None:
        for own, sum_ in zip(self.module.parameters(), model.parameters(), strict=True):
            if own.grad is None:
                continue
            gradient = own.grad.to(sum_.device, non_blocking=True)
            sum_.grad = gradient if sum_.grad is None else sum_.grad.add_(gradient)
            own.grad = None


def _copied(model: nn.Module) -> nn.Module:
    """A copy of a model for another device.

    Raises:
        ModelError: the copy would not train as the model does.
    """
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ModelError(
                f"The parameter '{name}' has a hook on its gradient, which its copies on other devices would not have; "
                "choose the strategy dp."
            )
    try:
        return copy.deepcopy(model)
    except RuntimeError as problem:  # torch copies no tensors that autograd has made
        raise ModelError(
            "The model cannot be copied to other devices: it holds a tensor that was computed, as the weight that "
            "torch.nn.utils.weight_norm or prune makes; use torch.nn.utils.parametrizations, or the strategy dp."
        ) from problem


def _sum_moves(replicas: Sequence[_Replica], numbers: list[int]) -> Tensor:
    moves = [replica.passes.buffers.moves(numbers) for replica in replicas]
    return torch.stack([one.to(moves[0].device) for one in moves]).sum(0)


def _divide(assignment: Assignment, num_devices: int) -> list[Assignment]:
    """The worker's shards over its devices, neighbours together; fewer devices where there are fewer shards."""
    start, stop = assignment.own
    num_busy = min(num_devices, stop - start)
    own = [shards_of_rank(device, num_busy, stop - start) for device in range(num_busy)]
    of_devices = tuple((start + begin, start + end) for begin, end in own)
    return [dataclasses.replace(assignment, shards_of_rank=of_devices, rank=device) for device in range(num_busy)]


def _on_device(step: StepInput, part: Assignment, device: torch.device) -> StepInput:
    """The step of one device, whose samples are moved there when the loss function is called."""
    return dataclasses.replace(
        step,
        assignment=part,
        batch=step.batch.beyond(part.span[0] - step.assignment.span[0]),
        loss_of=lambda model, content: step.loss_of(model, to_device(content, device)),
    )
