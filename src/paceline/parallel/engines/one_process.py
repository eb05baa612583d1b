"""`dp_one_process`: one process drives several devices, as textbooks describe data parallelism.

Every step: replicate the parameters from the first device, scatter the batch, let a thread for each device compute
forward and backward, gather the losses, and sum the gradients on the first device, which alone updates. (Zhang et al.,
"Dive into Deep Learning", section 13.5; torch's `nn.DataParallel` differs in that it gathers outputs, so that
one device computes all of the loss, and in that it refuses CPU.)

Prefer a process for each device. Here one Python interpreter launches the kernels of all devices in turn; every step
copies all parameters to every device; and the first device holds the gradients, and the optimizer's state, of all,
while nothing that travels hides behind computing.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.containers import to_device
from paceline.errors import JobError, ModelError
from paceline.parallel.assignment import Assignment, shards_of_rank
from paceline.parallel.batch_norm.norm import ShardBatchNorm, has_other_norms, replace_batch_norm
from paceline.parallel.clock import mark
from paceline.parallel.dtensor import rescale_gradients
from paceline.parallel.engine import Engine, StepInput
from paceline.parallel.gradients.gradient_norms import GradientNorms, mean_of_squares, squared_gradient_norm
from paceline.parallel.loss.loss_functions import LossFunctions
from paceline.parallel.losses import StepLoss
from paceline.parallel.micro_batch import MicroBatchLimit, is_out_of_memory
from paceline.parallel.shards.outcomes import Passed, StartOverError
from paceline.parallel.shards.passes import Passes
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
        f"One process drives {num_devices} devices; a model that draws random numbers (dropout) computes its shards "
        "on one device after the other, because the generators belong to the process."
    )


class OneProcessDataParallel(Engine):
    """Equal to one device up to rounding; the first device holds the model itself, the others copies of it.

    Dropout masks belong to virtual shards, but threads share the CPU's generator. So the first step goes from device to
    device, and so does every step once the model has been seen to draw random numbers.
    """

    def __init__(self, model: nn.Module, job: Job, plan: Plan, devices: Sequence[torch.device]) -> None:
        """
        Raises:
            JobError: parity = "bitwise", as devices' gradients are added in an order of their own; norm = "sync", whose
                statistics would have to be synchronised in the middle of all forward passes.
        """
        if job.parity == "bitwise":
            raise JobError(
                "parity = 'bitwise' needs the strategy dp: dp_one_process is equal up to rounding only; use "
                "parity = 'numeric'."
            )
        if job.norm == "sync":
            raise JobError(
                "norm = 'sync' needs the strategy dp: with dp_one_process no layer sees more than its own device's "
                "part of the batch; use norm = 'shard'."
            )
        first, *others = devices
        model = replace_batch_norm(model, ShardBatchNorm) if job.norm == "shard" else model
        super().__init__(model, first, LossFunctions(None))
        self.notes = (describe_one_process(len(devices)),)
        self._one_by_one = job.shard_by_shard
        self.micro_batch: MicroBatchLimit = MicroBatchLimit(plan, job)
        models = [self.module, *(_copied(self.module).to(device) for device in others)]
        self._replicas = [self._replica(model, device) for model, device in zip(models, devices, strict=True)]
        self.forward_buffers = self._replicas[0].passes.buffers
        self._threads = ThreadPoolExecutor(max(1, len(others)), "paceline-device")

    def close(self, error: BaseException | None = None) -> None:  # noqa: ARG002 - whatever it is
        self._threads.shutdown()

    def _replica(self, model: nn.Module, device: torch.device) -> _Replica:
        passes = Passes(
            model,
            device,
            self.functions,
            self.micro_batch,
            one_by_one=self._one_by_one,
            may_split=not has_other_norms(model),
            is_concurrent=True,
        )
        return _Replica(model, device, passes)

    def gradients(self, step: StepInput) -> StepLoss:
        notes = self._find_coupling(step)
        return self._replicas[0].passes.starting_over(step, lambda: self._attempt(step, notes))

    def _attempt(self, step: StepInput, notes: Sequence[str]) -> StepLoss:
        """`_train`; if memory ran out and may suffice for fewer shards at a time, `StartOverError`."""
        try:
            return self._train(step, notes)
        except (RuntimeError, MemoryError) as problem:
            most = max(replica.passes.num_shards_in_pass for replica in self._replicas)
            if not (self.micro_batch.is_automatic and most > 1 and is_out_of_memory(problem)):
                raise
        raise StartOverError(functools.partial(self._replicas[0].passes.halve, step.assignment))

    def _train(self, step: StepInput, notes: Sequence[str]) -> StepLoss:
        """Compute and aggregate the gradient; returns the loss."""
        assignments = _divide(step.assignment, len(self._replicas))
        busy = self._replicas[: len(assignments)]
        for replica in busy[1:]:
            replica.take_over(self.module)
        computing = [
            functools.partial(self._compute, replica, step, assignment)
            for replica, assignment in zip(busy, assignments, strict=True)
        ]
        statistics = self._run(computing)
        last_gradient = mark(self._device)
        small_sqrs = [squared_gradient_norm(replica.module) for replica in busy] if step.take_norms is not None else []
        for replica in busy[1:]:
            replica.add_gradients_to(self.module)
        every = torch.stack([one.to(self._device) for one in statistics])
        layout, num_buffers = self.functions.layout(step.loss_name), len(self.forward_buffers)
        norm = busy[0].passes.norm
        losses, values, weights, changed = every.sum(0).split([layout.length, *norm.lengths, num_buffers])
        norm.apply(values, weights)
        self.forward_buffers.combine(changed, functools.partial(_sum_moves, busy), lambda _values: None)
        result = StepLoss.of(losses, layout, [*notes, *self.functions.take_found_late()])
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

    def _find_coupling(self, step: StepInput) -> tuple[str, ...]:
        """What `Passes.find_coupling` finds, on the first device, of the shards of the last, which has the most."""
        first, last = self._replicas[0], _divide(step.assignment, len(self._replicas))[-1]
        return first.passes.find_coupling(_on_device(step, last, first.device), self.module)

    def _run(self, computing: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        """A thread for each device, this one for the first; an error is raised when none of them computes any more."""
        if self.functions.draws is not False:
            return [compute() for compute in computing]
        others = [self._threads.submit(compute) for compute in computing[1:]]
        try:
            mine = computing[0]()
        finally:
            wait(others)
        return [mine, *(other.result() for other in others)]

    def _compute(self, replica: _Replica, step: StepInput, assignment: Assignment) -> Tensor:
        """One device's part of a step: returns [loss, norm statistics, which buffers were changed], leaves gradients
        with the replica."""
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
            return torch.cat([losses, *passes.norm.collect(losses), *passes.buffers.changed(losses)])


@dataclass(frozen=True)
class _Replica:
    """The model on one device."""

    module: nn.Module
    device: torch.device
    passes: Passes

    @torch.no_grad()
    def take_over(self, model: nn.Module) -> None:
        """Parameters, buffers, modes and settings (a dropout rate) of `model`; no gradients, no norm statistics."""
        self.passes.norm.reset()
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
