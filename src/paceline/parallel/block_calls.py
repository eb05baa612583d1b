"""Which blocks a call of a model runs, and which of their outputs everything that comes after them needs.

A model is tried with weights that are zeros, and a `TorchFunctionMode` follows tensors through what the model computes
between its blocks. So a pipeline knows what a stage has to be sent, and how large it is, before a block is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from paceline.containers import map_tensors, open_container, tensors
from paceline.errors import ModelError
from paceline.parallel.blocks import blocks_of, copy_of_modules
from paceline.parallel.buckets import dense_form
from paceline.parallel.buffers import BATCH_NORMS, buffers_kept
from paceline.parallel.generators import host_states, torch_states

_READS_VALUES = {
    getattr(Tensor, name)
    for name in ("item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__array__", "__contains__")
} | {
    *(getattr(Tensor, f"__{kind}__") for kind in ("bool", "int", "float", "complex", "index")),
    *(torch.equal, torch.allclose, torch.is_nonzero),
}
"""Functions whose results are Python's values, which may decide what is computed."""


@dataclass(frozen=True)
class ModelCall:
    """The arguments that a model is called with."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, example: Any) -> Self:
        """A tensor, a tuple of positional arguments, or a mapping of keyword arguments."""
        if isinstance(example, Mapping):
            return cls((), dict(example))
        return cls(example if isinstance(example, tuple) else (example,))

    @property
    def form(self) -> Hashable:
        """All about the call but the values of its tensors."""
        return _described((self.args, dict(self.kwargs)))


def _described(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return value.dtype, value.shape
    container = open_container(value, in_objects=True)
    if container is None:
        return repr(value)
    return type(value).__name__, container.keys, *map(_described, container.values)


@dataclass(frozen=True)
class Returned:
    """What a block or a model returns."""

    forms: Sequence[Tensor]
    """What its tensors are like, without values: random numbers are drawn in the order in which dimensions lie in
    memory."""
    around: Any
    """What is around them."""

    @classmethod
    def of(cls, value: Any) -> Self:
        forms = [dense_form(one) for one in tensors(value, in_objects=True)]
        return cls(forms, map_tensors(value, lambda one: one.new_empty(0), in_objects=True))

    def filled(self, leaves: Sequence[Tensor]) -> Any:
        """It, with these tensors."""
        left = iter(leaves)
        return map_tensors(self.around, lambda _tensor: next(left), in_objects=True)


class Output(NamedTuple):
    """A tensor that a block has returned."""

    call: int
    """The place of the call among those of the pass."""
    place: int
    """Among the tensors that the block returned."""


class Draw(NamedTuple):
    """Random numbers that were drawn between two blocks."""

    call: int
    """The call before them."""


Source = Output | Draw | str
"""What a value follows from; a string is the name of a parameter."""


@dataclass(frozen=True)
class BlockCall:
    """A block's forward pass within the model's."""

    path: str
    needs: frozenset[Source]
    """What the block's arguments follow from, by operations between blocks alone."""
    returned: Returned
    draws: bool
    """Whether the block draws random numbers."""
    is_trained: bool
    """Whether a parameter of the block is."""
    flops: int


@dataclass(frozen=True)
class Trace:
    """A forward pass of a model."""

    calls: Sequence[BlockCall]
    needs: frozenset[Source]
    """What the model's output follows from, by operations between blocks alone."""
    returned: Returned


# --- calls of blocks ---


Call = Callable[..., Any]


Observer = Callable[[str, Call, tuple[Any, ...], dict[str, Any]], Any]
"""What answers the calls of blocks during a pass: called with a block's path, the block, and its arguments."""


