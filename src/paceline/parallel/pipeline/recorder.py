"""Records a call of a model: its layers, what each takes and gives, and where random numbers are drawn."""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from paceline.containers import versions
from paceline.errors import ModelError, PacelineError
from paceline.parallel.pipeline.calls import ModelCall, generator_state, place_of
from paceline.parallel.pipeline.recording import Flow, Layer, Recording, TensorSlot
from paceline.parallel.pipeline.watch import Watch, know_dataclasses, opened_modules, tensors_in

_CHECKPOINT = cast(Any, inspect.unwrap(checkpoint)).__code__
READS_VALUES = frozenset(
    {
        Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__,
        Tensor.__complex__, Tensor.__contains__, Tensor.__array__, Tensor.is_nonzero, Tensor.equal, Tensor.allclose,
        torch.equal, torch.allclose, torch.is_nonzero,
    }
)  # fmt: skip
"""Functions that make something else than a tensor of a tensor's values, of which only one stage has them."""


def record(model: nn.Module, example: ModelCall) -> Recording:
    """The layers of `model`, called as `example` says, for a few samples, on the device where the model is.

    Raises:
        ModelError: the model cannot be called so, its forward pass decides between its layers by the values of what
            they return, or a layer hands something on by another way than its return value.
    """
    opened = opened_modules(model)
    training = {module: module.training for module in model.modules()}
    device = place_of(model)
    example = example.on(device)
    try:
        evaluated = _recorded(model.eval(), example, opened, device)
        trained = _recorded(model.train(), example, opened, device)
    finally:
        for module, was_training in training.items():
            module.training = was_training
    return Recording(
        model,
        opened,
        trained.flow,
        evaluated.flow,
        tuple(trained.arguments),
        tuple(trained.outputs),
        trained.values,
    )


def _recorded(model: nn.Module, call: ModelCall, opened: frozenset[nn.Module], device: torch.device) -> Recorder:
    recorder = Recorder(model, opened, device)
    try:
        recorder.record(lambda: model(*call.args, **call.kwargs))
    except PacelineError:
        raise
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot be called with the example that run.prepare was given "
            f"({type(error).__name__}: {str(error).strip().partition(chr(10))[0]}): give what the loss function calls "
            "it with, a tensor, a tuple of positional arguments or a mapping of keyword arguments."
        ) from error
    return recorder


