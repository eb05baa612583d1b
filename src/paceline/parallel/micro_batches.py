"""Virtual shards as the micro-batches of a pipeline."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.containers import tensors
from paceline.parallel.buffers import standing_in
from paceline.parallel.engine import Reducer
from paceline.parallel.passes import Passes
from paceline.parallel.step_input import StepInput


class MicroBatch:
    """A virtual shard on its way through this worker's stages, or a stand-in that counts for nothing."""

    def __init__(self, passes: Passes, step: StepInput, shard: int | None, reducer: Reducer, num_stages: int) -> None:
        """
        Args:
            shard: None: a stand-in.
            num_stages: of this worker.
        """
        self._passes, self._step, self._shard, self._reducer = passes, step, shard, reducer
        self._num_stages_left = num_stages
        self._sums: list[Tensor] = []
        """Those of the loss, where the last stage is."""
        self._moves = passes.like.new_zeros(passes.buffers.num_sums)
        self._gradients: list[Tensor | None] = []
        content = step.batch.shards[0] if shard is None else step.content(shard)
        shapes = [(one.shape, one.dtype) for one in tensors(content)]
        self.form: Hashable = shard is None, step.loss_name, *shapes
        """The shapes and types of the samples."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward pass of every stage: seeds generators, and notes what the pass made of buffers."""
        if self._shard is None:
            with standing_in(self._passes.model):
                yield
            return
        self._passes.enter(self._step, self._shard)
        yield
        self._passes.leave(self._step, self._shard, None)
        moves = self._passes.buffers.take_moves(self._moves)
        self._moves += torch.cat(moves) if moves else 0  # of other stages' layers nothing

    def loss_of(self) -> Tensor:
        """Calls the user's loss function on these samples: their loss, weighted."""
        if self._shard is None:
            return self._passes.loss_of_nothing(self._step).weighted
        loss = self._passes.read(self._step, self._shard)
        self._sums = [loss.sums]
        if self._shard == self._step.assignment.own[0]:
            self._passes.first_loss = loss.mean.detach()
        return loss.weighted

    def scale(self, loss: Tensor) -> Tensor:
        """Applies the loss scale just before backward."""
        return self._step.scale(loss)

    def begin_backward(self) -> None:
        """Before the backward pass of every stage, in which layers may be computed again."""
        if self._shard is not None:
            self._passes.seeds.begin_shard(self._step.shard_seed(self._shard))

    def backward_made(self) -> None:
        """When the gradients of all parameters of one more stage are there."""
        found = self._reducer.take_gradients()
        if self._shard is None:
            return
        before = self._gradients or [None] * len(found)
        self._gradients = [old if new is None else new for old, new in zip(before, found, strict=True)]
        self._num_stages_left -= 1
        if self._num_stages_left == 0:
            self._reducer.forward_made(torch.cat([*self._sums, self._moves]), is_last=False)
            self._reducer.push(self._gradients, self._step.assignment.weight(self._shard))
            self._gradients = []
