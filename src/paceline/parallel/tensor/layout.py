"""What became of a model's layers on the tensor axis, and how many bytes that makes a worker send."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.parallel.tensor.axis import part_size
from paceline.parallel.tensor.conv import Entry
from paceline.parallel.tensor.exchange import rows_to_trade
from paceline.parallel.tensor.linear import tied_product

Style = Literal["columns", "rows", "channels", "vocabulary", "heads", "attention"]
"""By output features, input features, output channels, words, or heads: of a linear layer, or a whole attention."""
Exit = Literal["gather", "sum", "part", "positions"]
"""What becomes of the parts of an output: laid side by side, added, handed on as they are, or added for the worker's
own positions."""


@dataclass(frozen=True)
class SplitLayer:
    """How one layer is shared out."""

    name: str
    style: Style
    entry: Entry | Literal["shared", "positions"]
    """As `conv.Entry`; "shared": by the entrance of a layer before it, which has the same input; "positions": what is
    given is a part of the positions, and all of them are gathered."""
    exit: Exit
    length: int
    """Output features, channels or words in all."""
    exits_after: str
    """The layer behind which the parts are brought together; its own name where it does that itself."""
    entrance: str = ""
    """By whose entrance it takes its input, if it is "shared"."""
    num_blocks: int = 1
    """More than one: the layer's rows are so many matrices above each other, and change workers to become heads."""
    row_size: int = 0
    """Weights in one row of such a layer, with its bias."""

    def __str__(self) -> str:
        return f"{self.name}: {self.style}"


@dataclass(frozen=True)
class Adjusted:
    """A module whose own numbers change because it sees a part: attention, that of its heads."""

    name: str
    numbers: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Stretch:
    """Modules that follow each other, between whose pairs of layers each worker keeps its part of the positions."""

    first: str
    """Before it the positions are parted."""
    last: str
    """Behind it they are gathered."""
    norms: tuple[tuple[str, int], ...]
    """And how many trained numbers each has: of their gradients every worker has a part's, so they are summed."""
    dropouts: tuple[str, ...]
    columns: tuple[str, ...]
    """They gather the positions, unless a door does."""
    rows: tuple[str, ...]
    """They give every worker the sum for its own positions."""
    doors: tuple[str, ...] = ()
    """Attentions before which positions are gathered, because they ask for the length of their input."""


@dataclass(frozen=True)
class TensorLayout:
    """Every layer that the workers of the axis share, and what a reader must know of the others."""

    degree: int
    layers: tuple[SplitLayer, ...]
    notes: tuple[str, ...] = ()
    dropouts: tuple[tuple[str, int], ...] = ()
    """Dropout on a part of so many features."""
    adjusted: tuple[Adjusted, ...] = ()
    stretches: tuple[Stretch, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"{self.degree} workers share each layer:", *map(str, self.layers), *self.notes])


@dataclass(frozen=True)
class LayerSize:
    """Numbers that pass through a layer for one sample."""

    num_in: int
    num_out: int
    input_has_gradient: bool
    """False where nothing trainable lies before the layer."""
    num_positions: int = 1
    """Of the output's last dimension but one."""

    def padded(self, degree: int) -> float:
        """By how much parts of its positions that are as long as the longest are more than the positions."""
        return part_size(self.num_positions, degree) * degree / self.num_positions