class Recorder(Watch):
    """One recorded call."""

    def __init__(self, model: nn.Module, opened: frozenset[nn.Module], device: torch.device) -> None:
        super().__init__(model, opened)
        self.layers: list[Layer] = []
        self.arguments: list[tuple[Any, Any]] = []
        self.values: dict[int, Tensor] = {}
        self._outputs: list[list[Any]] = []
        """Outputs of every layer, followed by those of the modules that it emits."""
        self._device = device
        self._draws: list[bool] = []
        self._result: Any = None
        self._questions: set[Any] = set()
        self._free: set[str] = set()
        self._slots: Any = WeakIdKeyDictionary()
        self._parameters = {parameter: name for name, parameter in model.named_parameters()}
        self._times_named: Counter[str] = Counter()
        self._inside_layers = _InsideLayers(self._slots)
        self._checkpoints: dict[FrameType, int] = {}

    def record(self, call: Callable[[], Any]) -> None:
        with untouched(self._model), torch.no_grad(), self._inside_layers, self:
            self._result = call()
        know_dataclasses(self._result)
        self._checkpoints.clear()

    @property
    def outputs(self) -> tuple[Any, ...]:
        return tuple(pytree.tree_map_only(Tensor, self._slot, output) for output in self._outputs)

    @property
    def flow(self) -> Flow:
        output = tuple(self._slots[tensor] for tensor in tensors_in(self._result) if tensor in self._slots)
        draws = None if self._device.type == "meta" else tuple(self._draws)
        return Flow(tuple(self.layers), output, draws, frozenset(self._questions), frozenset(self._free))

    # --- calls ---

    def on_module(self, name: str, module: nn.Module, call: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        return self._call(name, None, call, (args, kwargs), always=next(module.parameters(), None) is not None)

    def on_function(self, function: Any, call: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        return self._call(_name(function), function, call, (args, kwargs), always=False)

    def on_inner_module(self, name: str, output: Any) -> None:
        self._inside_layers.returned(name, output)

    def _call(self, name: str, function: Any, call: Callable[[], Any], given: Any, always: bool) -> Any:
        self._look_into(name, given)
        tensors = tensors_in(given)
        for tensor in tensors:
            self._check_origin(name, tensor)
        takes = tuple(self._slots[tensor] for tensor in tensors if tensor in self._slots)
        parameters = tuple(self._parameters[one] for one in tensors if one in self._parameters)  # type: ignore[index]
        depends = always or bool(takes or parameters)
        with self.inside():
            arguments = snapshot(given) if depends else given
            generators, before = generator_state(self._device), versions(tensors)
            with self._inside_layers.layer(len(self.layers)):
                output = call()
            changed = [one for one, was, now in zip(tensors, before, versions(tensors), strict=True) if was != now]
        self._look_into(name, output)
        draws = self._device.type != "meta" and not torch.equal(generators, generator_state(self._device))
        gives = tensors_in(output)
        if not gives and not changed:
            if always:
                raise ModelError(
                    f"{type(self._model).__name__} cannot be cut into stages, because '{name}' returns a "
                    f"{type(output).__name__}, in which no tensors are found: return a tensor, tuple, dictionary or "
                    "dataclass, or choose another strategy."
                )
            self._asked(name, function, takes or parameters)
            return output
        if function is None and not always:
            depends = self._inside_layers.is_tainted(gives) or (bool(changed) and bool(takes))
            if takes and not depends:
                self._free.add(name)
        if not (depends or draws):
            self._inside_layers.forget(len(self.layers))
            return output
        adopted = [one for one in changed if one not in self._slots]
        changes = tuple(self._slots[one] for one in changed if one in self._slots)
        self._add(name, function, takes, [*gives, *adopted], changes, parameters if function is not None else ())
        adopts = tuple(_place(one, tensors) for one in adopted)
        self.layers[-1] = replace(self.layers[-1], adopts=adopts, checkpoint=self._checkpoint())
        self.arguments.append(pytree.tree_map_only(Tensor, self._slot, arguments))
        self._outputs.append([output, *adopted])
        self._draws.append(draws)
        return output

    def _look_into(self, name: str, value: Any) -> None:
        know_dataclasses(value)
        if any(_is_packed(leaf) for leaf in pytree.tree_leaves(value, is_leaf=_is_packed)):
            raise ModelError(
                f"{type(self._model).__name__} cannot be cut into stages, because '{name}' takes or returns a packed "
                "sequence, which no stage can be sent: put packing, the layer and unpacking into one module, or choose "
                "another strategy."
            )

    def _add(self, name: str, function: Any, takes: Any, gives: list[Tensor], changes: Any, parameters: Any) -> None:
        if function is not None:
            times = self._times_named[name]
            self._times_named[name] += 1
            name = f"{name}_{times}" if times else name
        slots = tuple(self._new_slot(tensor) for tensor in gives)
        self.layers.append(Layer(name, function, takes, slots, changes, parameters))

    def _checkpoint(self) -> int | None:
        """The outermost call of torch.utils.checkpoint around this one."""
        frame: FrameType | None = sys._getframe()
        found = None
        while frame is not None:
            found = frame if frame.f_code is _CHECKPOINT else found
            frame = frame.f_back
        return None if found is None else self._checkpoints.setdefault(found, len(self._checkpoints))

    def _new_slot(self, tensor: Tensor) -> int:
        if tensor not in self._slots:
            self._slots[tensor] = len(self.values)
            self.values[len(self.values)] = tensor
        return int(self._slots[tensor])

    def _slot(self, tensor: Tensor) -> Any:
        return TensorSlot(self._slots[tensor]) if tensor in self._slots else tensor

    def _asked(self, name: str, function: Any, is_of_layers: Any) -> None:
        if function in READS_VALUES and is_of_layers:
            raise ModelError(
                f"{type(self._model).__name__} cannot be cut into stages, because its forward pass takes a Python "
                f"value out of a tensor ({name}) between its layers, which only one stage has: move that into one of "
                "the layers, or choose another strategy."
            )
        self._questions.add(function)

    def _check_origin(self, user: str, tensor: Tensor) -> None:
        """A tensor that a layer made and did not return gets a slot if a module inside of the layer returned it."""
        made = self._inside_layers.origin(tensor)
        if made is None or tensor in self._slots:
            return
        number, inner = made
        if inner is None or inner[0] in self.layers[number].emits:
            raise ModelError(
                f"{type(self._model).__name__} cannot be cut into stages, because '{self.layers[number].name}' passes "
                f"a tensor to '{user}' by another way than its return value: return it, or choose another strategy."
            )
        name, output = inner
        slots = tuple(self._new_slot(one) for one in tensors_in(output))
        layer = self.layers[number]
        self.layers[number] = replace(layer, emits=(*layer.emits, name), gives=(*layer.gives, *slots))
        self._outputs[number].append(output)


class _InsideLayers(TorchDispatchMode):
    """Knows which tensors were made inside of layers, and whether of what layers returned."""

    def __init__(self, slots: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slots = slots
        self._layer: int | None = None
        self._made: Any = WeakIdKeyDictionary()
        """The layer's number, and whether the tensor depends on other layers or on parameters."""
        self._returned: Any = WeakIdKeyDictionary()
        """Name and output of a module inside of a layer that returned the tensor."""

    @contextlib.contextmanager
    def layer(self, number: int) -> Iterator[None]:
        self._layer = number
        try:
            yield
        finally:
            self._layer = None

    def returned(self, name: str, output: Any) -> None:
        for tensor in tensors_in(output):
            self._returned[tensor] = name, output

    def is_tainted(self, tensors: list[Tensor]) -> bool:
        return any(tensor in self._slots or self._made.get(tensor, (0, False))[1] for tensor in tensors)

    def forget(self, number: int) -> None:
        """The call that had this number is no layer: every stage makes for itself what it made, or changed."""
        for tensor in [tensor for tensor, made in self._made.items() if made == (number, False)]:
            del self._made[tensor]

    def origin(self, tensor: Tensor) -> tuple[int, Any] | None:
        """The layer that made a tensor of any shape, and name and output of the module in it that returned it."""
        made = self._made.get(tensor)
        return None if made is None else (made[0], self._returned.get(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self._layer is not None:
            given = tensors_in((args, kwargs))
            is_tainted = self.is_tainted(given) or any(isinstance(one, nn.Parameter) for one in given)
            for tensor in tensors_in(output):
                self._made[tensor] = self._layer, is_tainted
        return output


def _name(function: Any) -> str:
    """The name of a function in torch.fx: "add", "getitem", "add_"."""
    name = str(getattr(function, "__name__", function))
    return name.strip("_") if name.startswith("__") else name


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def _place(tensor: Tensor, among: list[Tensor]) -> int:
    return next(place for place, one in enumerate(among) if one is tensor)


def snapshot(given: Any) -> Any:
    """Arguments that stay as they are when a layer changes its own, such as a cache of keys and values.

    Tensors are the same ones.
    """

    def keep(leaf: Any) -> Any:
        is_plain = leaf is None or isinstance(leaf, Tensor | bool | int | float | str | nn.Module)
        return leaf if is_plain or callable(leaf) else copy.deepcopy(leaf)

    with _SameTensors():
        return pytree.tree_map(keep, given)


class _SameTensors(TorchFunctionMode):
    """A copy of something has the tensors of the original."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Buffers, gradients and generators are afterwards as they were."""
    buffers = [
        (buffer, buffer.detach().clone())
        for buffer in model.buffers()
        if not (buffer.is_meta or isinstance(buffer, FakeTensor))  # those have no values
    ]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    devices = sorted({parameter.device.index for parameter, _ in gradients if parameter.is_cuda})
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):  # one that is written to counts as changed by the model
                    buffer.copy_(before)
