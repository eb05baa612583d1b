"""`parity = "numeric"`: gradients add up in `.grad`, and buckets of them are summed over the replicas while the last
backward pass goes on.

Under several replicas `.grad` is a view of its bucket's flat vector from the step's first pass on, so gradients exist
once: backward adds to the vector in place, the sum over replicas replaces it, and the optimizer reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.comm import Aggregator
from paceline.comm.buckets import FIRST_BUCKET_BYTES, buckets, dense_form, views
from paceline.errors import ModelError
from paceline.parallel.dtensor import with_local
from paceline.parallel.layout import Layout, count_users, sum_over
from paceline.parallel.losses import ShardLoss
from paceline.parallel.step_input import Assignment, StepInput
from paceline.tensors import local_shard


class RunningSum:
    """The sums of a step over shards and replicas, equal on any number of workers up to rounding.

    All replicas have the same buckets and begin them in the same order, so a bucket also waits for those before it.
    A parameter is ready when its gradient has changed as often as in the last backward pass of the step before, of
    which reentrant checkpointing makes several. What is not ready by then is sent at the end.
    """

    def __init__(self, layout: Layout, aggregator: Aggregator | None) -> None:
        """`aggregator`: sums over the replicas; None: there is one."""
        self._layout = layout
        self.gradient_norm = layout.gradient_norm
        self._aggregator = aggregator
        self._sums_early = aggregator is not None and aggregator.links.group is layout.data
        self._named = list(layout.module.named_parameters())
        self._trained: list[tuple[str, nn.Parameter]] = []
        self._buckets: list[_Bucket] = []
        self._gradients: dict[nn.Parameter, _Gradient] = {}
        self._hooks: list[RemovableHandle] = []
        self._too_late = ""

    def close(self) -> None:
        """Leave the parameters alone: garbage collection does not see what a hook on their gradients holds."""
        for hook in self._hooks:
            hook.remove()
        if self._aggregator is not None:
            self._aggregator.close()

    # --- the passes of a step ---

    def begin_step(self, step: StepInput) -> None:
        self._step = step
        self._statistics: Tensor | None = None
        self._noise: Tensor | None = None
        self._squares = [self._layout.zero]
        """Parts of the squared norm of the first pass's gradient, as far as they are known when buckets are sent."""
        self._arrived: Callable[[], object] | None = None
        self._num_begun = 0
        if self._aggregator is None:
            return
        self._aggregator.begin_step(step.number)
        trained = [named for named in self._named if named[1].requires_grad]
        if [id(one) for _, one in trained] != [id(one) for _, one in self._trained]:
            self._arrange(self._aggregator, trained)
        for bucket in self._buckets:
            bucket.begin_step()

    def _arrange(self, aggregator: Aggregator, trained: list[tuple[str, nn.Parameter]]) -> None:
        """Form the buckets, again where a user has frozen or unfrozen parameters."""
        self._trained = trained
        # Backward computes the last ones first; late ones must not hold the others up.
        early = [named for named in reversed(trained) if named[0] not in self._layout.late_parameters]
        late = [named for named in trained if named[0] in self._layout.late_parameters]
        grouped = buckets(
            [*early, *late], lambda named: (named[1].dtype, local_shard(named[1]).nbytes), FIRST_BUCKET_BYTES
        )
        self._buckets = [_Bucket(named, aggregator.links.device, self._layout.late_parameters) for named in grouped]
        self._gradients = {one.parameter: one for bucket in self._buckets for one in bucket.gradients}
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._changed, one))
            for parameter, one in self._gradients.items()
        ]

    def forward_made(self, statistics: Tensor, *, is_last: bool) -> None:
        """After a shard's forward pass; `is_last`: of this step, so that all of this worker's statistics are known."""
        self._statistics = statistics if self._statistics is None else self._statistics + statistics
        if is_last and self._sums_early and self._step.take_norms is None:
            self._begin_statistics(self._statistics)

    def expect_last(self, stage: nn.Module) -> None:
        """Say that the next gradients of this stage's parameters are the step's last ones."""
        for parameter in stage.parameters() if self._gradients else ():
            if parameter in self._gradients:
                self._gradients[parameter].is_awaited = True

    def _changed(self, gradient: _Gradient, _parameter: Tensor) -> None:
        gradient.is_used = True
        if not gradient.is_awaited or gradient.is_late:
            return
        gradient.num_changes += 1
        bucket = gradient.bucket
        if gradient.num_changes == gradient.num_changes_before:
            bucket.num_missing -= 1
            while self._num_begun < len(self._buckets) and not self._buckets[self._num_begun].num_missing:
                self._begin_next()
        elif gradient.num_changes > gradient.num_changes_before and bucket.arrived is not None:
            self._too_late = gradient.name

    def pass_made(self, number: int, loss: ShardLoss | None) -> None:
        """After a backward pass, the step's `number`-th; of a stand-in without `loss`."""
        layout = self._layout
        if number or self._step.take_norms is None or not layout.measures_first_pass:
            return
        unsent = [named for bucket in self._buckets[self._num_begun :] for named in bucket.named]
        squares = [*self._squares, layout.local_squares(self._named if self._aggregator is None else unsent)]
        weight = layout.zero + (0.0 if loss is None else loss.weight) / layout.num_copies
        squared, weight = layout.sum_in_replica(torch.stack([torch.stack(squares).sum(), weight])).unbind()
        mean = torch.where(weight > 0, squared / weight, layout.zero)
        self._noise = torch.stack([mean, weight]) / layout.num_in_replica

    def take_gradients(self) -> list[Tensor | None]:
        """Nothing: gradients stay in `.grad`."""
        return []

    def push(self, gradients: Sequence[Tensor | None], weight: float | Tensor) -> None:
        """A micro-batch of a pipeline has gone backward through this worker's stages: `.grad` has its gradient."""

    def _begin_next(self) -> None:
        """Begin to sum the next bucket over the replicas; what is there of the first pass's norm is gone then."""
        assert self._aggregator is not None
        bucket = self._buckets[self._num_begun]
        if self._step.take_norms is not None and self._noise is None and self._layout.measures_first_pass:
            self._squares.append(self._layout.local_squares(bucket.named))
        bucket.send(self._aggregator)
        self._num_begun += 1

    def _begin_statistics(self, statistics: Tensor) -> None:
        """Begin to sum the statistics of all workers, and what is known of noise, if that is wanted."""
        self._sums = statistics
        if self._step.take_norms is not None:
            noise = self._layout.zero.new_zeros(2) if self._noise is None else self._noise
            self._sums = torch.cat([statistics, noise])
        if self._sums_early and self._aggregator is not None:
            self._arrived = self._aggregator.sum_exactly(self._sums, "losses and buffers").wait

    # --- the end of a step ---

    def finish(self, num_statistics: int) -> Tensor:
        """The sums of all workers' statistics, then of their noise where the step takes norms. Raises `ModelError`
        where a gradient changed after it was sent."""
        statistics = self._layout.zero.new_zeros(num_statistics) if self._statistics is None else self._statistics
        # All workers begin their sums in one order, whether or not they have shards: statistics come before gradients
        # unless they wait for norms of these.
        if self._arrived is None and self._step.take_norms is None:
            self._begin_statistics(statistics)
        while self._num_begun < len(self._buckets):
            self._begin_next()
        if self._arrived is None and self._step.take_norms is not None:
            self._begin_statistics(statistics)
        if self._arrived is not None:
            self._arrived()
        elif self._layout.data is not None:
            sum_over(self._sums, self._layout.data)
        for bucket in self._buckets:
            bucket.wait()
        if self._aggregator is not None:
            self._aggregator.raise_error()
        if self._too_late:
            raise ModelError(
                f"The gradient of '{self._too_late}' was computed more often in this step than in the one before, and "
                "was sent to other workers too early; checkpoint activations with use_reentrant=False."
            )
        return self._sums

    def leave_gradients(self, factor: Tensor | None) -> None:
        """Leave the sums of gradients, times a scalar, in `.grad` of every parameter that any worker used."""
        for bucket in self._buckets:
            bucket.leave()
        self._layout.end_passes()
        if factor is not None:
            for parameter in self._layout.module.parameters():  # of layers that are new, too
                if parameter.grad is not None:
                    local_shard(parameter.grad).mul_(factor.to(parameter.grad.device))

    def measured(self, assignment: Assignment) -> tuple[int, int]:
        """The number of parts whose gradients' norms are measured, and of the samples in them."""
        first_shards = {rank: start for rank, (start, stop) in enumerate(assignment.shards_of_rank) if start < stop}
        replicas = {rank // self._layout.num_in_replica for rank in first_shards}
        return len(replicas), sum(assignment.shard_sizes[shard] for shard in first_shards.values())


@dataclass(eq=False)
class _Gradient:
    """The gradient of a parameter."""

    name: str
    parameter: nn.Parameter
    bucket: _Bucket
    place: Tensor
    """Its part of the bucket."""
    is_late: bool
    """Whether it changes after the last backward pass."""
    view: Tensor | None = None
    """What `.grad` is during a step; None: what torch makes, where the bucket is on another device."""
    is_awaited: bool = False
    """Whether the step's last backward pass is under way."""
    is_used: bool = False
    """Whether a pass of this step has a gradient."""
    num_changes: int = 0
    """How often the gradient changed in the step's last backward pass."""
    num_changes_before: int = 0
    """How often it changed in the last backward pass of the step before."""

    def whole(self) -> Tensor:
        """What is in the bucket, as a gradient of the parameter."""
        return with_local(self.place.to(local_shard(self.parameter).device), self.parameter)


class _Bucket:
    """Gradients that are summed together: slices of a flat vector."""

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], device: torch.device, late_parameters: Collection[str]
    ) -> None:
        own = [local_shard(parameter) for _, parameter in named]
        length = sum(one.numel() for one in own)
        self._values = torch.zeros(length + len(named), dtype=own[0].dtype, device=device)
        values, self._num_users = self._values.split([length, len(named)])
        places = views(values, [dense_form(one) for one in own])
        self.gradients = [
            _Gradient(name, parameter, self, place, name in late_parameters)
            for (name, parameter), place in zip(named, places, strict=True)
        ]
        for one, part in zip(self.gradients, own, strict=True):
            one.view = one.whole() if part.device == one.place.device else None
        self.num_missing = len(named)
        self.arrived: torch.futures.Future[Tensor] | None = None
        """Done when the sum has arrived; None: it has not begun."""

    @property
    def named(self) -> list[tuple[str, nn.Parameter]]:
        return [(one.name, one.parameter) for one in self.gradients]

    def begin_step(self) -> None:
        """Have backward add to the vector."""
        self._values.zero_()
        self.num_missing = len(self.gradients)
        for one in self.gradients:
            one.num_changes_before, one.num_changes = one.num_changes, 0
            one.is_awaited, one.is_used = False, one.is_late
            one.parameter.grad = one.view

    def send(self, aggregator: Aggregator) -> None:
        """Begin to sum the gradients."""
        count_users(self._num_users, [one.is_used for one in self.gradients])
        for one in self.gradients:
            gradient = one.parameter.grad
            if gradient is not one.view and gradient is not None:  # with create_graph backward puts another there
                one.place.copy_(local_shard(gradient))
        self.arrived = aggregator.sum_bucket(self._values, [one.name for one in self.gradients])

    def wait(self) -> None:
        """Wait until the sum has arrived; passes that are made now, to compare them, are no longer the step's."""
        assert self.arrived is not None
        self.arrived.wait()
        self.arrived = None
        for one in self.gradients:
            one.is_awaited = False

    def leave(self) -> None:
        """Leave the sum in `.grad` of every parameter that some worker has used."""
        num_users: list[float] = []
        for number, one in enumerate(self.gradients):
            if not one.is_used:
                num_users = num_users or self._num_users.tolist()
            is_used = one.is_used or num_users[number]
            one.parameter.grad = (one.whole() if one.view is None else one.view) if is_used else None
