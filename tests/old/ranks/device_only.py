"""Tensors and process groups that pass for a GPU's: a collective on a tensor in host memory fails, as NCCL's do.

No memory is elsewhere; a tensor is "on the GPU" by its class. It becomes so by `device=` or `.to`, and stays so through
operations. An operation on tensors of both kinds fails as torch's do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

GPU = torch.device("cuda", 0)
_CHECKED = ("all_reduce", "all_gather", "broadcast", "reduce", "send", "recv", "isend", "irecv", "reduce_scatter")
_CROSSING = {"copy_", "to", "cpu", "cuda", "__get__", "__set__", "type", "is_floating_point", "numel", "size", "dim"}


class OnGpu(Tensor):
    """A tensor that passes for one on the GPU."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name not in _CROSSING:
            given = [leaf for leaf in pytree.tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
            if any(not isinstance(tensor, OnGpu) and tensor.dim() for tensor in given):
                raise RuntimeError(f"Expected all tensors to be on the same device, but {name} found cuda:0 and cpu")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class _PassForGpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func is Tensor.device.__get__:
            return GPU if isinstance(args[0], OnGpu) else torch.device("cpu")
        if func is Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return isinstance(args[0], OnGpu)
        if name == "cpu":
            return args[0].as_subclass(Tensor).clone()
        if name == "numpy" and isinstance(args[0], OnGpu):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        devices = [one for one in (*args[1:], kwargs.get("device")) if isinstance(one, torch.device)]
        if not devices:
            return func(*args, **kwargs)
        on_cpu = {key: value for key, value in kwargs.items() if key != "device"} | (
            {"device": torch.device("cpu")} if "device" in kwargs else {}
        )
        plain = [one.as_subclass(Tensor) if isinstance(one, OnGpu) else one for one in args]
        plain = [torch.device("cpu") if isinstance(one, torch.device) else one for one in plain]
        made = func(*plain, **on_cpu)
        if devices[0].type != "cuda":
            return made.clone() if name == "to" and isinstance(args[0], OnGpu) else made
        if name == "to" and isinstance(args[0], OnGpu) and made.dtype == args[0].dtype:
            return args[0]
        return (made.clone() if name == "to" else made).as_subclass(OnGpu)


def _checked(name: str) -> Any:
    original = getattr(dist, name)

    def collective(*args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(not isinstance(tensor, OnGpu) for tensor in tensors):
            raise RuntimeError(f"No backend type associated with device type cpu ({name})")
        args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.as_subclass(Tensor), (args, kwargs))
        return original(*args, **kwargs)

    return collective


@contextlib.contextmanager
def gpu_only() -> Iterator[None]:
    """A context in which every process group of this process is as one of NCCL's."""
    with contextlib.ExitStack() as patched:
        patched.enter_context(mock.patch.object(dist.ProcessGroup, "_device_types", [GPU]))
        patched.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: 0))
        for name in _CHECKED:
            patched.enter_context(mock.patch.object(dist, name, _checked(name)))
        patched.enter_context(_PassForGpu())
        yield
