"""Who writes what: torch's own planning, so that each number of the state is written by exactly one worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from paceline.checkpoint.manifest import Chunk, TensorEntry
from paceline.checkpoint.part import NAMES
from paceline.errors import CheckpointError


@dataclass(frozen=True)
class WriteShare:
    """One worker's share of a checkpoint, and the list of all."""

    tensors: dict[str, Tensor]
    """By the name they get in this worker's file."""
    entries: dict[str, TensorEntry]
    """Of all workers."""


def divide(state: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> WriteShare:
    """What this worker is to write of `state`. A common act of all workers of `group`, which carries plain objects.

    What all have alike is spread evenly by size; of a tensor that is sharded (a DTensor) everybody writes its own
    shard; what only one worker has, it writes.

    Raises:
        CheckpointError: a dtype that the format lacks.
    """
    for name, tensor in state.items():
        if tensor.dtype not in NAMES:
            raise CheckpointError(f"The tensor '{name}' has dtype {tensor.dtype}, which a checkpoint cannot hold.")
    rank = 0 if group is None else dist.get_rank(group)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(state), is_coordinator=rank == 0)
    plans: list[SavePlan] = [planner.create_local_plan()]
    if group is not None:
        gathered: list[SavePlan | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, plans[0], group=group)
        plans = [plan for plan in gathered if plan is not None]
    plans, metadata = planner.create_global_plan(plans)  # a pure function: the same on every worker
    entries = {
        name: TensorEntry(NAMES[entry.properties.dtype], tuple(entry.size), ())
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    for writer, plan in enumerate(plans):
        for item in plan.items:
            entry = entries[item.index.fqn]
            entries[item.index.fqn] = TensorEntry(entry.dtype, entry.shape, (*entry.chunks, _chunk(item, writer)))
    mine = {_key(item): _values(planner, item) for item in plans[rank].items}
    return WriteShare(mine, entries)


def part_name(writer: int) -> str:
    return f"worker-{writer:05d}.safetensors"


def _chunk(item: WriteItem, writer: int) -> Chunk:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return Chunk(tuple(chunk.offsets), tuple(chunk.sizes), part_name(writer), _key(item))


def _key(item: WriteItem) -> str:
    """Its name in the file; a shard is called after where it begins, as is what could be taken for one."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    if chunk.sizes == item.tensor_data.size and "@" not in item.index.fqn:
        return item.index.fqn
    return f"{item.index.fqn}@{','.join(map(str, chunk.offsets))}"


def _values(planner: DefaultSavePlanner, item: WriteItem) -> Tensor:
    values = planner.resolve_data(item)
    assert isinstance(values, Tensor)
    return values.detach()
