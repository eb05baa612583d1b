"""Computes some layers of a model in the order in which its own forward pass calls them.

The forward pass runs up to the end of the stage. Calls of layers before the stage return what other stages sent, or a
tensor of the right shape without values where no layer needs it any more; at the first call behind the stage the pass
stops.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from paceline.errors import ModelError
from paceline.parallel.pipeline.message import Outline, TensorForm
from paceline.parallel.pipeline.recorder import READS_VALUES
from paceline.parallel.pipeline.recording import Flow, Layer
from paceline.parallel.pipeline.watch import Watch, tensors_in


class StageEnd(BaseException):
    """The forward pass has reached the end of the stage; not an Exception, which it might catch."""


class Replay(Watch):
    """One forward pass of one stage."""

    def __init__(
        self,
        model: nn.Module,
        opened: frozenset[nn.Module],
        flow: Flow,
        run: tuple[int, int],
        outline: Outline,
        arriving: Sequence[Tensor],
        device: torch.device,
        lent: Collection[nn.Parameter],
    ) -> None:
        """
        Args:
            lent: the stage's parameters that lie in no layer.
            run: the numbers of the stage's first layer and of the first one behind it.
            outline, arriving: what came from the stage before.
        """
        super().__init__(model, opened)
        self._flow = flow
        self._start, self._stop = run
        self._is_last = self._stop == len(flow.layers)
        self._leaving = frozenset(() if self._is_last else flow.crossing(self._stop))
        self._drawing = flow.drawing
        self._next = 0
        self._device = device
        self._lent = frozenset(map(id, lent))
        self._names_of_stage = {layer.name for layer in flow.layers[self._start : self._stop]}
        self._outputs = list(outline.outputs)
        self._of_slot: dict[int, Tensor] = dict(zip(flow.crossing(self._start), arriving, strict=True))
        """What arrived, what stands in for the rest, and of what is made here what leaves."""
        self._arrived = frozenset(self._of_slot)
        self._from_layers: Any = WeakIdKeyDictionary()
        self._emitted: dict[str, Any] = {}

    @property
    def outline(self) -> Outline:
        """The outline of the next stage."""
        return Outline(self._outputs)

    @property
    def leaving(self) -> list[Tensor]:
        """The tensors that are sent to the next stage, each in its own shape."""
        if self._next < self._stop:
            raise self._another(f"it ends after {self._next} of its layers")
        return [self._of_slot[slot] for slot in self._flow.crossing(self._stop)]

    # --- calls ---

    def on_module(self, name: str, module: nn.Module, call: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        is_layer = self._is_layer(name, module, args, kwargs)
        with self.inside():
            return self._call(name, module, call, (args, kwargs)) if is_layer else call()

    def on_function(self, function: Any, call: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        if function in self._flow.questions:
            if function in READS_VALUES and self._next <= self._start and self._takes_layers(args, kwargs):
                raise self._another(f"it takes a value out of a tensor by {function.__name__}")
            return call()
        if function in self._drawing or self._takes_layers(args, kwargs):
            with self.inside():
                return self._call(function, None, call, (args, kwargs))
        return call()

    def on_inner_module(self, name: str, output: Any) -> None:
        if name in self._emitted:
            self._emitted[name] = output

    def _is_layer(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> bool:
        if next(module.parameters(), None) is not None or name in self._drawing:
            return True
        return name not in self._flow.free and self._takes_layers(args, kwargs)

    def _takes_layers(self, args: Any, kwargs: Any) -> bool:
        return any(
            tensor in self._from_layers or isinstance(tensor, nn.Parameter) for tensor in tensors_in((args, kwargs))
        )

    def _call(self, what: Any, module: nn.Module | None, call: Callable[[], Any], given: Any) -> Any:
        number = self._next
        if self._is_last and number >= self._start:  # from here on everything is computed here
            self._check_has(what, module, given)
            self._next = self._stop
            return call()
        if number == self._stop:
            raise StageEnd
        layer = self._flow.layers[number]
        if layer.what != what:
            raise self._another(f"'{layer.name}' was its next layer and now is {_name(what)}")
        self._next += 1
        if number < self._start:
            return self._skipped(number, layer, module, given)
        self._check_has(what, module, given)
        return self._computed(layer, call, given)

    def _check_has(self, what: Any, module: nn.Module | None, given: Any) -> None:
        """Check that the parameters that a call trains are the stage's: those of others have no values."""
        if not torch.is_grad_enabled():
            return
        is_strange = module is not None and what not in self._names_of_stage and any(True for _ in module.parameters())
        if is_strange or any(isinstance(one, nn.Parameter) and id(one) not in self._lent for one in tensors_in(given)):
            raise self._another(f"{_name(what)} takes a parameter that was not used there")

    def _computed(self, layer: Layer, call: Callable[[], Any], given: Any) -> Any:
        self._emitted = dict.fromkeys(layer.emits)
        output = call()
        outputs = [output, *_adopted(layer, given), *self._emitted.values()]
        gives = tensors_in(outputs)
        if len(gives) != len(layer.gives):
            raise self._another(f"'{layer.name}' returned {len(layer.gives)} tensors and now returns {len(gives)}")
        for slot, tensor in zip(layer.gives, gives, strict=True):
            self._from_layers[tensor] = slot
            if slot in self._leaving:
                self._of_slot[slot] = tensor
        self._outputs.append(pytree.tree_map_only(Tensor, TensorForm.of, outputs))
        return output

    def _skipped(self, number: int, layer: Layer, module: nn.Module | None, given: Any) -> Any:
        """What another stage computed."""
        slots = iter(layer.gives)
        outputs = pytree.tree_map_only(TensorForm, lambda form: self._tensor(next(slots), form), self._outputs[number])
        adopted = _adopted(layer, given)
        for tensor, value, slot in zip(adopted, outputs[1:], _slots_of_adopted(layer, outputs), strict=False):
            if slot in self._arrived and value is not tensor:
                tensor.copy_(value)
            self._of_slot[slot] = tensor
            self._from_layers[tensor] = slot
        output = outputs[0]
        if module is not None:
            args, kwargs = given
            output = _after_hooks(module, args, kwargs, output)
        for name, emitted in zip(layer.emits, outputs[1 + len(adopted) :], strict=True):
            _after_hooks(self._model.get_submodule(name), (), {}, emitted)
        return output

    def _tensor(self, slot: int, form: TensorForm) -> Tensor:
        if slot not in self._of_slot:
            self._of_slot[slot] = _nothing(form, self._device)
        tensor = self._of_slot[slot]
        self._from_layers[tensor] = slot
        return tensor

    def _another(self, how: str) -> ModelError:
        return ModelError(
            f"The forward pass of {type(self._model).__name__} calls other layers for this batch than for the example "
            f"by which it was cut into stages ({how}): give run.prepare an example that is like the batches, move what "
            "differs into one module, or choose another strategy."
        )


