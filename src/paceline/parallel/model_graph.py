"""A model as a graph of its blocks and of the operations between them, which can be cut before any block.

`torch.export` makes it, of a skeleton that has the model's modules and no memory for its parameters. Blocks are opaque
to it: they are calls of the modules themselves, in the mode that these are in, with the hooks that they have. So only
what a model computes between its blocks has to be what export can take.
"""

from __future__ import annotations

import copy
import itertools
import operator
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.nn.utils.rnn import PackedSequence
from torch.utils.flop_counter import FlopCounterMode

from paceline.containers import map_tensors, open_object, tensors, to_device
from paceline.errors import ModelError
from paceline.parallel.blocks import blocks_of
from paceline.parallel.buffers import BATCH_NORMS, buffers_kept
from paceline.parallel.generators import host_states

_PLACE = torch.empty(0)
"""Where a tensor was that has been taken out."""


def take_apart(value: Any) -> tuple[list[Tensor], Any]:
    """The tensors in `value`, however nested, and what is around them."""
    return list(tensors(value, open_object)), map_tensors(value, lambda _tensor: _PLACE, open_object)


def put_together(around: Any, leaves: Sequence[Any]) -> Any:
    """What `take_apart` took apart, with other tensors."""
    left = iter(leaves)
    return map_tensors(around, lambda _tensor: next(left), open_object)


def _described(value: Any) -> Hashable:
    """All about a value but its tensors."""
    container = None if isinstance(value, Tensor) else open_object(value)
    if container is None:
        return "a tensor" if isinstance(value, Tensor) else repr(value)
    return type(value).__name__, container.places, *map(_described, container.values)


def _constants(value: Any) -> Iterator[Any]:
    """What is in a value that is no tensor and no container."""
    container = None if isinstance(value, Tensor) else open_object(value)
    if container is not None:
        for one in container.values:
            yield from _constants(one)
    elif not isinstance(value, Tensor):
        yield value


@dataclass(frozen=True)
class ModelCall:
    """The arguments that a model is called with."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, example: Any) -> Self:
        """A tensor, a tuple of positional arguments, or a mapping of keyword arguments."""
        if isinstance(example, cls):
            return example
        if isinstance(example, Mapping):
            return cls((), dict(example))
        return cls(example if isinstance(example, tuple) else (example,))

    def on(self, device: torch.device) -> Self:
        """The call with its tensors on `device`."""
        return type(self)(*to_device((self.args, dict(self.kwargs)), device))


@dataclass(frozen=True)
class Arguments:
    """A call of a model: its tensors, and what is around them."""

    leaves: Sequence[Tensor]
    around: Any

    @classmethod
    def of(cls, call: ModelCall) -> Self:
        leaves, around = take_apart((call.args, dict(call.kwargs)))
        if not any(leaf.dim() for leaf in leaves):
            raise ModelError("The model is called without a tensor that has samples; a pipeline cannot divide them.")
        return cls(leaves, around)

    @property
    def batch_leaf(self) -> int:
        """The first tensor that has samples: its first dimension counts them."""
        return next(place for place, leaf in enumerate(self.leaves) if leaf.dim())

    @property
    def num_samples(self) -> int:
        return len(self.leaves[self.batch_leaf])

    @property
    def has_samples(self) -> tuple[bool, ...]:
        """Which tensors have the samples as first dimension."""
        return tuple(leaf.dim() > 0 and len(leaf) == self.num_samples for leaf in self.leaves)

    @property
    def form(self) -> Hashable:
        """All that the model's graph follows from: equal for any number of samples."""
        shapes = (
            (leaf.dtype, leaf.shape[1:] if has_samples else leaf.shape)
            for leaf, has_samples in zip(self.leaves, self.has_samples, strict=True)
        )
        return (*shapes, _described(self.around))

    def with_samples(self, num_samples: int) -> Arguments:
        """The call with another number of samples, repeated from these."""
        rows = torch.arange(num_samples) % self.num_samples
        found = [
            leaf[rows.to(leaf.device)] if has_samples else leaf
            for leaf, has_samples in zip(self.leaves, self.has_samples, strict=True)
        ]
        return Arguments(found, self.around)

    def sizes(self) -> tuple[int, int]:
        """Two numbers of samples that are no other dimension's size, which a graph could take one for."""
        taken = {size for leaf in self.leaves for size in leaf.shape[1:]}
        few, more, *_ = (size for size in range(6, 100, 4) if size not in taken)
        return few, more


