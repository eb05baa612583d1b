"""`parity = "numeric"`: gradients add up in `.grad`, and buckets of them are summed over the replicas while the last
backward pass goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.comm import Aggregator
from paceline.dtensor_type import is_dtensor, local_shard
from paceline.errors import ModelError
from paceline.parallel.assignment import Assignment
from paceline.parallel.buckets import FIRST_BUCKET_BYTES, buckets, dense_form, views
from paceline.parallel.dtensor import with_local
from paceline.parallel.layout import Whole, sum_over
from paceline.parallel.losses import ShardLoss
from paceline.parallel.step_input import StepInput


class RunningSum:
    """The sums of a step over shards and replicas, equal on any number of workers up to rounding.

    All replicas have the same buckets and begin them in the same order, so a bucket also waits for those before it.
    A parameter is ready when its gradient has changed as often as in the last backward pass of the step before, of
    which reentrant checkpointing makes several. What is not ready by then is sent at the end.
    """

    def __init__(self, layout: Whole, aggregator: Aggregator | None) -> None:
        """
        Args:
            aggregator: sums over the replicas; None: there is one.
        """
        self._layout = layout
        self._aggregator = aggregator
        self._sums_early = aggregator is not None and aggregator.links.group is layout.data
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[Tensor, _Bucket] = {}
        self._trained: list[tuple[str, nn.Parameter]] = []
        self._hooks: list[RemovableHandle] = []
        self._changes_before: dict[Tensor, int] = {}
        """How often each gradient has changed in the last backward pass of the step before."""
        self._changes: dict[Tensor, int] = {}
        self._too_late = ""

    def close(self) -> None:
        """Leave the parameters alone: garbage collection does not see what a hook on their gradients holds."""
        for hook in self._hooks:
            hook.remove()
        if self._aggregator is not None:
            self._aggregator.scheduler.close()

    # --- the passes of a step ---

    def begin_step(self, step: StepInput) -> None:
        self._step = step
        self._statistics: Tensor | None = None
        self._noise: Tensor | None = None
        self._arrived: Callable[[], object] | None = None
        self._awaited: set[Tensor] = set()
        self._num_begun = 0
        if self._aggregator is None:
            return
        self._aggregator.scheduler.begin_step()
        trained = [(name, p) for name, p in self._layout.module.named_parameters() if p.requires_grad]
        if [name for name, _ in trained] != [name for name, _ in self._trained]:
            self._arrange(self._aggregator, trained)
        self._changes_before, self._changes = self._changes, {}
        for bucket in self._buckets:
            bucket.num_missing = len(bucket.named)

    def _arrange(self, aggregator: Aggregator, trained: list[tuple[str, nn.Parameter]]) -> None:
        """Form the buckets, again where a user has frozen or unfrozen parameters."""
        self._trained = trained
        # Backward computes the last ones first; late ones must not hold the others up.
        early = [(name, p) for name, p in reversed(trained) if name not in self._layout.late_parameters]
        late = [(name, p) for name, p in trained if name in self._layout.late_parameters]
        grouped = buckets(
            [*early, *late], lambda named: (named[1].dtype, local_shard(named[1]).nbytes), FIRST_BUCKET_BYTES
        )
        self._buckets = [_Bucket(named, aggregator.links.device) for named in grouped]
        self._bucket_of = {parameter: bucket for bucket in self._buckets for _, parameter in bucket.named}
        for hook in self._hooks:
            hook.remove()
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._on_gradient) for _, parameter in early]
        self._changes = {}

    def forward_made(self, statistics: Tensor, *, is_last: bool) -> None:
        """After a shard's forward pass; `is_last`: of this step, so that all of this worker's statistics are known."""
        self._statistics = statistics if self._statistics is None else self._statistics + statistics
        if is_last and self._sums_early and self._step.take_norms is None:
            self._begin_statistics(self._statistics)

    def expect_last(self, stage: nn.Module) -> None:
        """Say that the next gradients of this stage's parameters are the step's last ones."""
        self._awaited.update(stage.parameters())

    def pass_made(self, number: int, loss: ShardLoss | None) -> None:
        """After a backward pass, the step's `number`-th; of a stand-in without `loss`."""
        layout = self._layout
        if number or self._step.take_norms is None or not layout.measures_first_pass:
            return
        weight = layout.zero + (0.0 if loss is None else loss.weight) / layout.num_copies
        squared, weight = layout.sum_in_replica(torch.stack([layout.local_squares(), weight])).unbind()
        mean = torch.where(weight > 0, squared / weight, layout.zero)
        self._noise = torch.stack([mean, weight]) / layout.num_in_replica

    def _on_gradient(self, parameter: Tensor) -> None:
        if parameter not in self._awaited:
            return
        num_changes = self._changes[parameter] = self._changes.get(parameter, 0) + 1
        num_before = self._changes_before.get(parameter, 0)
        bucket = self._bucket_of[parameter]
        if num_changes == num_before:
            bucket.num_missing -= 1
            while self._num_begun < len(self._buckets) and not self._buckets[self._num_begun].num_missing:
                self._begin_next()
        elif num_changes > num_before and bucket.arrived is not None:
            self._too_late = next(name for name, one in bucket.named if one is parameter)

    def _begin_next(self) -> None:
        assert self._aggregator is not None
        self._buckets[self._num_begun].send(self._aggregator)
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
        """The sums of all workers' statistics, then of their noise where the step takes norms.

        Raises:
            ModelError: a gradient changed after it was sent.
        """
        statistics = self._layout.zero.new_zeros(num_statistics) if self._statistics is None else self._statistics
        # All workers begin their sums in one order, whether or not they have shards: statistics come before gradients
        # unless they wait for norms of these.
        if self._arrived is None and self._step.take_norms is None:
            self._begin_statistics(statistics)
        while self._aggregator is not None and self._num_begun < len(self._buckets):
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
            self._aggregator.scheduler.raise_error()
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
            for parameter in self._layout.module.parameters():
                if parameter.grad is not None:
                    local_shard(parameter.grad).mul_(factor.to(parameter.grad.device))

    def gradient_norm(self) -> Tensor:
        """The norm of the whole model's gradient, a scalar; a collective if workers do not hold all of it."""
        return self._layout.gradient_norm()

    def measured(self, assignment: Assignment) -> tuple[int, int]:
        """The number of parts whose gradients' norms are measured, and of the samples in them."""
        first_shards = {rank: start for rank, (start, stop) in enumerate(assignment.shards_of_rank) if start < stop}
        replicas = {rank // self._layout.num_in_replica for rank in first_shards}
        return len(replicas), sum(assignment.shard_sizes[shard] for shard in first_shards.values())


class _Bucket:
    """Gradients that are summed together, and the flat vector in which they are."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], device: torch.device) -> None:
        self.named = named
        self.num_missing = len(named)
        self.arrived: torch.futures.Future[Tensor] | None = None
        """Done when the sum has arrived; None: it has not begun."""
        own = [_real(local_shard(parameter)) for _, parameter in named]
        length = sum(one.numel() for one in own)
        self._values = torch.zeros(length + len(named), dtype=own[0].dtype, device=device)
        gradients, self._num_users = self._values.split([length, len(named)])
        self._places = views(gradients, [dense_form(one) for one in own])

    def send(self, aggregator: Aggregator) -> None:
        """Begin to sum the gradients. They are copied: until all are there, `.grad` may be read."""
        self._num_users.fill_(1)
        for number, ((_, parameter), place) in enumerate(zip(self.named, self._places, strict=True)):
            if parameter.grad is None:
                place.zero_()
                self._num_users[number] = 0
            else:
                place.copy_(_real(local_shard(parameter.grad) if is_dtensor(parameter) else parameter.grad))
        self.arrived = aggregator.sum_bucket(self._values, [name for name, _ in self.named])

    def wait(self) -> None:
        """Wait until the sum has arrived."""
        assert self.arrived is not None
        self.arrived.wait()
        self.arrived = None

    def leave(self) -> None:
        """Leave the sum in `.grad` of every parameter that some worker has used."""
        num_users: list[float] = []
        for number, ((_, parameter), place) in enumerate(zip(self.named, self._places, strict=True)):
            if parameter.grad is None:
                num_users = num_users or self._num_users.tolist()
                if not num_users[number]:
                    continue
            total = (torch.view_as_complex(place) if parameter.is_complex() else place).to(parameter.device)
            parameter.grad = with_local(total, parameter) if is_dtensor(parameter) else total


def _real(tensor: Tensor) -> Tensor:
    """A tensor as real numbers, which algorithms add: of complex ones both parts, along a last dimension."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