def bytes_per_sample(layout: TensorLayout, sizes: Mapping[str, LayerSize], itemsize: int) -> float:
    """Bytes that each worker sends along the axis for one sample, forward and backward; `itemsize` bytes a number.

    Summing a tensor of S bytes over n workers makes each of them send 2 (n - 1) / n S (Patarasuk and Yuan 2009,
    "Bandwidth optimal all-reduce algorithms", section 3), and gathering one (n - 1) / n S. A pair of linear layers
    is summed once forward and once backward (Shoeybi et al. 2019, "Megatron-LM", section 3). Gathered parts are as
    long as the longest. Attention weights are not counted, for models that ask for them.

    Where positions are parted, a gather and a scatter of a sum take the place of each sum (Korthikanti et al. 2022,
    section 4.2.2); that they are parted costs a gather in backward, and that they end a gather in forward. A scatter
    of a sum counts as a ring does it, (n - 1) / n S; Gloo's sums and throws away: twice that.
    """
    n = layout.degree
    total = 0.0
    for layer in layout.layers:
        size = sizes[layer.name]
        if layer.entry == "positions":
            total += (1.0 + size.input_has_gradient) * size.num_in * size.padded(n)
        elif size.input_has_gradient:
            total += {"whole": 2.0, "slice": 1.0, "part": 0.0, "shared": 0.0}[layer.entry] * size.num_in
        padded = part_size(layer.length, n) * n / layer.length
        out = sizes[layer.exits_after].num_out
        times = {"gather": padded, "sum": 2.0, "part": 0.0, "positions": 2.0 * sizes[layer.exits_after].padded(n)}
        total += times[layer.exit] * out
        tied = sizes.get(_tied_name(layer.name))
        if layer.style == "vocabulary" and tied is not None:
            total += 2.0 * tied.num_in * tied.input_has_gradient + padded * tied.num_out
    for stretch in layout.stretches:
        first, last = sizes[stretch.first], sizes[stretch.last]
        total += first.input_has_gradient * first.num_in * first.padded(n) + last.num_out * last.padded(n)
    return total * itemsize * (n - 1) / n


def bytes_per_pass(layout: TensorLayout, rank: int, itemsize: int) -> float:
    """Bytes that a worker sends for each forward and backward, however many samples: rows that change workers, and
    the gradients of norms that see a part of the positions."""
    n = layout.degree
    total = sum(2 * (n - 1) / n * num_trained for stretch in layout.stretches for _, num_trained in stretch.norms)
    for layer in layout.layers:
        if layer.num_blocks > 1:
            counts = rows_to_trade(layer.length, layer.num_blocks, layout.degree)
            forward = sum(counts[rank]) - counts[rank][rank]
            backward = sum(row[rank] for row in counts) - counts[rank][rank]
            total += (forward + backward) * layer.row_size
    return total * itemsize


def layer_sizes(model: nn.Module, call: Callable[[nn.Module], Any], num_samples: int) -> dict[str, LayerSize]:
    """What passes through every layer in `call(model)`, which takes `num_samples` through a model not yet shared out.

    Meta tensors do.
    """
    sizes: dict[str, LayerSize] = {}
    embeddings = {id(m.weight): name for name, m in model.named_modules() if isinstance(m, nn.Embedding)}

    def record(name: str, input: Tensor, output: Tensor) -> None:
        num_in, num_out = input.numel() // num_samples, output.numel() // num_samples
        sizes[name] = LayerSize(num_in, num_out, input.requires_grad, _num_positions(output))

    class Products(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            output = func(*args, **(kwargs or {}))
            product = tied_product(func, args, kwargs or {})
            if product is not None:
                base = product.matrix if product.is_transposed else product.matrix._base
                if id(base) in embeddings:
                    record(_tied_name(embeddings[id(base)]), product.input, output)
            return output

    handles = []
    for name, module in model.named_modules():

        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, name: str = name
        ) -> None:
            given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            if isinstance(module, nn.MultiheadAttention):
                inputs = {id(tensor): tensor for tensor in given[:3]}.values()
                trained = [tensor for tensor in inputs if tensor.requires_grad]
                num_in = sum(tensor.numel() for tensor in trained) // num_samples
                num_out = output[0].numel() // num_samples
                sizes[name] = LayerSize(num_in, num_out, bool(trained), _num_positions(output[0]))
            elif given and isinstance(output, Tensor):
                record(name, given[0], output)

        handles.append(module.register_forward_hook(hook, with_kwargs=True))
    try:
        with Products():
            call(model)
    finally:
        for handle in handles:
            handle.remove()
    return sizes


def _num_positions(output: Tensor) -> int:
    return output.shape[-2] if output.dim() > 1 else 1


def _tied_name(embedding: str) -> str:
    return f"{embedding} (as classifier)"
