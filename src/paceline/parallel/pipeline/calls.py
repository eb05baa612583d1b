"""Records how a loss function calls the model, by a stand-in for the model, of which no worker has all."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from paceline.containers import open_container, to_device
from paceline.errors import ModelError


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch: some virtual shards of the global batch, which pass through the stages together."""

    loss_of: Callable[[nn.Module], Tensor]
    """Calls the user's loss function with the model it is given, on these samples: their loss, weighted."""
    before_forward: Callable[[], None] = lambda: None
    """Called before every forward pass, more than once a step: seeds generators, tells norm layers the shards."""
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Around every forward pass: autocast."""
    backward: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Around every backward pass. What `before_forward` set may be another micro-batch's by then."""
    scale: Callable[[Tensor], Tensor] = lambda loss: loss
    """Applies the loss scale just before backward."""
    after_backward: Callable[[nn.Module], object] = lambda _stage: None
    """Called with a stage when the gradients of all of its parameters are there."""


@dataclass(frozen=True)
class ModelCall:
    """The arguments that a model is called with."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, example: Any) -> ModelCall:
        """A tensor, a tuple of positional arguments, or a mapping of keyword arguments."""
        if isinstance(example, ModelCall):
            return example
        if isinstance(example, Mapping):
            return cls((), dict(example))
        return cls(example if isinstance(example, tuple) else (example,))

    def on(self, device: torch.device) -> ModelCall:
        """The call with its tensors on `device`."""
        args, kwargs = to_device((self.args, dict(self.kwargs)), device)
        return ModelCall(args, kwargs)


@dataclass(frozen=True)
class StageCall:
    """How the model is called for one micro-batch."""

    arguments: ModelCall
    signature: Hashable
    """Everything that the form of messages between stages depends on; equal on all workers."""
    generators: Tensor
    """The state of torch's generators at that moment."""


class Calls:
    """Sees how a loss function calls the model."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = (model,)
        self._device = device

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> StageCall:
        """A call with these arguments."""
        kind = self._device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        signature = (_form(args), _form(kwargs), training, torch.is_grad_enabled(), autocast)
        return StageCall(ModelCall(args, kwargs), signature, generator_state(self._device))

    def attribute(self, name: str) -> Any:
        """An attribute of the model, such as its configuration; of parts and methods no worker has all."""
        value = getattr(self._model[0], name)
        if callable(value) or isinstance(value, Tensor):
            raise is_in_parts(f"model.{name}")
        return value

    def record(self, micro_batch: MicroBatch, training: bool) -> StageCall:
        """How the loss function calls the model for a micro-batch; it is stopped at the call."""

        def stop(call: StageCall) -> NoReturn:
            raise _CalledError(call)

        micro_batch.before_forward()
        with micro_batch.within():
            try:
                micro_batch.loss_of(StandIn(self, training, stop))
            except _CalledError as called:
                return called.call
        raise ModelError("The loss function did not call the model it was given; in a pipeline it has to.")


def is_in_parts(what: str) -> ModelError:
    """The error for a loss function that reaches into the model."""
    return ModelError(
        f"The loss function uses {what}, of which a worker of a pipeline has a part: call the model itself (an L2 "
        "penalty is the optimizer's weight_decay), or choose another strategy."
    )


class StandIn(nn.Module):
    """A module that a loss function is given in place of the model."""

    def __init__(self, calls: Calls, training: bool, answer: Callable[[StageCall], Any]) -> None:
        super().__init__()
        self.training = training
        self._calls = calls
        self._answer = answer
        self._was_called = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._was_called:
            raise ModelError(
                "The loss function calls the model twice; in a pipeline it can do so once: put both halves into one "
                "batch, or choose another strategy."
            )
        self._was_called = True
        return self._answer(self._calls.call(args, kwargs, self.training))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            calls: Calls = self.__dict__["_calls"]
            return calls.attribute(name)

    # What would look for layers and parameters would find none, and a penalty on them be 0.

    def named_modules(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise is_in_parts("the model's modules or parameters")

    def named_children(self) -> NoReturn:
        raise is_in_parts("the model's modules")

    def state_dict(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise is_in_parts("model.state_dict()")

    def __getitem__(self, index: Any) -> NoReturn:
        raise is_in_parts(f"model[{index!r}]")

    def train(self, mode: bool = True) -> Self:
        self.training = mode
        return self


def _form(value: Any) -> Hashable:
    """Everything about a value but the numbers in its tensors."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    container = open_container(value)
    if container is None:
        return repr(value)
    return type(value).__name__, container.places, tuple(map(_form, container.values))


class _CalledError(BaseException):
    """The model was called; not an Exception, which a loss function might catch."""

    def __init__(self, call: StageCall) -> None:
        super().__init__()
        self.call = call


def place_of(model: nn.Module) -> torch.device:
    """The device of a model's parameters; the meta device where they have no values yet."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def generator_state(device: torch.device) -> Tensor:
    """The state of torch's generators that `device` uses: [num_bytes] uint8 in host memory."""
    state = torch.get_rng_state()
    if device.type == "cuda":
        state = torch.cat([state, torch.cuda.get_rng_state(device)])
    return state


def set_generator_state(state: Tensor, device: torch.device) -> None:
    """Put torch's generators into a state that `generator_state` returned, [num_bytes] uint8."""
    on_host = state.cpu()
    num_bytes = torch.get_rng_state().numel()
    torch.set_rng_state(on_host[:num_bytes].clone())
    if device.type == "cuda":
        torch.cuda.set_rng_state(on_host[num_bytes:].clone(), device)
