"""Applies a tensor plan to a model: its modules change class in place, and their parameters become DTensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from paceline.errors import ModelError
from paceline.parallel.tensor.conv import CHANNEL_CONVS
from paceline.parallel.tensor.exchange import Exchange, all_gather, all_reduce, as_it_is, sum_gradient, take_slice
from paceline.parallel.tensor.head_dropout import HeadDropout
from paceline.parallel.tensor.linear import (
    ColumnLinear,
    LocalDropout,
    Output,
    RowLinear,
    SharedInput,
    TiedClassifier,
    VocabularyEmbedding,
)
from paceline.parallel.tensor.multihead import DividedAttention
from paceline.parallel.tensor.plan import LAYER_STYLES, Entry, TensorPlan, divided_attentions, num_blocks
from paceline.parallel.tensor.sequence_region import SEQUENCE_LAYERS, SequenceRegion

_CLASSES: dict[str, type[nn.Module]] = {
    "colwise": ColumnLinear,
    "packed_colwise": ColumnLinear,
    "rowwise": RowLinear,
    "embedding_rowwise": VocabularyEmbedding,
    "attention": DividedAttention,
}


@dataclass
class Applied:
    """What has been applied to the stages that one worker holds, which may share modules and parameters."""

    modules: set[nn.Module] = field(default_factory=set)
    parameters: dict[Tensor, nn.Parameter] = field(default_factory=dict)
    """What has become of each parameter of which workers hold slices."""


def apply_plan(model: nn.Module, axis: DeviceMesh, plan: TensorPlan, applied: Applied) -> None:
    """Let the workers of `axis`, of one dimension, share the layers of `model` by the plan; a collective of them.

    What goes into the model and comes out of it stays plain and whole on every worker. Parameters of which a worker
    holds a slice become DTensors; all others stay as they are and get the true gradient, the same on every worker.
    All workers have the same weights before, or weights on the meta device.

    Args:
        applied: of the worker's other stages; this one's is added.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    entries = plan.entries
    region = SequenceRegion(axis)
    inputs = _inputs(modules, entries, axis, region)
    attentions = divided_attentions(modules, plan)
    is_new = {name: modules[name] not in applied.modules for name in (*entries, *attentions)}
    applied.modules.update(modules[name] for name in is_new)
    for name, entry in entries.items():
        module = modules[name]
        if not is_new[name]:
            continue
        for style in entry.keys() & LAYER_STYLES.keys():
            dim = 1 if isinstance(module, nn.modules.conv._ConvNd) else -1
            module.__class__ = CHANNEL_CONVS[type(module)] if style == "channels" else _CLASSES[style]
            module.name, module.axis, module.num_blocks = name, axis, num_blocks(entry)
            module.take_input = inputs[entry.get("same_input", (name,))[0]]
            module.give_output = _output(style, entry, module, dim, region)
            _shard(module, 1 if style == "rowwise" else 0, axis, applied.parameters)
            if style == "attention":
                _shard(module.out_proj, 1, axis, applied.parameters)
        _apply_to_module(modules, name, entry, region)
    _leave_fast_paths(model, plan)
    if any("embedding_rowwise" in entry for entry in entries.values()):
        _Around(TiedClassifier, axis).register(model)
    for name in filter(is_new.__getitem__, attentions):
        _Around(HeadDropout, axis).register(modules[name])


def _inputs(
    modules: dict[str, Any], entries: dict[str, Entry], axis: DeviceMesh, region: SequenceRegion
) -> dict[str, Exchange]:
    """The input collective of every layer that has one of its own."""
    num_followers = Counter(entry["same_input"][0] for entry in entries.values() if "same_input" in entry)
    inputs: dict[str, Exchange] = {}
    for name, entry in entries.items():
        take: Exchange = partial(sum_gradient, axis=axis)
        if "gather_sequence" in entry:
            take = region.gather
        elif "split_input" in entry:
            take = partial(take_slice, dim=-1 if isinstance(modules[name], nn.Linear) else 1, axis=axis)
        elif "local_input" in entry or "rowwise" in entry:
            take = as_it_is
        inputs[name] = SharedInput(take, 1 + num_followers[name]) if num_followers[name] else take
    return inputs


