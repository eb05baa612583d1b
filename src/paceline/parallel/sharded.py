"""The fsdp axis: every worker keeps a shard of the parameters and gathers a block's just before computing with it.

Torch's `fully_shard` does it (Zhao et al. 2023, "PyTorch FSDP"; Rajbhandari et al. 2020, "ZeRO", for the stages). This
module chooses the blocks, and has sums in place of means, because losses are weighted by samples already.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.utils.checkpoint import checkpoint

from paceline.errors import ModelError
from paceline.parallel.blocks import can_be_called, elements_of_lists
from paceline.spec.algorithm import MIN_BLOCK_BYTES
from paceline.tensors import map_tensors, tensors


def _groups_of_blocks(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Neighbouring blocks together until they hold `MIN_BLOCK_BYTES` of parameters.

    Not those that share a parameter with any other module: the model itself gathers the rest.
    """

    def places(module: nn.Module) -> Counter[nn.Parameter]:
        return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))

    everywhere = places(model)
    group: list[nn.Module] = []
    size_bytes = 0
    for block in elements_of_lists(model):
        own = places(block)
        if any(number < everywhere[parameter] for parameter, number in own.items()):
            continue
        group.append(block)
        size_bytes += sum(parameter.nbytes for parameter in own)
        if size_bytes >= MIN_BLOCK_BYTES:
            yield group
            group, size_bytes = [], 0
    if group:
        yield group


def shard(
    model: nn.Module, mesh: DeviceMesh, zero_stage: int, *, cpu_offload: bool, may_skip: bool = False
) -> FSDPModule:
    """Shard the parameters of `model` over the axis `mesh`, in place; they become DTensors.

    Parameters may be on the meta device, or DTensors of another axis of the same mesh. Raises `ModelError` for a model
    that has no forward, or several dtypes in a block; one of transformers that skips layers at random, unless
    `may_skip` is set.

    Args:
        may_skip: whether workers may go through other modules than others; then all is gathered at once, and what a
            worker did not use is zeros in the sum.
    """
    if not can_be_called(model):
        raise ModelError(
            f"{type(model).__name__} has no forward method, in which parameters come together of which each worker "
            "holds a part; give the model one that calls its modules, or use the strategy dp."
        )
    if not may_skip:
        _check_runs_all_layers(model)
    groups = [] if may_skip else [*_groups_of_blocks(model)]
    together = [{parameter for block in group for parameter in block.parameters()} for group in groups]
    for held in (*together, {*model.parameters()}.difference(*together)):
        dtypes = {str(parameter.dtype) for parameter in held if parameter.requires_grad and parameter.dim()}
        if len(dtypes) > 1:
            raise ModelError(
                f"A block has trained parameters of several dtypes ({', '.join(sorted(dtypes))}), which fsdp cannot "
                "hold together; give all of them one (precision = 'bfloat16' computes in 16 bits), or use the strategy "
                "dp."
            )
    whole = {parameter for parameter in model.parameters() if parameter.dim() == 0 or not parameter.numel()}
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if cpu_offload else OffloadPolicy()
    wrap = functools.partial(
        fully_shard, mesh=mesh, reshard_after_forward=zero_stage == 3, offload_policy=offload, ignored_params=whole
    )
    for group in groups:
        wrap(cast(Any, group if len(group) > 1 else group[0]))
    wrap(model)
    if hasattr(model, "generate"):
        # That of adapters calls the model inside of them: no call of `model` itself would gather what no block has.
        register_fsdp_forward_method(model, "generate")
    for module in sharded_modules(model):
        _show_outputs(cast(nn.Module, module))
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # else it is a sum times a number, which Gloo has not
        module.set_reduce_scatter_unused_params(may_skip, recurse=False)
    for managed in model.modules() if may_skip else ():
        # By this mark, models of transformers run layers that they would skip, because workers gather them together.
        vars(managed).pop("_is_fsdp_managed_module", None)
    return cast(FSDPModule, model)


def _check_runs_all_layers(model: nn.Module) -> None:
    config = getattr(model, "config", None)
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        rate = getattr(config, name, 0.0)
        if isinstance(rate, float) and rate > 0:
            raise ModelError(
                f"The model skips layers at random ({name} = {rate:g}), which one worker would do without the others "
                "that hold shards of them; call run.prepare with find_unused_parameters=True, or set it to 0."
            )


def _show_outputs(module: nn.Module) -> None:
    """Let FSDP's hook on the output of `module` see all tensors in it, as copies.

    FSDP does not see those in objects that torch's pytree does not know, and loses its hook on a view, as an
    `nn.Linear` of tokens returns, that is changed in place (`y += x`). Backward would not gather the module's
    parameters again, or with them whole, in stages 1 and 2 of ZeRO, not sum its gradients over the workers.
    """
    returned: list[Any] = []

    def unpack(_module: nn.Module, _arguments: Any, output: Any) -> Any:
        returned.append(output)
        return tuple(one.clone() if one.requires_grad else one for one in tensors(output, in_objects=True))

    def pack(_module: nn.Module, _arguments: Any, output: Any) -> Any:
        shown = iter(output)
        return map_tensors(returned.pop(), lambda _tensor: next(shown), in_objects=True)

    module.register_forward_hook(unpack, prepend=True)
    module.register_forward_hook(pack)


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def recompute(model: nn.Module) -> None:
    """Let backward compute each block's activations again instead of keeping them (Chen et al. 2016)."""
    for block in elements_of_lists(model) or [model]:
        block.forward = _recomputed(block.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
