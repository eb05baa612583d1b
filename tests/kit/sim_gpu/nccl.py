"""Puts the simulated NCCL under `torch.distributed`."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import Backend

from tests.kit.sim_gpu.torch_cuda import replace

_ABORTS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_BLOCKS = "TORCH_NCCL_BLOCKING_WAIT"


def install_nccl(native: Any) -> None:
    """Make `backend="nccl"` the simulated one."""
    replace(dist, is_nccl_available=lambda: True)
    replace(c10d, is_nccl_available=lambda: True, _NCCL_AVAILABLE=True)

    class Options(Backend.Options):
        """`ProcessGroupNCCL.Options`."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            super().__init__("nccl", timedelta(minutes=10))
            self.is_high_priority_stream = is_high_priority_stream

        def __deepcopy__(self, memo: Any) -> Options:
            return Options(self.is_high_priority_stream)

    class NcclType(type):
        """Torch asks by isinstance; what it gets is made in C++."""

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, native.SimulatedNccl)

    class ProcessGroupNCCL(metaclass=NcclType):
        """`ProcessGroupNCCL`."""

        def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
            return _communicator(native, store, rank, size, options)

    ProcessGroupNCCL.Options = Options  # type: ignore[attr-defined]
    native.split_by(lambda store, ranks, options: _split(native, store, ranks, options))
    replace(c10d, ProcessGroupNCCL=ProcessGroupNCCL)
    replace(dist, ProcessGroupNCCL=ProcessGroupNCCL)
    replace(
        native.SimulatedNccl,
        options=property(lambda self: Options()),
        comm_split_count=lambda self: 0,
        perform_nocolor_split=lambda self, device: None,
        _group_start=lambda self: None,
        _group_end=lambda self: None,
    )


def _communicator(native: Any, store: Any, rank: int, size: int, options: Any) -> Any:
    gloo = c10d.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
    return native.make_nccl(
        gloo,
        options.group_name,
        options.global_ranks_in_group or list(range(size)),
        options._timeout.total_seconds(),
        False,  # until torch connects it eagerly to a device
        # As ProcessGroupNCCL reads them: a blocking wait raises instead, and 0 leaves work hanging.
        os.environ.get(_BLOCKS, "0") != "1" and os.environ.get(_ABORTS, "3") != "0",
    )


def _split(native: Any, store: Any, ranks: list[int], options: Any) -> Any:
    """The communicator of `ranks` of another one; None: this worker is not one of them."""
    if dist.get_rank() not in ranks:
        return None
    rank = ranks.index(dist.get_rank())
    return _communicator(native, store, rank, len(ranks), options)