def _output(style: str, entry: Entry, module: Any, dim: int, region: SequenceRegion) -> Exchange | Output:
    """The output collective of a layer."""
    if "scatter_sequence" in entry:
        return region.scatter
    if style in ("rowwise", "attention"):
        return partial(all_reduce, axis=region.axis)
    if "gather_output" in entry:
        length = module.out_channels if style == "channels" else module.out_features
        return partial(all_gather, dim=dim, length=length, axis=region.axis)
    return as_it_is


def _apply_to_module(modules: dict[str, Any], name: str, entry: Entry, region: SequenceRegion) -> None:
    """What a plan says of modules besides the layers that it divides."""
    module, axis = modules[name], region.axis
    for style, arguments in entry.items():
        if style == "heads":
            for attribute in arguments:
                setattr(module, attribute, getattr(module, attribute) // axis.size())
        elif style == "local_dropout":
            module.__class__ = LocalDropout
            module.axis, module.length = axis, int(arguments[0])
        elif style == "sequence_parallel":
            module.__class__ = SEQUENCE_LAYERS[type(module)]
            module.region = region
        elif style == "gather_channels":
            length = modules[arguments[0]].out_channels
            module.register_forward_hook(lambda _module, _args, own, length=length: all_gather(own, 1, length, axis))
        elif style == "enter_sequence_region":
            module.register_forward_pre_hook(_before(region.enter), with_kwargs=True)
        elif style == "gather_sequence" and not entry.keys() & LAYER_STYLES.keys():
            module.register_forward_pre_hook(_before(region.gather), with_kwargs=True)
        elif style == "leave_sequence_region":
            module.register_forward_hook(lambda _module, _args, own: region.leave(own))


def _before(act: Exchange) -> Any:
    """A forward pre-hook: a module takes something else in place of its one input."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        more = [value for value in (*args[1:], *kwargs.values()) if value is not None]
        # torch's own layer may have masks, which are the attention's.
        if not args or (more and type(module) is not nn.TransformerEncoderLayer):
            raise ModelError(
                f"A module ({type(module).__name__}) before which workers divide positions has to be called with one "
                "tensor and nothing else: leave sequence parallelism out, or call it so."
            )
        return (act(args[0]), *args[1:]), kwargs

    return hook


def _shard(module: nn.Module, dim: int, axis: DeviceMesh, sharded: dict[Tensor, nn.Parameter]) -> None:
    """Leave this worker's slice of the module's parameters; the bias of a rowwise layer stays whole.

    `sharded` knows what has become of parameters that several modules hold.
    """
    for key, parameter in list(module._parameters.items()):
        if parameter is None or parameter.dim() <= dim:
            continue
        if parameter not in sharded:
            own = distribute_tensor(parameter.detach(), axis, [Shard(dim)], src_data_rank=None)
            # A view would keep the whole tensor in memory.
            local = own.to_local().contiguous()
            if local.untyped_storage().size() > local.nbytes:
                local = local.clone()
            own = DTensor.from_local(local, axis, [Shard(dim)], run_check=False, shape=own.shape, stride=own.stride())
            sharded[parameter] = nn.Parameter(own, requires_grad=parameter.requires_grad)
        module._parameters[key] = sharded[parameter]


def _leave_fast_paths(model: nn.Module, plan: TensorPlan) -> None:
    """torch's transformer layers hand their parameters to one fused kernel in evaluation, which wants them whole."""
    changed = {name.rpartition(".")[0] for name in plan.layers}
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer) and name in changed:
            cast(Any, module).activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


class _Around:
    """Forward hooks: a module runs inside of a mode."""

    def __init__(self, mode: Callable[[DeviceMesh], AbstractContextManager[Any]], axis: DeviceMesh) -> None:
        self._mode = mode
        self._axis = axis
        self._open: list[ExitStack] = []

    def register(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after, always_call=True)

    def _before(self, _module: nn.Module, _args: Any) -> None:
        opened = ExitStack()
        opened.enter_context(self._mode(self._axis))
        self._open.append(opened)

    def _after(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._open.pop().close()
