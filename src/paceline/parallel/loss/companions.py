"""The other models of a run, which a loss function may call beside the one that a step trains.

A step changes the model that it trains and no other. The others compute with the weights and buffers that they have:
gradients flow through them and not into them, their batch norm layers normalise every virtual shard by itself and move
no running statistics, and a buffer that a forward pass of theirs changes is put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import nn

from paceline.parallel.assignment import ShardRange
from paceline.parallel.batch_norm.norm import NormStatistics, standing_in
from paceline.parallel.dtensor import reshard
from paceline.parallel.kept.forward_buffers import ForwardBuffers
from paceline.parallel.loss.parameter_watch import ParameterWatch


@dataclass(frozen=True)
class Companion:
    """A model that computes in the steps of others."""

    model: nn.Module
    norm: NormStatistics
    buffers: ForwardBuffers
    watch: ParameterWatch

    @classmethod
    def of(cls, model: nn.Module, buffers: ForwardBuffers | None = None) -> Companion:
        """
        Args:
            model: its batch norm layers are those of `parallel.batch_norm.norm`.
            buffers: the buffers of the engine that trains the model, if steps of its own do.
        """
        norm = NormStatistics(model)
        return cls(model, norm, buffers or ForwardBuffers(model, norm), ParameterWatch(model, shards_are_alone=True))


@dataclass(frozen=True)
class Companions:
    """The companions of one step."""

    models: Sequence[Companion] = ()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """A context for a step that trains another model; these models are afterwards as before."""
        self._reshard()
        trained = [p for one in self.models for p in one.model.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)
        for one in self.models:
            one.buffers.begin_step()
        try:
            yield
        finally:
            for one in self.models:
                one.buffers.start_over()
                one.norm.reset()
            self._reshard()  # whole parameters would stay frozen, or keep a gradient, in the next step of their own
            for parameter in trained:
                parameter.requires_grad_(True)
                parameter.grad = None  # of a graph that began before the step

    def _reshard(self) -> None:
        """Leave workers their shards of the parameters that they have gathered."""
        for one in self.models:
            reshard(one.model)

    @contextmanager
    def watched(self, *, is_examination: bool, step: int) -> Iterator[None]:
        """A context for one call of a loss function. Raises `ModelError` if it changes one of these models."""
        with ExitStack() as stack:
            for one in self.models:
                stack.enter_context(one.watch(is_examination=is_examination, step=step))
            yield

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """A context after which all buffers are as before it."""
        with ExitStack() as stack:
            for one in self.models:
                stack.enter_context(one.buffers.untouched())
            yield

    @property
    def have_norms(self) -> bool:
        """Whether there are batch norm layers in them."""
        return any(one.norm.exist for one in self.models)

    def enter(self, shards: ShardRange) -> None:
        """Set which virtual shards are in the models; every pass begins with the buffers of the step."""
        for one in self.models:
            one.norm.current.shards, one.norm.current.is_noted = shards, False
        self.begin_pass()

    def begin_pass(self) -> None:
        """Give the models the buffers of the step."""
        for one in self.models:
            one.buffers.begin_pass()

    def have_changed(self) -> bool:
        """Whether the last forward pass changed any of their buffers."""
        return any(one.buffers.changed_now() is not None for one in self.models)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """A context for backward passes, in which layers that run again (activation checkpointing) count nothing."""
        with ExitStack() as stack:
            for one in self.models:
                stack.enter_context(one.norm.backward())
            yield
        for one in self.models:
            one.norm.current.shards = None

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """A context for a stand-in sample, which norm layers do not count."""
        with ExitStack() as stack:
            for one in self.models:
                stack.enter_context(standing_in(one.model))
                one.buffers.begin_pass()
            yield


ALONE = Companions()
"""The companions of a step whose loss function calls one model only: none."""
