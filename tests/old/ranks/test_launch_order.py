"""One order of all collectives on all workers, whatever communicators they use: kernels of NCCL's may need it.

Run as on GPUs, where the thread that submits a sum also calls it; over Gloo, so every call is there to be seen.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.comm import scheduler
from paceline.spec import Job, Mesh, Plan, parse_mesh
from tests.kit.workers import run_ranks
from tests.old.ranks.training import images, loss_fn

CALLS = (
    *("all_reduce", "all_gather", "broadcast", "reduce", "reduce_scatter", "barrier"),
    *("all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_single", "reduce_scatter_single"),
)
Launch = tuple[str, tuple[int, ...], str]
"""The name of the group, its ranks, and what is called."""

CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "which parameters were used beside buckets": ("dp", {"precision": "float32"}, True),
    "replicas of shards": ("dp2 x fsdp2", {}, False),
    "replicas of tensor slices": ("dp2 x tp2", {}, False),
    "replicas of pipelines": ("dp2 x pp2", {}, False),
    "shards of pipelines": ("fsdp2 x pp2", {}, False),
}


@contextlib.contextmanager
def recorded() -> Iterator[tuple[list[Launch], set[str]]]:
    launches: list[Launch] = []
    threads: set[str] = set()

    def recording(name: str) -> Any:
        original = getattr(dist, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group") or next((one for one in args if isinstance(one, dist.ProcessGroup)), None)
            group = group or dist.group.WORLD
            assert group is not None
            launches.append((group.group_name, tuple(dist.get_process_group_ranks(group)), name))
            threads.add(threading.current_thread().name)
            return original(*args, **kwargs)

        return call

    with contextlib.ExitStack() as patched:
        for name in CALLS:
            if hasattr(dist, name):
                patched.enter_context(mock.patch.object(dist, name, recording(name)))
        yield launches, threads


def model_of(norm: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(
        *(layer for layer in layers if norm or not isinstance(layer, nn.BatchNorm2d)), nn.Linear(128, 10)
    )


def train_all() -> dict[str, tuple[list[Launch], set[str]]]:
    found = {}
    for case, (strategy, changes, finds_unused) in CASES.items():
        mesh: Mesh = parse_mesh(strategy, 4)
        job = Job.from_mapping(
            {"global_batch_size": 16, "virtual_shards": 4, "epochs": 1, "precision": "float64"} | changes
        )
        plan = Plan(world_size=4, mesh=mesh, algorithm="all_reduce", timeout_s=60)
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(scheduler, "blocks_caller", lambda _device: False))
            launches, threads = stack.enter_context(recorded())
            run = stack.enter_context(paceline.init(job, plan=plan, max_steps=3))
            model = model_of(norm=mesh.pp == 1)
            example = torch.zeros(2, 3, 8, 8, dtype=torch.float64)
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            run.prepare(model, optimizer, example=example, find_unused_parameters=finds_unused)
            for batch in run.batches(images(48)):
                run.step(batch, loss_fn)
        found[case] = launches, threads
    return found


def test_all_workers_call_their_communicators_in_one_order() -> None:
    by_rank = run_ranks(train_all, 4, timeout_s=240)
    for case in CASES:
        assert all(found[case][1] == {"MainThread"} for found in by_rank), case
        for one, other in itertools.combinations(by_rank, 2):
            mine, theirs = one[case][0], other[case][0]
            shared = {launch[:2] for launch in mine} & {launch[:2] for launch in theirs}
            assert len(shared) > 0, case
            in_order = [[launch for launch in launches if launch[:2] in shared] for launches in (mine, theirs)]
            assert in_order[0] == in_order[1], case
        sums = {launch[:2] for launch in by_rank[0][case][0] if launch[2] in ("all_reduce", "all_gather")}
        assert len(sums) > 1, "several communicators in one step"
