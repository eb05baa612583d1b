"""How many bytes a worker sends along the tensor axis, by formula."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.parallel.tensor.linear import tied_product
from paceline.parallel.tensor.plan import TensorPlan
from paceline.parallel.tensor.slices import slice_size

_WITHOUT_COLLECTIVE = {"heads", "local_dropout", "sequence_parallel"}
"""Styles that send nothing for a sample."""


@dataclass(frozen=True)
class LayerSize:
    """Numbers that pass through a layer for one sample, and those of the layer itself."""

    num_in: int
    num_out: int
    input_has_gradient: bool
    """False where nothing trainable lies before the layer."""
    num_positions: int = 1
    """The length of the output's last dimension but one."""
    num_rows: int = 1
    """Rows of its weight: output features, channels or words."""

    def padded_positions(self, degree: int) -> float:
        return _padded(self.num_positions, degree)


def _padded(length: int, degree: int) -> float:
    """What slices as long as the longest add up to, relative to the length."""
    return slice_size(length, degree) * degree / length


def bytes_per_sample(plan: TensorPlan, sizes: Mapping[str, LayerSize], itemsize: int) -> float:
    """Bytes that each worker sends along the axis for one sample, forward and backward; `itemsize` bytes a number.

    Summing a tensor of S bytes over n workers makes each of them send 2 (n - 1) / n S (Patarasuk and Yuan 2009,
    "Bandwidth optimal all-reduce algorithms", section 3), and gathering one (n - 1) / n S. A pair of linear layers
    is summed once forward and once backward (Shoeybi et al. 2019, "Megatron-LM", section 3). Gathered slices are as
    long as the longest. Attention weights are not counted, for models that ask for them.

    In sequence-parallel regions an all-gather and a reduce-scatter take the place of each sum (Korthikanti et al. 2022,
    section 4.2.2); to enter one costs an all-gather in backward, and to leave it one in forward. A reduce-scatter
    counts as a ring does it, (n - 1) / n S; Gloo sums and throws away: twice that.
    """
    n = plan.degree
    total = 0.0
    for name, entry in plan.entries.items():
        if entry.keys() <= _WITHOUT_COLLECTIVE:
            continue
        size = sizes[name]
        gradient = size.num_in * size.input_has_gradient
        padded = size.padded_positions(n)
        if "gather_sequence" in entry:
            total += (size.num_in + gradient) * padded
        elif "split_input" in entry:
            total += gradient
        elif entry.keys() & {"colwise", "packed_colwise", "channels", "attention"}:
            total += 0.0 if entry.keys() & {"local_input", "same_input"} else 2.0 * gradient
        if "scatter_sequence" in entry:
            total += 2.0 * size.num_out * padded
        elif entry.keys() & {"rowwise", "attention", "embedding_rowwise"}:
            total += 2.0 * size.num_out
        elif "gather_output" in entry:
            total += _padded(size.num_rows, n) * size.num_out
        for conv in entry.get("gather_channels", ()):
            total += _padded(sizes[conv].num_rows, n) * size.num_out
        if "enter_sequence_region" in entry:
            total += gradient * padded
        if "leave_sequence_region" in entry:
            total += size.num_out * padded
        tied = sizes.get(_tied_name(name))
        if "embedding_rowwise" in entry and tied is not None:
            total += 2.0 * tied.num_in * tied.input_has_gradient + _padded(size.num_rows, n) * tied.num_out
    return total * itemsize * (n - 1) / n


def layer_sizes(model: nn.Module, call: Callable[[nn.Module], Any], num_samples: int) -> dict[str, LayerSize]:
    """What passes through every layer in `call(model)`, which takes `num_samples` through a model not yet divided.

    Meta tensors do.
    """
    sizes: dict[str, LayerSize] = {}
    embeddings = {id(m.weight): name for name, m in model.named_modules() if isinstance(m, nn.Embedding)}

    def record(name: str, module: nn.Module | None, inputs: list[Tensor], output: Tensor) -> None:
        weight: Any = getattr(module, "weight", None)
        sizes[name] = LayerSize(
            num_in=sum(tensor.numel() for tensor in inputs) // num_samples,
            num_out=output.numel() // num_samples,
            input_has_gradient=any(tensor.requires_grad for tensor in inputs),
            num_positions=output.shape[-2] if output.dim() > 1 else 1,
            num_rows=len(weight) if isinstance(weight, Tensor) and weight.dim() > 0 else 1,
        )

    class Products(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            output = func(*args, **(kwargs or {}))
            product = tied_product(func, args, kwargs or {})
            if product is not None:
                base = product.matrix if product.is_transposed else product.matrix._base
                if id(base) in embeddings:
                    record(_tied_name(embeddings[id(base)]), None, [product.input], output)
            return output

    handles = []
    for name, module in model.named_modules():

        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, name: str = name
        ) -> None:
            given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            if isinstance(module, nn.MultiheadAttention):
                inputs = {id(tensor): tensor for tensor in given[:3]}.values()
                record(name, module, [tensor for tensor in inputs if tensor.requires_grad], output[0])
            elif given and isinstance(output, Tensor):
                record(name, module, given[:1], output)

        handles.append(module.register_forward_hook(hook, with_kwargs=True))
    try:
        with Products():
            call(model)
    finally:
        for handle in handles:
            handle.remove()
    return sizes


def _tied_name(embedding: str) -> str:
    return f"{embedding} (as classifier)"
