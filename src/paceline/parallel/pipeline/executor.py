"""One training step of one worker: executes a schedule on its stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree

from paceline.containers import on_device
from paceline.errors import ModelError
from paceline.parallel.losses import check_loss
from paceline.parallel.pipeline.calls import Calls, MicroBatch, StageCall, StandIn, generator_state, set_generator_state
from paceline.parallel.pipeline.halves import WeightParts, can_split, first_half, second_half
from paceline.parallel.pipeline.message import MessageForm, TensorForm
from paceline.parallel.pipeline.schedules import Action, Schedule
from paceline.parallel.pipeline.shared import SharedParameters
from paceline.parallel.pipeline.stage import Stage
from paceline.parallel.pipeline.transfers import Destination, Outbox, StageLinks


@dataclass(frozen=True)
class PipelineMessage:
    """What one worker sends to another, of one micro-batch."""

    to: Destination
    micro_batch: int


@dataclass
class _Arrived:
    """Received tensors that have a gradient, and their gradients as backward finds them."""

    tensors: list[Tensor] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)

    def enter(self, tensor: Tensor) -> Tensor:
        """A received tensor as the stage computes with it: not a leaf, so that its gradients are added in the order in
        which the whole model adds them, what comes back from later stages first, and keep their place in memory. Nor a
        view of a leaf, which autograd would not let the stage, or the loss function, change in place."""
        leaf = tensor.requires_grad_()
        inside: Tensor = torch.ops.aten._unsafe_view(leaf, leaf.shape)
        inside.register_hook(partial(self.gradients.__setitem__, len(self.tensors)))
        self.tensors.append(leaf)
        return inside


@contextmanager
def _explaining_gradients() -> Iterator[None]:
    """A context for a loss function, in which torch's error for gradients by what only the first stage has becomes a
    sentence. Raises `ModelError`."""
    try:
        yield
    except RuntimeError as problem:
        if "not have been used in the graph" not in str(problem):
            raise
        raise ModelError(
            "The loss function computes gradients by what it gives the model; in a pipeline other workers have the "
            "model's first layers, so choose the strategy dp."
        ) from problem


@dataclass
class _Pass:
    """A micro-batch in a stage, between its forward pass and the end of its backward pass."""

    arrived: _Arrived
    left: list[Tensor]
    """Sent tensors that have a gradient; in the last stage the loss."""
    carried: list[Tensor] = field(default_factory=list)
    """Gradients of shared parameters that later stages have sent: those that `SharedParameters.arriving` names."""
    gradients: list[Tensor | None] | None = None
    """The gradients of `left`, while the whole backward pass is put off."""
    weight_parts: WeightParts | None = None

    @property
    def is_put_off(self) -> bool:
        """Whether its backward pass is in two halves, of which the first is done."""
        return self.gradients is not None or self.weight_parts is not None


class Step:
    """One training step of one worker."""

    def __init__(
        self,
        links: StageLinks,
        calls: Calls,
        stages: Mapping[int, Stage],
        draws: Sequence[bool],
        schedule: Schedule,
        micro_batches: Sequence[MicroBatch],
        before_last_backward: Callable[[nn.Module], None],
        losses: Tensor,
        shared: SharedParameters | None = None,
    ) -> None:
        """
        Args:
            stages: this worker's stages, by number.
            draws: which of all stages may draw random numbers.
            losses: accumulates weighted losses.
            shared: parameters whose gradients come together in each micro-batch; None: no matter when.
        """
        self._links = links
        self._stages = stages
        self._draws = draws
        self._actions = schedule[links.rank]
        self._micro_batches = micro_batches
        self._before_last_backward = before_last_backward
        self._losses = losses
        self._shared = shared
        self._training = any(stage.training for stage in stages.values())
        self._calls_model = calls
        self._calls = [calls.record(micro_batch, self._training) for micro_batch in micro_batches]
        self._passes: dict[tuple[int, int], _Pass] = {}
        self._outboxes = [Outbox() for _ in schedule]
        """By receiver."""
        others = [rank for rank in range(links.num_workers) if rank != links.rank]
        self._made_by: dict[PipelineMessage, int] = {}
        """The number of the action, among its worker's, that sends a message."""
        self._taken_by = {
            PipelineMessage(Destination(action.stage, action.kind != "forward"), action.micro_batch): number
            for actions in schedule
            for number, action in enumerate(actions)
            if action.kind != "weight"
        }
        """The number of the action that needs a message."""
        # By sender: its messages in order, and those in flight.
        self._expected = {source: list(self._messages(schedule[source])) for source in others}
        self._arriving: dict[PipelineMessage, Callable[[], list[Tensor]]] = {}
        self._handed_over: dict[PipelineMessage, list[Tensor]] = {}
        """Messages between two stages of this worker."""
        backwards = [action.stage for action in self._actions if action.kind != "forward"]
        self._backwards_left = {stage: backwards.count(stage) for stage in stages}

    def run(self) -> None:
        for source in self._expected:
            self._post_next(source)
        for action in self._actions:
            if action.kind == "forward":
                self._forward(action)
            else:
                self._backward(action)
        for outbox in self._outboxes:
            outbox.wait()

    # --- messages ---

    def _messages(self, actions: Sequence[Action]) -> Iterator[PipelineMessage]:
        """The messages that the worker with these actions sends to this one, in order."""
        for number, action in enumerate(actions):
            is_gradient = action.kind != "forward"
            to = Destination(action.stage + (-1 if is_gradient else 1), is_gradient)
            if action.kind != "weight" and to.stage in self._stages:
                message = PipelineMessage(to, action.micro_batch)
                self._made_by[message] = number
                yield message

    def _forms(self, message: PipelineMessage, *, wait: bool) -> Sequence[TensorForm] | None:
        """The tensors of a message; None where they are not known yet and `wait` is False."""
        signature = self._calls[message.micro_batch].signature
        if wait:
            return self._links.receive_form(message.to, signature).tensors
        form = self._links.known_form(message.to, signature)
        return None if form is None else form.tensors

    def _post_next(self, source: int, *, wait: bool = False) -> None:
        """Post the receive of the next message from a worker, so that it arrives while this one computes."""
        if self._expected[source]:
            message = self._expected[source][0]
            forms = self._forms(message, wait=wait)
            if forms is not None:
                self._arriving[message] = self._links.receive(forms, source)
                del self._expected[source][0]

    def _take(self, message: PipelineMessage, source: int) -> list[Tensor]:
        if source == self._links.rank:
            return self._handed_over.pop(message)
        while message not in self._arriving:
            self._post_next(source, wait=True)
        wait = self._arriving.pop(message)
        self._post_next(source)
        tensors = wait()
        self._outboxes[source].forget_until(self._made_by[message])
        return tensors

    def _give(self, message: PipelineMessage, values: Sequence[Any]) -> None:
        receiver, signature = self._links.owner(message.to.stage), self._calls[message.micro_batch].signature
        self._links.send_values(message.to, signature, values, self._outboxes[receiver], self._taken_by[message])
        if receiver == self._links.rank:
            self._handed_over[message] = [tensor.detach() for tensor in MessageForm.of(values)[1]]

    # --- forward ---

    def _forward(self, action: Action) -> None:
        stage, number = action.stage, action.micro_batch
        micro_batch, call = self._micro_batches[number], self._calls[number]
        values, arrived, generators = self._take_values(stage, number, call)

        def run(call: StageCall) -> tuple[Any, ...]:
            if any(self._draws):  # as if one worker had computed all stages in a row
                set_generator_state(generators, self._links.device)
            before = None if self._draws[stage] else generator_state(self._links.device)
            leaving: tuple[Any, ...] = self._stages[stage](call.arguments, *values)
            if before is not None and not torch.equal(before, generator_state(self._links.device)):
                raise ModelError(
                    f"Stage {stage} of the pipeline draws random numbers, which it did not when the model was cut, and "
                    "later stages would not go on from there; let the layers that draw (dropout) do so from the "
                    "beginning, or choose another strategy."
                )
            return leaving

        micro_batch.before_forward()
        with micro_batch.within():
            if stage < self._links.num_stages - 1:
                left = self._send_values(stage + 1, number, run(call))
            else:
                model = StandIn(self._calls_model, self._training, lambda call: run(call)[0])
                with _explaining_gradients():
                    loss = check_loss(micro_batch.loss_of(model))
                self._losses += loss.detach()
                left = [micro_batch.scale(loss)]
        self._passes[stage, number] = _Pass(arrived, left)

    def _take_values(self, stage: int, number: int, call: StageCall) -> tuple[list[Any], _Arrived, Tensor]:
        """What arrives at a stage, what of it has a gradient, and where the generators were left."""
        arrived = _Arrived()
        if stage == 0:
            return [], arrived, call.generators
        message = PipelineMessage(Destination(stage), number)
        tensors = self._take(message, self._links.owner(stage - 1))
        form = self._links.receive_form(message.to, call.signature)
        values = form.filled(
            [
                arrived.enter(tensor) if described.requires_grad else tensor
                for tensor, described in zip(tensors, form.tensors, strict=True)
            ]
        )
        generators = values.pop() if self._carries_generators(stage) else call.generators
        return values, arrived, generators

    def _carries_generators(self, stage: int) -> bool:
        return any(self._draws[:stage])

    def _send_values(self, stage: int, number: int, values: Sequence[Any]) -> list[Tensor]:
        """Send values on to a stage; what of them has a gradient."""
        left = [leaf for leaf in pytree.tree_leaves(list(values)) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if self._carries_generators(stage):
            values = [*values, on_device(generator_state(self._links.device), self._links.device)]
        self._give(PipelineMessage(Destination(stage), number), values)
        return left

    # --- backward ---

    def _backward(self, action: Action) -> None:
        key = (action.stage, action.micro_batch)
        passed = self._passes[key]
        self._backwards_left[action.stage] -= 1
        if self._backwards_left[action.stage] == 0:
            self._before_last_backward(self._stages[action.stage])
        micro_batch, stage = self._micro_batches[action.micro_batch], self._stages[action.stage]
        with micro_batch.backward():
            if action.kind == "weight":
                self._weight_half(passed, stage)
            else:
                gradients = self._take_gradients(action, passed)
                if action.kind == "input" and self._splits(action.stage, passed):
                    self._input_half(passed, gradients, stage)
                else:
                    _differentiate(passed, gradients)
        if action.kind != "weight":
            carried = passed.carried if self._shared is None else self._shared.add(action.stage, stage, passed.carried)
            if action.stage > 0:
                self._send_gradients(action, passed, carried)
        if action.kind in ("backward", "weight" if passed.is_put_off else "input"):
            micro_batch.after_backward(stage)
        if action.kind != "input":
            del self._passes[key]

    def _splits(self, stage: int, passed: _Pass) -> bool:
        """Whether the gradients of a stage's parameters can be computed after those that the stage before waits for."""
        if self._shared is not None and self._shared.are_in(stage):
            return False
        # Gradients of one that is sharded are summed up where a backward pass ends, and that is once.
        if isinstance(self._stages[stage], FSDPModule):
            return False
        arrived = passed.arrived.tensors
        return not arrived or can_split(passed.left, arrived, _trained(self._stages[stage]))

    def _take_gradients(self, action: Action, passed: _Pass) -> list[Tensor | None]:
        """The gradients of what left the stage; none for the loss."""
        if action.stage == self._links.num_stages - 1:
            return [None] * len(passed.left)
        message = PipelineMessage(Destination(action.stage, is_gradient=True), action.micro_batch)
        tensors = self._take(message, self._links.owner(action.stage + 1))
        passed.carried = tensors[len(passed.left) :]
        return [*tensors[: len(passed.left)]]

    def _send_gradients(self, action: Action, passed: _Pass, carried: Sequence[Tensor]) -> None:
        arrived = passed.arrived
        if self._shared is not None and len(arrived.gradients) < len(arrived.tensors):
            raise ModelError(
                f"The loss does not depend on all that the stages before '{self._stages[action.stage].name}' compute "
                "for it, and parity = 'bitwise' cannot tell them so; leave it out of what the model returns, cut the "
                "model elsewhere (pipeline.cuts), or use parity = 'numeric'."
            )
        found = [
            arrived.gradients[n] if n in arrived.gradients else torch.zeros_like(tensor)
            for n, tensor in enumerate(arrived.tensors)
        ]
        to = Destination(action.stage - 1, is_gradient=True)
        self._give(PipelineMessage(to, action.micro_batch), [*found, *carried])
        passed.arrived = _Arrived()

    def _input_half(self, passed: _Pass, gradients: list[Tensor | None], stage: nn.Module) -> None:
        """Compute only the gradients that the stage before waits for."""
        if not passed.arrived.tensors:
            passed.gradients = gradients
        else:
            left, passed.left = passed.left, []
            passed.weight_parts = first_half(left, gradients, passed.arrived.tensors, _trained(stage))

    def _weight_half(self, passed: _Pass, stage: nn.Module) -> None:
        if passed.gradients is not None:
            _differentiate(passed, passed.gradients)
        elif passed.weight_parts is not None:
            second_half(_trained(stage), passed.weight_parts)


def _differentiate(passed: _Pass, gradients: list[Tensor | None]) -> None:
    if passed.left:
        torch.autograd.backward(passed.left, gradients)
    passed.left = []


def _trained(stage: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in stage.parameters() if parameter.requires_grad]
