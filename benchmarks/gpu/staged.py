"""A process group of workers that share one GPU: Gloo, to which tensors go through host memory.

NCCL refuses two ranks on one device, and Gloo sends no messages from a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partialmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "alltoall", "alltoall_base"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("gather", "scatter", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("send", "recv", "recv_anysource", "monitored_barrier"),
)


class StagedGroup(dist.ProcessGroup):
    """Gloo for tensors of any device. A result is there after `wait`, as of any asynchronous collective."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "staged"

    def _through_host(self, name: str, *args: Any, **options: Any) -> Any:
        pairs: list[tuple[Tensor, Tensor]] = []

        def staged(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [staged(one) for one in value]
            if isinstance(value, Tensor) and value.device.type != "cpu":
                pairs.append((value, value.cpu()))
                return pairs[-1][1]
            return value

        work = getattr(self._gloo, name)(*map(staged, args), **options)
        return _Arrival(work, pairs, keeps_values=name == "send")


for _name in _COLLECTIVES:
    setattr(StagedGroup, _name, partialmethod(StagedGroup._through_host, _name))


class _Arrival(dist.Work):
    """A collective in flight, and where on the GPU its results belong."""

    def __init__(self, work: Any, pairs: list[tuple[Tensor, Tensor]], *, keeps_values: bool) -> None:
        super().__init__()
        self._work, self._pairs, self._keeps_values = work, pairs, keeps_values

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._work is not None:
            self._work.wait()
        for there, here in () if self._keeps_values else self._pairs:
            there.copy_(here)
        self._work, self._pairs = None, []
        return True

    def is_completed(self) -> bool:
        return self._work is None or bool(self._work.is_completed())

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        results = [there for there, _ in self._pairs]
        self.wait()
        future.set_result(results)
        return future


def join_staged(timeout_s: float) -> None:
    """Be a worker of the group that the environment names, as torchrun's workers are."""
    create: Callable[..., Any] = StagedGroup
    dist.Backend.register_backend("staged", create, devices=["cpu", "cuda"])
    dist.init_process_group("staged", timeout=timedelta(seconds=timeout_s))
