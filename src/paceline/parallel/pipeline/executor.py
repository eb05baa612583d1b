"""One training step of one worker: executes a schedule on its stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils import _pytree as pytree

from paceline.parallel.losses import check_loss
from paceline.parallel.pipeline.calls import Calls, MicroBatch, StageCall, StandIn, generator_state, set_generator_state
from paceline.parallel.pipeline.message import MessageForm, TensorForm
from paceline.parallel.pipeline.schedules import Action, Schedule
from paceline.parallel.pipeline.stage import Stage
from paceline.parallel.pipeline.transfers import Arrival, Outbox, StageLinks


@dataclass(frozen=True)
class PipelineMessage:
    """What one worker sends to another: values for a stage, or gradients for a stage that has sent values."""

    is_gradient: bool
    stage: int
    """That receives it."""
    micro_batch: int


@dataclass
class _Pass:
    """A micro-batch in a stage, between its forward pass and the end of its backward pass."""

    arrived: list[Tensor]
    """Received tensors that have a gradient."""
    left: list[Tensor]
    """Sent tensors that have a gradient; in the last stage the loss."""
    gradients: list[Tensor | None] | None = None
    """The gradients of `left`, while the whole backward pass is put off."""
    weight_parts: list[dict[str, Any]] | None = None
    """The result of the first half of a backward pass that the second half needs."""


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
    ) -> None:
        """
        Args:
            stages: this worker's stages, by number.
            draws: which of all stages may draw random numbers.
            losses: accumulates weighted losses.
        """
        self._links = links
        self._stages = stages
        self._draws = draws
        self._actions = schedule[links.rank]
        self._micro_batches = micro_batches
        self._before_last_backward = before_last_backward
        self._losses = losses
        self._training = any(stage.training for stage in stages.values())
        self._calls_model = calls
        self._calls = [calls.record(micro_batch, self._training) for micro_batch in micro_batches]
        self._passes: dict[tuple[int, int], _Pass] = {}
        self._outbox = Outbox()
        self.draws_unexpectedly = False
        """Whether a stage drew random numbers of which `draws` says that it does not."""
        others = [rank for rank in range(links.num_workers) if rank != links.rank]
        # By sender: its messages in order, and those in flight.
        self._expected = {source: list(self._messages(schedule[source])) for source in others}
        self._arriving: dict[PipelineMessage, Arrival] = {}
        self._handed_over: dict[PipelineMessage, list[Tensor]] = {}
        """Between two stages of this worker."""
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
        self._outbox.wait()

    # --- messages ---

    def _messages(self, actions: Sequence[Action]) -> Iterator[PipelineMessage]:
        """The messages that the worker with these actions sends to this one, in order."""
        for action in actions:
            is_gradient = action.kind != "forward"
            message = PipelineMessage(is_gradient, action.stage + (-1 if is_gradient else 1), action.micro_batch)
            if action.kind != "weight" and message.stage in self._stages:
                yield message

    def _forms(self, message: PipelineMessage, *, wait: bool) -> Sequence[TensorForm] | None:
        """The tensors of a message; None where they are not known yet and `wait` is False."""
        signature = self._calls[message.micro_batch].signature
        if message.is_gradient:
            form = self._links.known_form(message.stage + 1, signature)
            return None if form is None else form.differentiable
        if wait:
            return self._links.receive_form(message.stage, signature).tensors
        form = self._links.known_form(message.stage, signature)
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
        arrival = self._arriving.pop(message)
        self._post_next(source)
        return arrival.wait()

    def _give(self, message: PipelineMessage, tensors: list[Tensor], form: Sequence[TensorForm]) -> None:
        to = self._links.owner(message.stage)
        if to == self._links.rank:
            self._handed_over[message] = [tensor.detach() for tensor in tensors]
        else:
            self._links.send(tensors, form, to, self._outbox)

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
            if before is not None:
                self.draws_unexpectedly |= not torch.equal(before, generator_state(self._links.device))
            return leaving

        micro_batch.before_forward()
        with micro_batch.within():
            if stage < self._links.num_stages - 1:
                left = self._send_values(stage + 1, number, run(call))
            else:
                model = StandIn(self._calls_model, self._training, lambda call: run(call)[0])
                loss = check_loss(micro_batch.loss_of(model))
                self._losses += loss.detach()
                left = [micro_batch.scale(loss)]
        self._passes[stage, number] = _Pass(arrived, left)

    def _take_values(self, stage: int, number: int, call: StageCall) -> tuple[list[Any], list[Tensor], Tensor]:
        """What arrives at a stage, what of it has a gradient, and where the generators were left."""
        if stage == 0:
            return [], [], call.generators
        tensors = self._take(PipelineMessage(False, stage, number), self._links.owner(stage - 1))
        form = self._links.receive_form(stage, call.signature)
        for tensor, described in zip(tensors, form.tensors, strict=True):
            tensor.requires_grad_(described.requires_grad)
        values = form.filled(tensors)
        generators = values.pop() if self._carries_generators(stage) else call.generators
        return values, [tensor for tensor in tensors if tensor.requires_grad], generators

    def _carries_generators(self, stage: int) -> bool:
        return any(self._draws[:stage])

    def _send_values(self, stage: int, number: int, values: Sequence[Any]) -> list[Tensor]:
        """Send values on to a stage; what of them has a gradient."""
        left = [leaf for leaf in pytree.tree_leaves(list(values)) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if self._carries_generators(stage):
            values = [*values, generator_state(self._links.device).to(self._links.device)]
        self._links.send_values(stage, self._calls[number].signature, values, self._outbox)
        if self._links.owner(stage) == self._links.rank:
            self._give(PipelineMessage(False, stage, number), MessageForm.of(values)[1], ())
        return left

    # --- backward ---

    def _backward(self, action: Action) -> None:
        key = (action.stage, action.micro_batch)
        passed = self._passes[key]
        self._backwards_left[action.stage] -= 1
        if self._backwards_left[action.stage] == 0:
            self._before_last_backward(self._stages[action.stage])
        with self._micro_batches[action.micro_batch].backward():
            if action.kind == "weight":
                self._weight_half(passed, self._stages[action.stage])
            else:
                gradients = self._take_gradients(action, passed)
                if action.kind == "input":
                    self._input_half(passed, gradients, self._stages[action.stage])
                else:
                    _differentiate(passed, gradients)
        if action.kind != "weight" and action.stage > 0:
            self._send_gradients(action, passed)
        if action.kind != "input":
            del self._passes[key]

    def _take_gradients(self, action: Action, passed: _Pass) -> list[Tensor | None]:
        """The gradients of what left the stage; none for the loss."""
        if action.stage == self._links.num_stages - 1:
            return [None] * len(passed.left)
        message = PipelineMessage(True, action.stage, action.micro_batch)
        return [*self._take(message, self._links.owner(action.stage + 1))]

    def _send_gradients(self, action: Action, passed: _Pass) -> None:
        gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in passed.arrived]
        form = self._links.known_form(action.stage, self._calls[action.micro_batch].signature)
        assert form is not None
        self._give(PipelineMessage(True, action.stage - 1, action.micro_batch), gradients, form.differentiable)
        passed.arrived = []

    def _input_half(self, passed: _Pass, gradients: list[Tensor | None], stage: nn.Module) -> None:
        """Compute only the gradients that the stage before waits for."""
        if isinstance(stage, FSDPModule):  # its gradients are summed up where a backward pass ends, and that is once
            _differentiate(passed, gradients)
        elif not passed.arrived:
            passed.gradients = gradients
        else:
            passed.weight_parts = _differentiate_inputs(passed, gradients, stage)

    def _weight_half(self, passed: _Pass, stage: nn.Module) -> None:
        if passed.gradients is not None:
            _differentiate(passed, passed.gradients)
        elif passed.weight_parts is not None:
            stage_backward_weight(iter(_trained(stage)), passed.weight_parts)


def _roots(passed: _Pass, gradients: list[Tensor | None]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Where differentiation begins, with the gradients there; what has only passed through gets its gradient now."""
    arrived = {id(tensor) for tensor in passed.arrived}
    roots: list[Tensor] = []
    given: list[Tensor | None] = []
    for tensor, gradient in zip(passed.left, gradients, strict=True):
        if id(tensor) not in arrived:
            roots.append(tensor)
            given.append(gradient)
        elif gradient is not None:
            tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient
    return roots, given


