"""Counts what collectives send."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.parallel.pipeline.layer_costs import tensor_bytes
from paceline.spec.mesh import AxisName


class CommBytes(TorchDispatchMode):
    """Counts the bytes that this worker sends in some groups while it is active, assuming ring collectives.

    It only sees the calls of its own thread.
    """

    def __init__(self, axis_of_group: Mapping[str, AxisName]) -> None:
        """
        Args:
            axis_of_group: the axis of each group, by group name.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._axis_of_group = axis_of_group
        self.sent_bytes: defaultdict[AxisName, float] = defaultdict(float)
        self.bytes_of_calls: defaultdict[str, float] = defaultdict(float)
        """Bytes by axis and kind, such as "fsdp allreduce_"."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func._schema.name.split("::")[1], args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        group = next((found for found in map(_group_of, args) if found is not None), None)
        axis = None if group is None else self._axis_of_group.get(group.group_name)
        if group is None or axis is None:
            return
        n = group.size()
        # Outputs, then inputs; a sum has one for both.
        tensors = [[leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)] for value in args[:2]]
        factor, counted = {
            "allreduce_": (2.0, tensors[0]),
            "_allgather_base_": (1.0, tensors[0]),  # the output, which holds all shards
            "allgather_": (1.0, tensors[0]),
            "_reduce_scatter_base_": (1.0, tensors[1]),  # the input
            "reduce_scatter_": (1.0, tensors[1]),
        }.get(name, (0.0, []))
        num_bytes = factor * (n - 1) / n * tensor_bytes(counted)
        if name == "send":
            num_bytes = tensor_bytes(tensors[0])
        elif name == "alltoall_base_":
            # Rows for each worker, of which a worker sends all but its own; without sizes: equal splits.
            rows = args[4] or [1] * n
            num_bytes = (1 - rows[group.rank()] / sum(rows)) * tensor_bytes(tensors[1])
        self.sent_bytes[axis] += num_bytes
        self.bytes_of_calls[f"{axis} {name}"] += num_bytes


def _group_of(value: Any) -> dist.ProcessGroup | None:
    if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
        return dist.ProcessGroup.unbox(value)
    return None
