"""Workers of an fsdp axis compare which of FSDP's collectives comes next, before they make it.

One worker's samples may lead through other layers than another's, or leave parameters without a gradient. Over Gloo the
workers' messages would then have other sizes, at which Gloo ends the process, or the same ones by chance, and blocks
would be computed with parameters of others. Over NCCL the kernels wait for each other, which the watch on hangs ends;
nothing is compared there, since hosts do not wait for each other.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from paceline.errors import ModelError
from paceline.object_collectives import all_gather_objects
from paceline.parallel.dtensor import is_sharded
from paceline.process_groups import device_of

_GATHER, _SUM, _END = range(3)


class SameCollectives:
    """Compares them between the workers of one group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._names: list[str] = []
        self._arrived: set[str] = set()
        """The parameters that have got a gradient since gradients were last added up."""

    def watch(self, model: nn.Module) -> None:
        """Compare the collectives of all sharded modules in `model`, which are still to be called."""
        if device_of(self._group).type != "cpu":
            return
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(_Gather(self, len(self._names)))
                module.set_custom_reduce_scatter(_Sum(self, len(self._names)))
                self._names.append(name)
                self._watch_gathered(name, cast(nn.Module, module))

    def _watch_gathered(self, name: str, module: nn.Module) -> None:
        """Note when the module's gathered parameters get gradients; they are there from its first call on."""

        def watch(_module: nn.Module, _arguments: Any) -> None:
            handle.remove()
            for own, parameter in module.named_parameters():
                if parameter.requires_grad and parameter.dim() and not is_sharded(parameter, "fsdp"):
                    note = functools.partial(self._note, f"{name}.{own}".lstrip("."))
                    parameter.register_post_accumulate_grad_hook(note)

        handle = module.register_forward_pre_hook(watch)

    def _note(self, name: str, _parameter: Tensor) -> None:
        self._arrived.add(name)

    def compare(self, kind: int, module: int = 0) -> None:
        """Raise `ModelError`, on all workers, where they do not all come to the same collective."""
        arrived = sorted(self._arrived) if kind == _SUM else []
        own = torch.tensor([kind, module, zlib.crc32("\n".join(arrived).encode())])
        of_all = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(of_all, own, group=self._group)
        if kind == _SUM:
            self._arrived.clear()
        other = next((one for one in of_all if not one.equal(of_all[0])), None)
        if other is None:
            return
        if other[:2].equal(of_all[0][:2]):
            sets = [set(names) for names in all_gather_objects(arrived, self._group)]
            missing = min(set.union(*sets) - set.intersection(*sets))
            what = f"the parameter '{missing}' got a gradient on some workers only"
        else:
            what = f"one worker {self._said(of_all[0])}, and another {self._said(other)}"
        raise ModelError(
            "Which layers or parameters of the model are used depends on the samples, and workers that hold shards of "
            f"them have other samples: {what}; call run.prepare with find_unused_parameters=True, or use all of them "
            "in every pass."
        )

    def end_pass(self) -> None:
        """After a forward and backward pass: no worker has any more collectives in it."""
        if self._names:
            self.compare(_END)

    def _said(self, told: Tensor) -> str:
        kind, module, _ = told.tolist()
        if kind == _END:
            return "is done with the pass"
        where = f"'{self._names[module]}'" if self._names[module] else "the model's other layers"
        return f"gathers {where}" if kind == _GATHER else f"adds up gradients of {where}"


class _Gather(DefaultAllGather):
    def __init__(self, same: SameCollectives, module: int) -> None:
        self._same, self._module = same, module

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        self._same.compare(_GATHER, self._module)
        return super().__call__(*args, **kwargs)


class _Sum(DefaultReduceScatter):
    def __init__(self, same: SameCollectives, module: int) -> None:
        self._same, self._module = same, module

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work:
        self._same.compare(_SUM, self._module)
        return super().__call__(*args, **kwargs)
