"""A worker's virtual shards through the model: which go together, with which weights, seeds and norm statistics.

Several shards go through the model together where that changes nothing. A dropout mask belongs to its shard, so where
the forward pass draws random numbers the shards go one by one, each with its own seed. A model may begin to draw at any
step (a dropout rate that rises from 0), so every pass over several shards is watched: if it drew random numbers, the
step starts over, shard by shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from paceline.containers import copied
from paceline.errors import ModelError
from paceline.parallel.assignment import Assignment, ShardRange
from paceline.parallel.engine import Randomness, StepInput, check_loss, statistics_dtype
from paceline.parallel.generators import equal_states, generator_states
from paceline.parallel.norm import NormStatistics, ShardBatchNorm, forward_buffers, replace_batch_norm, standing_in

Result = TypeVar("Result")


class DrewTogetherError(Exception):
    """Shards that went through the model together drew random numbers, so the step has to start over."""


class Passes:
    """Runs the forward and backward passes of one worker, or of one device of a worker."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        micro_batch_size: int | None = None,
        *,
        may_split: bool = True,
        one_by_one: bool = False,
        refusal: str = "",
        is_concurrent: bool = False,
        randomness: Randomness | None = None,
        forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """
        Args:
            micro_batch_size: the most samples that go through the model together; None: all of an assignment.
            may_split: whether shards that could go together may also go one by one.
            one_by_one: whether they always do.
            refusal: the error message for a model that draws random numbers, if the engine cannot train one.
            is_concurrent: whether other devices use the same generators at the same time, until numbers are drawn.
            randomness: shared by the devices of a worker.
            forward_context: what every forward pass runs in.
        """
        self.norm = NormStatistics(model)
        self.randomness = randomness or Randomness()
        self._model = model
        self._device = device
        self._micro_batch_size = micro_batch_size
        self._may_split = may_split
        self._one_by_one = one_by_one
        self._refusal = refusal
        self._is_concurrent = is_concurrent
        self._forward_context = forward_context

    # --- which shards go together ---

    def ranges(self, assignment: Assignment, rank: int) -> list[ShardRange]:
        """The shards of each pass of worker `rank`, by the current knowledge of random draws."""
        of_rank = replace(assignment, rank=rank)
        next_shard, stop = of_rank.own
        found: list[ShardRange] = []
        while next_shard < stop:
            found.append(self._next_range(of_rank, next_shard))
            next_shard = found[-1].stop_shard
        return found

    def _next_range(self, assignment: Assignment, first_shard: int) -> ShardRange:
        one_by_one = self._one_by_one or (self._may_split and self.randomness.is_drawn is not False)
        return assignment.shard_range(first_shard, 1 if one_by_one else self._micro_batch_size)

    def _must_not_draw(self, shards: ShardRange) -> bool:
        if self._refusal or self.randomness.is_drawn is not False:
            return bool(self._refusal)
        return self._is_concurrent or (self._may_split and len(shards.sizes) > 1)

    # --- passes ---

    def losses(self, step: StepInput, module: nn.Module) -> Iterator[tuple[ShardRange, Tensor]]:
        """A forward pass over each range of this worker's shards; `backward` has to follow before the next one.

        Raises:
            DrewTogetherError: caught by `starting_over`.
        """
        next_shard, stop = step.assignment.own
        while next_shard < stop:
            shards = self._next_range(step.assignment, next_shard)
            is_wrong_if_drawn = self._must_not_draw(shards)
            loss, drew = self.compute_loss(step, module, shards)
            if drew and is_wrong_if_drawn:
                raise DrewTogetherError
            if self.randomness.is_drawn is None:
                self.randomness.is_drawn = drew
            yield shards, loss
            next_shard = shards.stop_shard

    def compute_loss(self, step: StepInput, module: nn.Module, shards: ShardRange) -> tuple[Tensor, bool]:
        """The mean loss over some shards, and whether they drew random numbers, if that was not known before."""
        self.enter(step, shards)
        is_watched = self.randomness.is_drawn is None or self._must_not_draw(shards)
        before = generator_states(self._device) if is_watched else None
        with self._forward_context():
            loss = check_loss(step.loss_of(module, step.batch.cut(shards.start, shards.stop)))
        return loss, before is not None and not equal_states(before, generator_states(self._device))

    def enter(self, step: StepInput, shards: ShardRange) -> None:
        """Set which shards are in the model, and seed the generators for them if numbers may be drawn."""
        self.norm.shards.all, self.norm.shards.current = step.assignment.shard_sizes, shards.sizes
        if not self._must_not_draw(shards):
            step.seed_shard(shards.first_shard)

    def backward(self, step: StepInput, shards: ShardRange, loss: Tensor) -> None:
        """Add the gradient of some shards' mean loss, times their weight, to `.grad`."""
        with self.norm.backward():
            step.scale(loss * shards.weight).backward()
        self.norm.shards.current = None

    @contextmanager
    def stand_in(self, step: StepInput, module: nn.Module) -> Iterator[Tensor]:
        """The loss of one sample that counts for nothing, for a worker that has to go through collectives with others.

        Its backward pass belongs inside.
        """
        with standing_in(self._model):
            with self._forward_context():
                loss = check_loss(step.loss_of(module, step.batch.cut(0, 1)))
            yield step.scale(loss * 0.0)

    def starting_over(self, attempt: Callable[[], Result]) -> Result:
        """Run `attempt`, the passes of a step; repeated if shards drew random numbers together.

        Nothing is left of the first attempt: no gradients, no norm statistics, no changes of buffers. From then on
        shards go one by one.
        """
        if self.randomness.is_drawn and not self._refusal:
            return attempt()
        changeable = {id(buffer) for buffer in forward_buffers(self._model)}
        kept = [
            (module._buffers, name, buffer, buffer.clone())
            for module in self._model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and id(buffer) in changeable
        ]
        try:
            return attempt()
        except DrewTogetherError:
            with torch.no_grad():
                for buffers, name, buffer, before in kept:
                    buffers[name] = buffer  # a forward pass may have put another tensor there
                    buffer.copy_(before)
        if self._refusal:
            raise ModelError(self._refusal)
        self.randomness.is_drawn = True
        self.norm.reset()
        for parameter in self._model.parameters():
            parameter.grad = None
        return attempt()


