"""Everybody who sends something over the group of all workers sends it from where the backend can.

Each caller runs over groups that refuse tensors in host memory, as NCCL does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import env
from paceline.comm.fingerprint import CollectiveCall, check_agreement
from paceline.comm.links import node_of_every_rank, open_node_group
from paceline.comm.timing import largest
from paceline.errors import DataError, DivergenceError
from paceline.object_collectives import all_gather_objects, broadcast_object, gather_objects, scatter_objects
from paceline.parallel.engine import broadcast
from paceline.parallel.sharding.initial_weights import initial_weights
from paceline.process_groups import device_of, open_group
from paceline.train.batches.agreement import check_same_order
from paceline.train.evaluation.metric_states import MergeTree, compute_metrics, metric_functions
from tests.kit.workers import join_world, run_ranks
from tests.old.ranks.device_only import GPU, OnGpu, gpu_only

WORLD_SIZE = 3


def objects(world: dist.ProcessGroup) -> Any:
    rank = dist.get_rank()
    value = {"rank": rank, "tensor": torch.full((3,), float(rank))}
    told = broadcast_object(value, world, source=1)
    found = gather_objects(value, world)
    mine = scatter_objects([{"part": torch.tensor([one])} for one in range(WORLD_SIZE)], world)
    return (
        told["tensor"].tolist(),
        all_gather_objects(rank, world),
        None if found is None else [one["tensor"].tolist() for one in found],
        mine["part"].tolist(),
    )


def model_in_host_memory(world: dist.ProcessGroup) -> Any:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    initial_weights(model, world)
    return [round(float(tensor.double().sum()), 9) for tensor in model.state_dict().values()]


def model_on_the_device(world: dist.ProcessGroup) -> Any:
    weights = torch.full((4,), float(dist.get_rank() + 5)).to(GPU)
    host = torch.full((2,), float(dist.get_rank() + 7))
    broadcast([weights, host], world)
    assert isinstance(weights, OnGpu) and not isinstance(host, OnGpu)
    return weights.tolist(), host.tolist()


def order(world: dist.ProcessGroup) -> Any:
    check_same_order("alike", 0, world)
    with pytest.raises(DataError, match="rank 2"):
        check_same_order("alike" if dist.get_rank() < 2 else "another", None, world)
    return True


def agreement(world: dist.ProcessGroup) -> Any:
    call = CollectiveCall(1, 1, "all_reduce", "weights", "float32", (3,))
    check_agreement(call, world, GPU)
    other = CollectiveCall(1, 1, "all_reduce", f"of rank {dist.get_rank()}", "float32", (3,))
    with pytest.raises(DivergenceError):
        check_agreement(other, world, GPU)
    return True


def numbers(world: dist.ProcessGroup) -> Any:
    return largest(float(dist.get_rank()), world)


def groups(world: dist.ProcessGroup) -> Any:
    rank = dist.get_rank()
    pair = open_group([0, 2] if rank != 1 else [1], 60)
    nodes = node_of_every_rank(world)
    of_node = open_node_group(nodes, world, 60)
    assert of_node is not None
    found = None if pair is None else dist.get_process_group_ranks(pair)
    return found, all_gather_objects(rank, pair), dist.get_world_size(of_node)


def metrics(world: dist.ProcessGroup) -> Any:
    """Its states are on the GPU where they are computed."""
    functions = {"total": metric_functions("total", (torch.neg, torch.add, lambda state: float(state.sum())))}
    tree = MergeTree(torch.add)
    tree.push(dist.get_rank(), 1, torch.full((2,), float(dist.get_rank()), device=GPU))
    return compute_metrics(functions, {"total": tree}, cast(Any, SimpleNamespace(group=world)))


CALLERS: tuple[tuple[Callable[[dist.ProcessGroup], Any], list[Any] | None], ...] = (
    (
        objects,
        [
            ([1.0] * 3, [0, 1, 2], [[float(rank)] * 3 for rank in range(3)] if rank == 0 else None, [rank])
            for rank in range(3)
        ],
    ),
    (model_in_host_memory, None),
    (model_on_the_device, [([5.0] * 4, [7.0] * 2)] * 3),
    (order, [True] * 3),
    (agreement, [True] * 3),
    (numbers, [2.0] * 3),
    (groups, [([0, 2], [0, 2], 3), (None, [1], 3), ([0, 2], [0, 2], 3)]),
    (metrics, [{"total": 6.0}] * 3),
)


def call_all() -> dict[str, Any]:
    world = join_world(60)
    found = {}
    with gpu_only():
        assert device_of(world) == GPU
        with pytest.raises(RuntimeError, match="device type cpu"):
            dist.all_reduce(torch.ones(1))
        with pytest.raises(RuntimeError, match="same device"):
            torch.ones(2, device=GPU) + torch.ones(2)
        for caller, _ in CALLERS:
            try:
                found[caller.__name__] = caller(world)
            except RuntimeError as problem:
                raise AssertionError(f"{caller.__name__}: {problem}") from problem
    assert device_of(world) == torch.device("cpu")
    dist.destroy_process_group()
    return found


def test_all_callers_send_from_where_the_backend_can() -> None:
    by_rank = run_ranks(call_all, WORLD_SIZE, timeout_s=120)
    for caller, expected in CALLERS:
        found = [of_rank[caller.__name__] for of_rank in by_rank]
        assert found == ([found[0]] * WORLD_SIZE if expected is None else expected), caller.__name__


def test_no_other_module_decides_where_a_backend_sends_from() -> None:
    source = Path(env.__file__).parent
    deciding = [
        path.relative_to(source).as_posix()
        for path in sorted(source.rglob("*.py"))
        if "get_backend(" in path.read_text() or "_device_types" in path.read_text()
    ]
    assert deciding == [
        "parallel/pipeline/queues.py",  # whether sends wait for each other
        "process_groups.py",
        "train/records/environment.py",  # its name, for the record
        "train/session/peer_watch.py",  # whether lost workers are noticed
    ]
