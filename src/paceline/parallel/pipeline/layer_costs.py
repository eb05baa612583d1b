"""Measures the layers of a recorded model: time, memory, and what would be sent if a stage ended there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from paceline.parallel.clock import mark, seconds
from paceline.parallel.live_bytes import LiveBytes
from paceline.parallel.pipeline.halves import can_split, first_half, num_bytes
from paceline.parallel.pipeline.recorder import snapshot, untouched
from paceline.parallel.pipeline.recording import Recording, TensorSlot
from paceline.parallel.pipeline.watch import tensors_in
from paceline.spec.model_cost import LayerCost

# A model without values has no times: its layers are compared by their arithmetic, on a device of this speed.
META_FLOPS_PER_S = 1e12

_NUM_REPEATS = 3


def measure_layers(recording: Recording, device: torch.device) -> list[LayerCost]:
    """The cost of every layer for the example that the model was recorded with.

    Layers run one by one, forward and backward, on the values they were given then; the fastest of several runs
    counts, which is the least disturbed. On the meta device times are in proportion to floating-point operations, and
    what lives for a moment of a layer's backward pass is counted too.
    Without an example every layer counts as much as its parameters.
    """
    allowed = recording.may_begin()
    counted: set[int] = set()
    costs = []
    with untouched(recording.model):
        for number, layer in enumerate(recording.layers):
            parameters = [p for p in _parameters(recording, number) if id(p) not in counted]
            counted.update(map(id, parameters))
            parameter_bytes = sum(p.nbytes for p in parameters)
            measured = _Measured(float(parameter_bytes))
            if recording.values:
                measured = _measure_layer(recording, number, device)
            is_last = number + 1 == len(recording.layers)
            crossing = [] if is_last or not recording.values else recording.trained.crossing(number + 1)
            output_bytes = tensor_bytes([recording.values[slot] for slot in crossing])
            costs.append(
                LayerCost(
                    name=layer.name,
                    time_s=measured.time_s,
                    parameter_bytes=parameter_bytes,
                    activation_bytes=measured.kept_bytes,
                    moment_bytes=measured.moment_bytes,
                    waiting_bytes=measured.waiting_bytes,
                    largest_parameter_bytes=max((p.nbytes for p in parameters), default=0),
                    output_bytes=output_bytes,
                    may_begin=allowed[number],
                )
            )
    return costs


def _parameters(recording: Recording, number: int) -> list[nn.Parameter]:
    layer = recording.layers[number]
    if layer.function is None:
        return list(recording.model.get_submodule(layer.name).parameters())
    return [recording.model.get_parameter(name) for name in layer.parameters]


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in a value, however nested."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))


@dataclass(frozen=True)
class _Measured:
    """What a layer takes, forward and backward."""

    time_s: float
    kept_bytes: int = 0
    moment_bytes: int = 0
    """What lives for a moment of backward."""
    waiting_bytes: int = 0
    """What waits between the halves of backward."""


def _measure_layer(recording: Recording, number: int, device: torch.device) -> _Measured:
    layer = recording.layers[number]
    function: Any = layer.function
    if function is None:
        function = recording.model.get_submodule(layer.name)
    elif isinstance(function, type):
        function = function.apply  # type: ignore[attr-defined]

    leaves: list[Tensor] = []

    def fresh(leaf: Any) -> Any:
        if isinstance(leaf, TensorSlot):
            leaf = recording.values[leaf.number]
        if isinstance(leaf, nn.Parameter):
            return leaf
        if not isinstance(leaf, Tensor):
            return snapshot(leaf)
        tensor = leaf.detach().clone()
        # A step away from the leaves, so that a layer may change its inputs in place.
        if tensor.is_floating_point() or tensor.is_complex():
            leaves.append(tensor.requires_grad_())
            return _Copy.apply(tensor)  # type: ignore[no-untyped-call]
        return tensor

    def inputs() -> tuple[Any, Any]:
        leaves.clear()
        found: tuple[Any, Any] = pytree.tree_map(fresh, recording.arguments[number])
        return found

    own = _parameters(recording, number)
    if any(recording.values[slot].is_meta for slot in (*layer.takes, *layer.gives)):
        args, kwargs = inputs()
        with FlopCounterMode(display=False) as counter, counting_kept(own) as kept_bytes:
            backward(function(*args, **kwargs))
        moment_bytes = _moment_bytes(function, inputs, own)
        args, kwargs = inputs()
        waiting_bytes = _waiting_bytes(tensors_in(function(*args, **kwargs)), leaves, own)
        return _Measured(counter.get_total_flops() / META_FLOPS_PER_S, kept_bytes(), moment_bytes, waiting_bytes)
    times_s = []
    for repeat in range(1 + _NUM_REPEATS):  # the first warms up
        args, kwargs = inputs()
        begin = mark(device)
        if repeat == 0:
            with counting_kept(own) as kept_bytes:
                backward(function(*args, **kwargs))
        else:
            backward(function(*args, **kwargs))
        times_s.append(seconds(begin, mark(device)))
    return _Measured(min(times_s[1:]), kept_bytes())


def _moment_bytes(function: Any, inputs: Callable[[], tuple[Any, Any]], own: Iterable[nn.Parameter]) -> int:
    """The most bytes by which more is alive within a layer's backward pass than before it, without the gradients of
    parameters: what the layer keeps goes meanwhile."""
    for parameter in own:
        parameter.grad = None
    with LiveBytes() as live:
        args, kwargs = inputs()
        # Gradients of outputs are made within backward, and freed as soon as they have been used.
        totals = [(leaf * 1).sum() for leaf in tensors_in(function(*args, **kwargs)) if leaf.requires_grad]
        ones = [torch.ones_like(total) for total in totals]
        del args, kwargs
        live.begin()
        before_bytes: int = live.peak_bytes
        if totals:
            torch.autograd.backward(totals, ones)
        for parameter in own:
            if parameter.grad is not None:
                live.ignore(parameter.grad)
    peak_bytes: int = live.peak_bytes
    return peak_bytes - before_bytes


def _waiting_bytes(outputs: Iterable[Tensor], inputs: list[Tensor], own: Iterable[nn.Parameter]) -> int:
    """Bytes that wait for the second half of a layer's backward pass; 0 where it is not split."""
    roots = [one for one in outputs if one.requires_grad]
    weights = [one for one in own if one.requires_grad]
    if not inputs or not can_split(roots, inputs, weights):
        return 0
    return num_bytes(first_half(roots, [None] * len(roots), inputs, weights))


class _Copy(torch.autograd.Function):
    """A copy whose gradient is the gradient of the original itself."""

    @staticmethod
    def forward(_ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


@contextmanager
def counting_kept(own: Iterable[Tensor] = ()) -> Iterator[Callable[[], int]]:
    """Count the bytes that forward passes inside of the `with` keep for backward, each piece of memory once.

    Args:
        own: parameters and buffers, which are in memory anyway; no other parameter counts, such as a gathered one.
    """
    held = {tensor.untyped_storage()._cdata for tensor in own}
    kept: dict[int, UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        whole = tensor if tensor._base is None else tensor._base
        if storage._cdata not in held and not isinstance(whole, nn.Parameter):
            kept[storage._cdata] = storage  # alive, or another one might get its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield lambda: sum(storage.nbytes() for storage in kept.values())


def backward(output: Any) -> None:
    """Differentiate every tensor of `output`, by ones."""
    roots = [leaf for leaf in tensors_in(output) if leaf.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