def _differentiate(passed: _Pass, gradients: list[Tensor | None]) -> None:
    roots, given = _roots(passed, gradients)
    if roots:
        torch.autograd.backward(roots, given)
    passed.left = []


def _differentiate_inputs(passed: _Pass, gradients: list[Tensor | None], stage: nn.Module) -> list[dict[str, Any]]:
    """The gradients of what arrived; returns what those of the parameters still need."""
    roots, given = _roots(passed, gradients)
    passed.left = []
    if not roots:
        return []
    edges = [get_gradient_edge(root) for root in roots]
    # torch detaches the roots in place, which a view does not allow.
    roots = [root.clone() if root._is_view() else root for root in roots]
    weights = _trained(stage)
    outputs_given = [torch.ones_like(r) if g is None else g for r, g in zip(roots, given, strict=True)]
    _, weight_parts = stage_backward_input(roots, outputs_given, passed.arrived, iter(weights))
    # Parameters that act on outputs by which no input is differentiated are in none of torch's groups.
    reached = {node for part in weight_parts for node in part["params"]}
    others = [weight for weight in weights if get_gradient_edge(weight).node not in reached]
    if others:
        found = torch.autograd.grad(edges, others, outputs_given, retain_graph=True, allow_unused=True)
        for weight, gradient in zip(others, found, strict=True):
            if gradient is not None:
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
    return weight_parts


def _trained(stage: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in stage.parameters() if parameter.requires_grad]
