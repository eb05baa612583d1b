"""`dp_one_process`: one process drives several devices, as the textbooks tell data parallelism.

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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from paceline.errors import JobError, ModelError
from paceline.parallel.assignment import Assignment, shard_run
from paceline.parallel.clock import Clock, Mark
from paceline.parallel.engine import EqualAfterEveryStep, HoldsAll, StepInput, check_loss, cut, statistics_dtype
from paceline.parallel.generators import generator_states
from paceline.parallel.gradient_norms import GradientNorms, squared_norm
from paceline.parallel.norm import NormStatistics, ShardBatchNorm, replace_batch_norm, unknown_buffers
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
    """What a reader of the result must know."""
    return (
        f"One process drives {num_devices} devices; a model that draws random numbers (dropout) computes its shards "
        "on one device after the other, because the generators belong to the process."
    )


class OneProcessDataParallel(EqualAfterEveryStep, HoldsAll):
    """Equal to one device up to rounding; the first device holds the model itself, the others copies of it.

    Masks belong to virtual shards, but threads share the CPU's generator. The very first step therefore goes from
    device to device, its first pass is one shard, and if that is seen to draw random numbers, every step goes shard by
    shard from device to device.
    """

    def __init__(self, model: nn.Module, job: Job, plan: Plan, devices: Sequence[torch.device]) -> None:
        """
        Raises:
            JobError: parity = "bitwise", as devices' gradients are added in an order of their own; norm = "sync", whose
                statistics would have to meet in the middle of all forward passes.
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
        self.module = replace_batch_norm(model, ShardBatchNorm) if job.norm == "shard" else model
        self._plan = plan
        first, *others = devices
        self._replicas = [_Replica(self.module, first)]
        self._replicas += [_Replica(copy.deepcopy(self.module).to(device), device) for device in others]
        self._dtype = statistics_dtype(self.module)
        # Where a norm's statistics depend on the device's share, it is not split for the sake of randomness.
        self._may_split = job.norm == "shard" or not any(isinstance(m, _BatchNorm) for m in model.modules())
        self._draws_randomness: bool | None = None
        self._clock = Clock(first)
        self._last_gradient = self._aggregated = self._clock.mark()
        self._threads = ThreadPoolExecutor(max(1, len(others)), "paceline-device")

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def gradients(self, step: StepInput) -> Tensor:
        shares = _spread(step.share, len(self._replicas))
        busy = self._replicas[: len(shares)]
        for replica in busy[1:]:
            replica.take_over(self.module)
        computing = [
            functools.partial(self._compute, replica, step, share) for replica, share in zip(busy, shares, strict=True)
        ]
        told = self._run(computing)
        self._last_gradient = self._clock.mark()
        small_sqrs = [replica.squared_norm() for replica in busy] if step.take_norms is not None else []
        for replica in busy[1:]:
            replica.add_gradients_to(self.module)
        summed = torch.stack([one.to(told[0].device) for one in told]).sum(0)
        busy[0].norm.apply(summed[1:])
        self._aggregated = self._clock.mark()
        if step.take_norms is not None and len(busy) > 1:
            step.take_norms(self._norms(step.share, shares, small_sqrs))
        return summed[0]

    def _run(self, computing: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        """A thread for each device, this one for the first; an error is raised when none of them computes any more."""
        if self._draws_randomness is not False:
            return [compute() for compute in computing]
        others = [self._threads.submit(compute) for compute in computing[1:]]
        try:
            mine = computing[0]()
        finally:
            wait(others)
        return [mine, *(other.result() for other in others)]

    def _compute(self, replica: _Replica, step: StepInput, share: Assignment) -> Tensor:
        """One device's part of a step: returns [loss, norm statistics], leaves gradients with the replica."""
        with torch.cuda.device(replica.device) if replica.device.type == "cuda" else nullcontext():
            batch = _to(cut(step.batch, *_within(step.share, share)), replica.device)
            losses = torch.zeros((), dtype=self._dtype, device=replica.device)
            replica.norm.shards.all = share.all_sizes
            next_shard, stop = share.runs[share.rank]
            while next_shard < stop:
                one_by_one = self._may_split and self._draws_randomness is not False
                piece = share.piece(next_shard, 1 if one_by_one else self._plan.micro_batch_size)
                next_shard += len(piece.sizes)
                replica.norm.shards.current = piece.sizes
                loss = self._forward(replica, step, piece.first_shard, cut(batch, piece.start, piece.stop))
                losses += loss.detach() * piece.weight
                with replica.norm.backward():
                    step.scale(loss * piece.weight).backward()
            replica.norm.shards.current = None
            if all(parameter.grad is None for parameter in replica.module.parameters()):
                raise ModelError(
                    "The loss did not go through the model that the loss function is given, which is another one on "
                    "each device of dp_one_process; call that model."
                )
            return torch.cat([losses.view(1), *replica.norm.collect(losses)])

    def _forward(self, replica: _Replica, step: StepInput, shard: int, part: Any) -> Tensor:
        if self._draws_randomness is False:
            return check_loss(step.loss_of(replica.module, part))
        step.seed_shard(shard)
        before = generator_states(replica.device) if self._draws_randomness is None else ()
        loss = check_loss(step.loss_of(replica.module, part))
        if self._draws_randomness is None:
            self._draws_randomness = before != generator_states(replica.device)
        return loss

    def _norms(self, whole: Assignment, shares: Sequence[Assignment], small_sqrs: Sequence[Tensor]) -> GradientNorms:
        """Gradients of the devices' parts and of the batch; the replicas held weight * gradient."""
        weights = [sum(share.sizes) / whole.global_size for share in shares]
        first = small_sqrs[0].device
        means = [sqr.to(first) / weight for sqr, weight in zip(small_sqrs, weights, strict=True)]
        large_sqr = self._replicas[0].squared_norm()
        return GradientNorms(torch.stack(means).sum(), whole.global_size / len(shares), large_sqr, whole.global_size)

    @property
    def changes_buffers(self) -> bool:
        return bool(unknown_buffers(self.module))

    def sync_buffers(self) -> bool:
        return True

    def shared_state(self) -> dict[str, Any]:
        return {"draws_randomness": self._draws_randomness}

    def own_state(self) -> dict[str, Any]:
        return {}

    def load_state(self, shared: dict[str, Any], own: dict[str, Any]) -> None:  # noqa: ARG002
        self._draws_randomness = shared.get("draws_randomness")

    @property
    def communication(self) -> tuple[Mark, Mark]:
        return self._last_gradient, self._aggregated


class _Replica:
    """The model on one device, with the statistics that its norm layers collect there."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module = module
        self.device = device
        self.norm = NormStatistics(module)

    @torch.no_grad()
    def take_over(self, model: nn.Module) -> None:
        """Parameters, buffers and modes of `model`; no gradients."""
        for mine, theirs in zip(self.module.modules(), model.modules(), strict=True):
            mine.training = theirs.training
        for own, other in zip(self.module.parameters(), model.parameters(), strict=True):
            own.copy_(other, non_blocking=True)
            own.requires_grad_(other.requires_grad)
            own.grad = None
        for kept, current in zip(self.module.buffers(), model.buffers(), strict=True):
            kept.copy_(current, non_blocking=True)

    @torch.no_grad()
    def add_gradients_to(self, model: nn.Module) -> None:
        for own, sum_ in zip(self.module.parameters(), model.parameters(), strict=True):
            if own.grad is None:
                continue
            gradient = own.grad.to(sum_.device, non_blocking=True)
            sum_.grad = gradient if sum_.grad is None else sum_.grad.add_(gradient)
            own.grad = None

    def squared_norm(self) -> Tensor:
        return squared_norm(p.grad for p in self.module.parameters() if p.grad is not None)


def _spread(share: Assignment, num_devices: int) -> list[Assignment]:
    """The worker's shards over its devices, neighbours together; fewer parts where there are fewer shards."""
    start, stop = share.runs[share.rank]
    num_parts = min(num_devices, stop - start)
    own = [shard_run(part, num_parts, stop - start) for part in range(num_parts)]
    runs = tuple((start + begin, start + end) for begin, end in own)
    return [dataclasses.replace(share, runs=runs, rank=part) for part in range(num_parts)]


def _within(whole: Assignment, part: Assignment) -> tuple[int, int]:
    """Positions of a device's samples in the worker's batch."""
    start, _ = whole.span
    first, last = part.span
    return first - start, last - start


def _to(batch: Any, device: torch.device) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, batch)
