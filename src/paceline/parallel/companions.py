"""The other models of a run, which a loss function may call beside the one that a step trains.

A step changes the model that it trains and no other. The others compute with the weights and buffers that they have:
gradients flow through them and not into them, and a buffer that a forward pass of theirs changes is put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import nn

from paceline.parallel.buffers import Buffers, standing_in
from paceline.parallel.dtensor import reshard


@dataclass(frozen=True)
class Companion:
    """A model that computes in the steps of others."""

    model: nn.Module
    buffers: Buffers
    """Those of the engine that trains the model, if steps of its own do."""


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
        try:
            with self.untouched():
                yield
        finally:
            self._reshard()  # whole parameters would stay frozen, or keep a gradient, in the next step of their own
            for parameter in trained:
                parameter.requires_grad_(True)
                parameter.grad = None  # of a graph that began before the step

    def _reshard(self) -> None:
        """Leave workers their shards of the parameters that they have gathered."""
        for one in self.models:
            reshard(one.model)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """A context after which all buffers are as before it."""
        with ExitStack() as stack:
            for one in self.models:
                stack.enter_context(one.buffers.untouched())
            yield

    def begin_pass(self) -> None:
        """Give the models the buffers of the step."""
        for one in self.models:
            one.buffers.begin_pass()

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """A context for a stand-in sample, which batch norm layers do not normalise over."""
        with ExitStack() as stack:
            for one in self.models:
                stack.enter_context(standing_in(one.model))
            self.begin_pass()
            yield


ALONE = Companions()
"""The companions of a step whose loss function calls one model only: none."""