class BlockCalls:
    """Hands the calls of watched blocks to an observer; outside of its passes, and inside of blocks, they just run."""

    def __init__(self) -> None:
        self._observer: Observer | None = None

    @contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None

    def call(self, path: str, block: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        observer, self._observer = self._observer, None
        try:
            return block(*args, **kwargs) if observer is None else observer(path, block, args, kwargs)
        finally:
            self._observer = observer


class _Watched:
    """Comes before the class of a block: what is around a call sees it with its hooks, and with activation
    checkpointing."""

    path_and_calls: tuple[str, BlockCalls]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        path, calls = self.path_and_calls
        block: Call = super().__call__  # type: ignore[misc]
        return calls.call(path, block, args, kwargs)


def watch(block: nn.Module, path: str, calls: BlockCalls) -> None:
    """Let calls of `block` go through `calls`. As `fully_shard` does it, by a class of its own."""
    kind = type(block)
    block.__class__ = type(kind.__name__, (_Watched, kind), {"__module__": kind.__module__})
    vars(block)["path_and_calls"] = path, calls


# --- a pass with weights of zeros ---


class _Tracer(TorchFunctionMode):
    """Follows tensors through the operations between blocks, by the memory that they lie in."""

    def __init__(self, model: nn.Module, device: torch.device, flops: FlopCounterMode) -> None:
        super().__init__()
        self.calls: list[BlockCall] = []
        self._device, self._flops = device, flops
        self._trained = {
            path for path, block in blocks_of(model).items() if any(one.requires_grad for one in block.parameters())
        }
        self._sources: dict[int, frozenset[Source]] = {}
        """By the address of the memory."""
        self._alive: list[Tensor] = []
        """All that is followed: another tensor could get its memory."""
        self._is_in_block = False
        for name, parameter in model.named_parameters():
            self._follows(parameter, frozenset([name]))

    def _follows(self, value: Any, sources: frozenset[Source]) -> None:
        for one in tensors(value, in_objects=True):
            if sources and one.layout == torch.strided and one.numel():
                address = one.untyped_storage().data_ptr()
                self._sources[address] = self._sources.get(address, frozenset()) | sources
                self._alive.append(one)

    def sources(self, value: Any) -> frozenset[Source]:
        strided = (one for one in tensors(value, in_objects=True) if one.layout == torch.strided and one.numel())
        known = (self._sources.get(one.untyped_storage().data_ptr(), frozenset()) for one in strided)
        return frozenset().union(*known)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_in_block:
            return func(*args, **kwargs)
        sources = self.sources((args, kwargs))
        if sources and func in _READS_VALUES:
            raise ModelError(
                "The model cannot be cut into stages: between its blocks it takes the value of a tensor as a Python "
                "number, or decides by it, which other stages do not know; do so inside of a block, or choose another "
                "strategy."
            )
        states = torch_states(self._device)
        result = func(*args, **kwargs)
        if self.calls and states != torch_states(self._device):
            sources |= {Draw(len(self.calls) - 1)}
        self._follows(args[:1] if result is None else result, sources)
        return result

    def call(self, path: str, block: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        needs = self.sources((args, kwargs))
        states, flops = torch_states(self._device), self._flops.get_total_flops()
        self._is_in_block = True
        value = block(*args, **kwargs)
        if any(isinstance(one, PackedSequence) for one in (value, *args, *kwargs.values())):
            raise ModelError(f"'{path}' takes or returns a packed sequence, which stages cannot send; pad it.")
        leaves = [*tensors(value, in_objects=True)]
        draws = states != torch_states(self._device)
        flops = self._flops.get_total_flops() - flops
        made = BlockCall(path, needs, Returned.of(value), draws, path in self._trained, flops)
        leaves = [leaf.clone() for leaf in leaves]  # a block may return what it was given
        for place, leaf in enumerate(leaves):
            self._follows(leaf, frozenset([Output(len(self.calls), place)]))
        self.calls.append(made)
        self._is_in_block = False
        return made.returned.filled(leaves)


class Skeleton:
    """A model's modules with all parameters 0, in almost no memory; it has no buffer in common with the model."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """
        Args:
            model: on any device, the meta device too.
            device: where it is to be.
        """
        zeros: dict[int, Any] = {
            id(one): nn.Parameter(torch.zeros((), dtype=one.dtype, device=device).expand(one.shape), one.requires_grad)
            for one in model.parameters()
        }
        for buffer in model.buffers():
            zeros[id(buffer)] = torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.clone().to(device)
        self.model = copy_of_modules(model, zeros)
        self._training = {module: module.training for module in self.model.modules()}
        self.device = device
        self.calls = BlockCalls()
        for path, block in blocks_of(self.model).items():
            watch(block, path, self.calls)

    @torch.no_grad()
    def trace(self, call: ModelCall, *, training: bool) -> Trace:
        """Run the model.

        Raises:
            ModelError: it decides by values of tensors between blocks, changes buffers, draws from Python's or NumPy's
                generators, or hands on what cannot be sent.
        """
        for module, is_trained in self._training.items():
            module.training = training and is_trained
        states = host_states()
        norms = {
            id(one) for module in self.model.modules() if isinstance(module, BATCH_NORMS) for one in module.buffers()
        }
        before = {name: one.clone() for name, one in self.model.named_buffers() if id(one) not in norms}
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), buffers_kept(self.model), FlopCounterMode(display=False) as flops:
            tracer = _Tracer(self.model, self.device, flops)
            with self.calls.observed_by(tracer.call), tracer:
                output = self.model(*call.args, **call.kwargs)
            now = dict(self.model.named_buffers())
            changed = [name for name, one in before.items() if not torch.equal(now.get(name, one.new_empty(0)), one)]
        if changed:
            raise ModelError(
                f"Forward passes change buffers ({changed[0]}), which a pipeline cannot combine over virtual shards "
                "unless they are of batch norm layers; use dp, fsdp or tp."
            )
        if host_states() != states:
            raise ModelError(
                "The model draws random numbers from Python's random or NumPy, whose states no stage of a pipeline "
                "sends on; draw from torch, or choose another strategy."
            )
        return Trace(tracer.calls, tracer.sources(output), Returned.of(output))
