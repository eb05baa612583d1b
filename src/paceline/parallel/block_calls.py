"""Which blocks a call of a model runs, and which of their outputs everything that comes after them needs.

A model is tried with weights that are zeros, and a `TorchFunctionMode` follows tensors through what the model computes
between its blocks. So a pipeline knows what a stage has to be sent, and how large it is, before a block is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from paceline.comm.buckets import dense_form
from paceline.errors import ModelError
from paceline.parallel.blocks import blocks_of, copy_of_modules
from paceline.parallel.pass_state import BATCH_NORMS, host_states, preserved_buffers, torch_states
from paceline.tensors import map_tensors, open_container, tensors

_READS_VALUES = {torch.equal, torch.allclose, torch.is_nonzero} | {
    getattr(Tensor, name)
    for name in (
        *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__array__", "__contains__"),
        *("__bool__", "__int__", "__float__", "__complex__", "__index__"),
    )
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
    """A block's forward pass within the model's; the last one of a pass stands for the model's own."""

    path: str
    """The block's name in the model; empty for the model itself."""
    needs: frozenset[Source]
    """What the block's arguments, or the model's output, follow from, by operations between blocks alone."""
    forms: Sequence[Tensor]
    """What the tensors that it returns are like, without values: random numbers are drawn in the order in which
    dimensions lie in memory."""
    around: Any
    """What is around these tensors."""
    draws: bool = False
    """Whether the block draws random numbers."""
    flops: int = 0

    @classmethod
    def of(cls, path: str, needs: frozenset[Source], returned: Any, *, draws: bool = False, flops: int = 0) -> Self:
        forms = [dense_form(one) for one in tensors(returned, in_objects=True)]
        around = map_tensors(returned, lambda one: one.new_empty(0), in_objects=True)
        return cls(path, needs, forms, around, draws, flops)

    def returned(self, leaves: Iterable[Tensor]) -> Any:
        """What the block returns, with these tensors."""
        left = iter(leaves)
        return map_tensors(self.around, lambda _tensor: next(left), in_objects=True)


# --- calls of blocks ---


Observer = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""What answers the calls of watched blocks during a pass, from a block's path, the block, and its arguments."""

_observer: ContextVar[Observer | None] = ContextVar("observer of blocks", default=None)


@contextmanager
def observed_by(observer: Observer | None) -> Iterator[None]:
    """A context in which an observer answers the calls of watched blocks. Without one, and inside of blocks, they just
    run."""
    before = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(before)


class _Watched:
    """Comes before the class of a block: what is around a call sees it with its hooks, and with activation
    checkpointing."""

    path_in_model: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        observer = _observer.get()
        if observer is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        with observed_by(None):
            return observer(self.path_in_model, self, args, kwargs)  # type: ignore[arg-type]


def watch(blocks: Mapping[str, nn.Module]) -> None:
    """Let observers see the calls of blocks, by path. As `fully_shard` does it, by classes of their own."""
    for path, block in blocks.items():
        kind = type(block)
        block.__class__ = type(kind.__name__, (_Watched, kind), {"__module__": kind.__module__})
        vars(block)["path_in_model"] = path


# --- a pass with weights of zeros ---


class _Tracer(TorchFunctionMode):
    """Follows tensors through the operations between blocks, by the memory that they lie in."""

    def __init__(self, model: nn.Module, device: torch.device, flops: FlopCounterMode) -> None:
        super().__init__()
        self.calls: list[BlockCall] = []
        self._device, self._flops = device, flops
        self._sources: dict[int, frozenset[Source]] = {}
        """The sources of a tensor, by the address of its memory."""
        self._alive: list[Tensor] = []
        """All that is followed: another tensor could get its memory."""
        for name, parameter in model.named_parameters():
            self._follow(parameter, frozenset([name]))

    def _follow(self, value: Any, sources: frozenset[Source]) -> None:
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
        if _observer.get() is None:  # inside of a block
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
        self._follow(args[:1] if result is None else result, sources)
        return result

    def call(self, path: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        needs = self.sources((args, kwargs))
        states, flops = torch_states(self._device), self._flops.get_total_flops()
        value = block(*args, **kwargs)
        if any(isinstance(one, PackedSequence) for one in (value, *args, *kwargs.values())):
            raise ModelError(f"'{path}' takes or returns a packed sequence, which stages cannot send; pad it.")
        draws, flops = states != torch_states(self._device), self._flops.get_total_flops() - flops
        leaves = [one.clone() for one in tensors(value, in_objects=True)]  # a block may return what it was given
        for place, leaf in enumerate(leaves):
            self._follow(leaf, frozenset([Output(len(self.calls), place)]))
        self.calls.append(BlockCall.of(path, needs, value, draws=draws, flops=flops))
        return self.calls[-1].returned(leaves)


class Skeleton:
    """A model's modules with all parameters 0, in almost no memory; it has no buffer in common with the model."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """
        Args:
            model: on any device, the meta device too.
            device: where it is to be.
        """
        zeros: dict[int, Any] = {
            id(one): nn.Parameter(expanded_zeros(one, device), one.requires_grad) for one in model.parameters()
        }
        for buffer in model.buffers():
            zeros[id(buffer)] = torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.clone().to(device)
        self.model = copy_of_modules(model, zeros)
        self.device = device
        self._training = {module: module.training for module in self.model.modules()}
        watch(blocks_of(self.model))

    @torch.no_grad()
    def trace(self, call: ModelCall, *, training: bool) -> list[BlockCall]:
        """Run the model. Raises `ModelError` where it decides by values of tensors between blocks, changes buffers,
        draws from Python's or NumPy's generators, or hands on what cannot be sent."""
        for module, is_trained in self._training.items():
            module.training = training and is_trained
        states, before = host_states(), self._buffers()
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), preserved_buffers(self.model), FlopCounterMode(display=False) as flops:
            tracer = _Tracer(self.model, self.device, flops)
            with observed_by(tracer.call), tracer:
                output = self.model(*call.args, **call.kwargs)
            now = self._buffers()
        changed = [name for name, one in before.items() if name not in now or not torch.equal(now[name], one)]
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
        return [*tracer.calls, BlockCall.of("", tracer.sources(output), output)]

    def _buffers(self) -> dict[str, Tensor]:
        """Copies of all buffers but those of batch norm layers, by name."""
        return {
            name: buffer.clone()
            for name, buffer in self.model.named_buffers()
            if not isinstance(self.model.get_submodule(name.rpartition(".")[0]), BATCH_NORMS)
        }


def expanded_zeros(parameter: Tensor, device: torch.device) -> Tensor:
    """Zeros of the shape and dtype of a parameter, which take the memory of one."""
    return torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