@dataclass(frozen=True)
class BlockCall:
    """A block's forward pass within the model's."""

    path: str
    outputs: Sequence[Tensor]
    """On the meta device."""
    around: Any
    """What is around the outputs."""
    flops: int


# What `paceline::block` stands for in the trace under way: for each call the outputs with two numbers of samples.
_traced: list[tuple[BlockCall, BlockCall]] = []
_sizes: list[int] = []


@torch.library.custom_op("paceline::block", mutates_args=())
def _block(number: int, inputs: Sequence[Tensor]) -> list[Tensor]:
    raise NotImplementedError(f"call {number} of a block with {len(inputs)} inputs is traced, not run")


@_block.register_fake
def _outputs_of_block(number: int, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Tensors whose sizes follow from the number of samples, which is that of the first input."""
    few, more = (call.outputs for call in _traced[number])
    low, high = _sizes
    num_samples = inputs[0].shape[0]

    def size(one: int, other: int) -> Any:
        step, rest = divmod(other - one, high - low)
        if rest:
            raise ModelError(f"'{_traced[number][0].path}' returns a size that is not linear in the number of samples.")
        start = one - step * low
        scaled = num_samples if step == 1 else step * num_samples
        return one if not step else scaled + start if start else scaled

    return [
        inputs[0].new_empty([size(*pair) for pair in zip(one.shape, other.shape, strict=True)], dtype=one.dtype)
        for one, other in zip(few, more, strict=True)
    ]


@dataclass
class _Seen:
    """What a trace sees beside the graph."""

    samples: Any = None
    """The first tensor that has samples."""
    output: Any = None
    """What is around the model's output."""
    inputs: list[Any] = field(default_factory=list)
    """What is around the arguments of each call of a block."""


class _Flat(nn.Module):
    """A model that takes and returns tensors."""

    def __init__(self, model: nn.Module, arguments: Arguments, seen: _Seen) -> None:
        super().__init__()
        self.model = model
        self._around, self._batch_leaf, self._seen = arguments.around, arguments.batch_leaf, seen

    def forward(self, *leaves: Tensor) -> list[Tensor]:
        self._seen.samples = leaves[self._batch_leaf]
        args, kwargs = put_together(self._around, leaves)
        found, self._seen.output = take_apart(self.model(*args, **kwargs))
        return found


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
        try:
            self.model = copy.deepcopy(model, zeros)
        except RuntimeError as problem:  # torch copies no tensors that autograd has made
            raise ModelError(
                "The model cannot be cut: it holds a tensor that was computed, as the weight that "
                "torch.nn.utils.weight_norm or prune makes; use torch.nn.utils.parametrizations, or the strategy dp."
            ) from problem
        for module in self.model.modules():
            config: Any = getattr(module, "config", None)
            if getattr(config, "use_cache", False):  # of transformers: to generate text, not to train
                config.use_cache = False
        self.modes = {module: module.training for module in self.model.modules()}
        self._device = device

    @contextmanager
    def _with_blocks(self, replaced: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
        """A context in which blocks run other functions in place of their forward methods."""
        blocks = blocks_of(self.model)
        before = {block: vars(block).get("forward") for block in blocks.values()}
        for path, block in blocks.items():
            block.forward = replaced(path, block.forward)
        try:
            yield
        finally:
            for block, forward in before.items():
                del block.forward
                if forward is not None:
                    block.forward = forward

    def set_mode(self, *, training: bool) -> None:
        for module, is_trained in self.modes.items():
            module.training = training and is_trained

    @torch.no_grad()
    def run(self, arguments: Arguments) -> list[BlockCall]:
        """Run the model, and see which blocks it calls.

        Raises:
            ModelError: its forward pass changes buffers, draws from Python's or NumPy's generators, or hands on what
                cannot be sent.
        """
        calls: list[BlockCall] = []

        def observed(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                before = counter.get_total_flops()
                value = forward(*args, **kwargs)
                leaves, around = take_apart(value)
                forms = [leaf.to("meta") for leaf in leaves]
                calls.append(BlockCall(path, forms, around, counter.get_total_flops() - before))
                if any(isinstance(one, PackedSequence) for one in (value, *args, *kwargs.values())):
                    raise ModelError(f"'{path}' takes or returns a packed sequence, which stages cannot send; pad it.")
                return value

            return run

        args, kwargs = put_together(arguments.around, arguments.leaves)
        states = host_states()
        norms = {
            id(one) for module in self.model.modules() if isinstance(module, BATCH_NORMS) for one in module.buffers()
        }
        before = {name: one.clone() for name, one in self.model.named_buffers() if id(one) not in norms}
        devices = [self._device] if self._device.type == "cuda" else []
        with (
            torch.random.fork_rng(devices),
            buffers_kept(self.model),
            FlopCounterMode(display=False) as counter,
            self._with_blocks(observed),
        ):
            self.model(*args, **kwargs)
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
        return calls

    def trace(self, arguments: Arguments) -> ModelGraph:
        """The graph of a call, for any number of samples.

        Raises:
            ModelError: the model decides by values of tensors which blocks it calls, or something else that cannot be
                traced.
        """
        sizes = arguments.sizes()
        few, more = (arguments.with_samples(size) for size in sizes)
        calls = list(zip(self.run(few), self.run(more), strict=True))
        _traced[:], _sizes[:] = calls, sizes
        seen = _Seen()

        def opaque(path: str, _forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                number = len(seen.inputs)
                leaves, around = take_apart((args, kwargs))
                if any(isinstance(one, torch.SymInt) for one in _constants(around)):
                    raise ModelError(f"'{path}' is given the number of samples; let it take that from its inputs.")
                seen.inputs.append(around)
                outputs = torch.ops.paceline.block(number, [seen.samples, *leaves])
                return put_together(calls[number][0].around, outputs)

            return run

        flat = _Flat(self.model, arguments, seen)
        dims = tuple({0: Dim.AUTO} if has_samples else None for has_samples in more.has_samples)
        try:
            with self._with_blocks(opaque), torch.no_grad(), warnings.catch_warnings(action="ignore"):
                program = torch.export.export(flat, tuple(more.leaves), dynamic_shapes=(dims,), strict=False)
                if _changes_in_place(program.graph):
                    program = program.run_decompositions({})
        except ModelError:
            raise
        except Exception as problem:
            raise ModelError(
                f"{type(self.model).__name__} cannot be cut into stages, because torch.export cannot trace what it "
                f"computes between its blocks ({str(problem).strip().splitlines()[0]}): it may not decide by values "
                "of tensors there, nor take them as Python numbers; choose another strategy."
            ) from problem
        finally:
            _traced.clear()
        traced: Any = program.module(check_guards=False)
        return ModelGraph(self.model, traced, arguments.batch_leaf, [call for call, _ in calls], seen)


def _changes_in_place(graph: fx.Graph) -> bool:
    """Whether an operation writes into a tensor that it is given, whose other uses would not tell so."""
    names = (str(node.target).split(".") for node in graph.nodes if node.op == "call_function")
    return any(name[0] == "aten" and name[1].endswith("_") for name in names)


@dataclass(frozen=True)
class Cut:
    """What one stage computes."""

    function: Callable[..., list[Tensor]]
    """function(stage, *arriving, *leaves): the tensors that leave, of those that arrive and the model's arguments."""
    used: tuple[str, ...]
    """Paths of the blocks that it calls, and of the parameters and buffers that operations between them use."""
    can_split: bool
    """Whether all that leaves follows from what arrives: torch finds the gradients of other parameters only where it
    computes those of inputs and of parameters at once."""


class ModelGraph:
    """The operations of one call of a model, and the calls of its blocks, in their order."""

    def __init__(
        self, model: nn.Module, traced: fx.GraphModule, batch_leaf: int, calls: Sequence[BlockCall], seen: _Seen
    ) -> None:
        self.calls = tuple(calls)
        self.output = seen.output
        """What is around the model's output."""
        self._model = model
        self._arounds = seen.inputs
        self._graph = graph = traced.graph
        self._inputs = graph.find_nodes(op="placeholder")
        self._place_sizes(self._inputs[batch_leaf])
        self._constants: dict[fx.Node, Any] = {}
        """What the graph uses and the model has not, such as numbers that its operations make tensors of."""
        for node in graph.find_nodes(op="get_attr"):
            if node.target.startswith("model."):
                node.target = node.target.removeprefix("model.")
            else:
                self._constants[node] = operator.attrgetter(node.target)(traced)
        blocks = graph.find_nodes(op="call_function", target=torch.ops.paceline.block.default)
        self._blocks: dict[fx.Node, int] = {node: node.args[0] for node in blocks}
        (output,) = graph.find_nodes(op="output")
        self._outputs: list[fx.Node] = list(output.args[0])
        self._light = self._light_nodes()

    def _place_sizes(self, samples: fx.Node) -> None:
        """Take the number of samples from the model's input, which all stages have, and not from an activation.

        Raises:
            ModelError: the operations between blocks are for one number of samples only.
        """
        symbol = samples.meta["val"].shape[0]
        if isinstance(symbol, int):
            raise ModelError(
                f"{type(self._model).__name__} cannot be cut into stages: what it computes between its blocks is for "
                "one number of samples only; let it follow from the shapes of its inputs, or choose another strategy."
            )
        with self._graph.inserting_after(self._inputs[-1]):
            size = self._graph.call_function(torch.ops.aten.sym_size.int, (samples, 0))
        for node in self._graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int):
            if node is not size and str(node.meta["val"]) == str(symbol):
                node.replace_all_uses_with(size)

    def _light_nodes(self) -> set[fx.Node]:
        """The operations that follow from the model's inputs alone, such as masks: every stage computes them anew."""
        light: set[fx.Node] = set()
        for node in self._graph.nodes:
            is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            is_operation = node.op == "call_function" and not is_random and node not in self._blocks
            is_light = is_operation or node.op == "placeholder" or node in self._constants
            if is_light and light.issuperset(node.all_input_nodes):
                light.add(node)
        return light

    def cut(self, starts: Sequence[str]) -> list[Cut]:
        """The stages; all but the first begin with the first calls of these blocks.

        Raises:
            ModelError: the model does not call these blocks in this order.
        """
        stage_of: dict[fx.Node, int] = {}
        waiting = list(starts)
        for node in self._graph.nodes:
            if node in self._blocks and waiting and self.calls[self._blocks[node]].path == waiting[0]:
                del waiting[0]
            is_check = not node.users and "assert" in str(node.target)
            if node not in self._light and node.op not in ("get_attr", "output") and not is_check:
                stage_of[node] = len(starts) - len(waiting)
        if waiting:
            raise ModelError(
                f"The model does not call {', '.join(starts)} in this order, so no stages can begin with them; choose "
                "other blocks (pipeline.cuts)."
            )
        last_use = {node: max((stage_of.get(user, -1) for user in node.users), default=-1) for node in stage_of}
        last_use |= {node: len(starts) for node in self._outputs if node in stage_of}
        crossing = [
            [node for node, stage in stage_of.items() if stage < number <= last_use[node]]
            for number in range(len(starts) + 1)
        ]
        for node in itertools.chain(*crossing):
            if not isinstance(node.meta.get("val"), Tensor):
                raise ModelError(f"'{node.name}', which is no tensor, would have to be sent to another stage.")
        nodes_of = [[node for node, own in stage_of.items() if own == stage] for stage in range(len(starts) + 1)]
        return [
            self._stage(nodes, arriving, leaving)
            for nodes, arriving, leaving in zip(nodes_of, crossing, [*crossing[1:], self._outputs], strict=True)
        ]

    def _stage(self, nodes: Sequence[fx.Node], arriving: Sequence[fx.Node], leaving: Sequence[fx.Node]) -> Cut:
        graph = fx.Graph()
        placed = {node: graph.placeholder(node.name) for node in (*arriving, *self._inputs)}
        used: dict[str, None] = {}

        def place(node: fx.Node) -> fx.Node:
            if node not in placed and node in self._constants:
                placed[node] = graph.call_function(_returning(self._constants[node]))
            elif node not in placed and node.op == "get_attr":
                used[str(node.target)] = None
                placed[node] = graph.get_attr(str(node.target))
            elif node not in placed and node in self._blocks:
                number = self._blocks[node]
                path = self.calls[number].path
                used[path] = None
                inputs: Any = node.args[1]
                given = [graph.get_attr(path), *(place(one) for one in inputs[1:])]
                placed[node] = graph.call_function(_calling(self._arounds[number]), tuple(given))
            elif node not in placed:
                placed[node] = graph.node_copy(node, place)
            return placed[node]

        for node in nodes:
            place(node)
        graph.output([place(node) for node in leaving])
        follows = set(arriving)
        for node in nodes:
            if not follows.isdisjoint(node.all_input_nodes):
                follows.add(node)
        function = type(fx.GraphModule(self._model, graph)).forward
        return Cut(function, tuple(used), can_split=follows.issuperset(set(leaving) - self._light))


def _calling(around: Any) -> Callable[..., list[Tensor]]:
    """A function that calls a block with tensors, and returns tensors."""

    def call_block(block: nn.Module, *leaves: Tensor) -> list[Tensor]:
        args, kwargs = put_together(around, leaves)
        return list(tensors(block(*args, **kwargs), open_object))

    return call_block


def _returning(constant: Any) -> Callable[[], Any]:
    def get_constant() -> Any:
        return constant

    return get_constant