def _name(what: Any) -> str:
    return f"'{what if isinstance(what, str) else getattr(what, '__name__', what)}'"


def _adopted(layer: Layer, given: Any) -> list[Tensor]:
    tensors = tensors_in(given) if layer.adopts else []
    return [tensors[place] for place in layer.adopts]


def _slots_of_adopted(layer: Layer, outputs: Sequence[Any]) -> Sequence[int]:
    return layer.gives[len(tensors_in(outputs[0])) :]


def _nothing(form: TensorForm, device: torch.device) -> Tensor:
    """A tensor of that form, expanded from a scalar; NaN if floating, so that a loss that uses it by mistake is NaN."""
    is_float = form.dtype.is_floating_point or form.dtype.is_complex
    one = torch.full((), torch.nan if is_float else 0, dtype=form.dtype, device=device)
    return one.expand(form.shape).requires_grad_(form.requires_grad)


def _after_hooks(module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
    """Call the model's own forward hooks, which may collect outputs for its last layers; returns their output."""
    for key, hook in module._forward_hooks.items():
        if getattr(hook, "__module__", "").startswith(("torch.distributed", "paceline.")):
            continue  # they belong to a stage that computes the module
        given = (args, kwargs, output) if key in module._forward_hooks_with_kwargs else (args, output)
        result = hook(module, *given)
        output = output if result is None else result
    return output