class ShardByShard:
    """Computes the gradient and the statistics of single shards; the caller sums them.

    The result depends only on the shard, never on the worker. A shard's statistics are its weighted loss and
    what its norm layers have seen, one flat vector; summed over the shards of a global batch they are the batch's mean
    loss and what moves the running statistics.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.module = replace_batch_norm(model, ShardBatchNorm)
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.dtype = statistics_dtype(self.module)
        self._passes = Passes(self.module, device)
        self._passes.randomness.is_drawn = True
        self.num_statistics = 1 + self._passes.norm.length

    def compute(self, step: StepInput, shard: int) -> Tensor:
        """Leave the gradient of the weighted loss in `.grad` (None where there is none); return the statistics."""

        def loss_of(model: nn.Module, batch: Any) -> Tensor:
            # Copies, because a product's last bits depend on where in memory its factors begin, and a shard lies
            # elsewhere in the batch of another worker.
            return step.loss_of(model, copied(batch))

        for parameter in self.parameters:
            parameter.grad = None
        shards = step.assignment.shard_range(shard, max_samples=1)
        loss, _ = self._passes.compute_loss(replace(step, loss_of=loss_of), self.module, shards)
        self._passes.backward(step, shards, loss)
        weighted = (loss.detach() * shards.weight).to(self.dtype).view(1)
        return torch.cat([weighted, *self._passes.norm.collect(weighted)])

    def apply(self, statistics: Tensor) -> Tensor:
        """Move the running statistics by the sum over a batch's shards; return its mean loss, a scalar."""
        self._passes.norm.apply(statistics[1:])
        return statistics[0]
