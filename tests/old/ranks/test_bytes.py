"""Bytes on every axis of a mesh: counted on workers that train, they are what the dry run and the formulas say.

Counted is all that is handed to collectives and to other stages in one step, on the groups of the axes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.models.gpt import GPT
from paceline.parallel.dry_run.comm_bytes import CommBytes
from paceline.parallel.dry_run.dry_run import DryRun, dry_run, on_paper
from paceline.parallel.engines.mesh import MeshParallel
from paceline.parallel.tensor import bytes_per_sample, find_plan, layer_sizes
from paceline.spec import Job, Mesh, PipelineSpec, Plan, parse_mesh
from paceline.spec.mesh import AXES, AxisName
from tests.kit.workers import in_turn, run_ranks
from tests.old.traffic import bytes_per_pass, padded_bytes, sent_bytes

WORKERS = 4
ONE_EACH = PipelineSpec()
BATCH, SHARDS = 16, 8
SHARD = BATCH // SHARDS
CONTEXT, WIDTH, VOCABULARY = 8, 16, 33
A_FEW_BYTES = 36
"""Loss, whether norm layers may move, whether shards look new, whether somebody wants to stop: no axis's own, but
of all workers or stages."""
COMPARED_BYTES = 24
"""What workers of an fsdp axis tell each other before each of its collectives, over Gloo: which one it is."""
CHECKED_STEPS = 3
"""In the first ones workers also compare what they are going to send."""


def _net() -> nn.Module:
    """Rows that divide by nothing, and blocks that are gathered one by one."""
    return nn.Sequential(nn.Linear(12, 601), nn.ReLU(), nn.Linear(601, 603), nn.ReLU(), nn.Linear(603, 5))


def _frozen() -> nn.Module:
    """Two layers that the tensor axis takes together, the first of them not trained."""
    first = nn.Linear(12, 16).requires_grad_(False)
    return nn.Sequential(nn.Linear(12, 12), first, nn.ReLU(), nn.Linear(16, 6))


def _gpt(num_layers: int = 2, dropout: float = 0.0) -> nn.Module:
    """With one matrix in its first and its last layer."""
    return GPT(VOCABULARY, CONTEXT, num_layers=num_layers, num_heads=2, width=WIDTH, dropout=dropout)


MODELS: dict[str, Any] = {
    "net": _net,
    "frozen": _frozen,
    "gpt": _gpt,
    "gpt4": partial(_gpt, 4),
    "dropout": partial(_gpt, 2, 0.1),
}


def _sample(model: str) -> Tensor:
    return torch.zeros(CONTEXT, dtype=torch.int64) if model in ("gpt", "gpt4", "dropout") else torch.zeros(12)


@dataclass(frozen=True)
class Case:
    model: str
    strategy: str
    pipeline: PipelineSpec = ONE_EACH

    def __str__(self) -> str:
        schedule = f" {self.pipeline.schedule}" if "pp" in self.strategy else ""
        return f"{self.model} on {self.strategy}{schedule}"


CASES = (
    Case("net", "zero1"),
    Case("net", "zero2"),
    Case("net", "dp2 x fsdp2"),
    Case("frozen", "dp2 x tp2"),
    Case("gpt", "fsdp2 x tp2"),
    Case("gpt4", "pp", PipelineSpec("gpipe")),
    Case("gpt4", "pp", PipelineSpec("zero_bubble")),
    Case("gpt4", "dp2 x pp2", PipelineSpec("interleaved", stages_per_worker=2)),
    Case("dropout", "dp2 x pp2"),
    Case("gpt", "fsdp2 x pp2"),
    Case("gpt", "zero1:2 x pp2"),
    Case("gpt", "tp2 x pp2"),
)


@dataclass(frozen=True)
class Foretold:
    cuts: tuple[str, ...]
    by_worker: list[dict[AxisName, float]]
    """By the dry run, of every worker of the pipeline; of the first one of its tensor and fsdp groups."""
    formula: dict[AxisName, float]
    """Of the worker that sends most."""


def _foretell(cases: tuple[Case, ...]) -> list[Foretold]:
    return [_foretold(case) for case in cases]


@cache
def _dry_run(model: str, mesh: Mesh, num_passes: int) -> DryRun:
    return dry_run(*on_paper(MODELS[model], _sample(model), SHARD), mesh, num_passes)


def _foretold(case: Case) -> Foretold:
    mesh = parse_mesh(case.strategy, WORKERS)
    num_passes = SHARDS // mesh.num_assignments
    more = case.pipeline.stages_per_worker
    model, arguments = on_paper(MODELS[case.model], _sample(case.model), SHARD)
    tensor_plan, sizes = find_plan(model, mesh.tp), layer_sizes(model, lambda one: one(*arguments), SHARD)
    found = _dry_run(case.model, replace(mesh, pp=mesh.pp * more), num_passes)
    by_worker: list[dict[AxisName, float]] = []
    for worker in range(mesh.pp):
        stages = found.stages[worker :: mesh.pp]
        by_worker.append({axis: sum((found.sent_bytes_of(stage, axis) for stage in stages), 0.0) for axis in AXES})
    generators = torch.get_rng_state().nbytes if case.model == "dropout" else 0
    # Without the tensor axis here, which shares out other dimensions too.
    shapes = [tuple(parameter.shape) for parameter in MODELS[case.model]().parameters() if parameter.requires_grad]
    of_stage = max(
        sum(one.gradient_bytes if mesh.fsdp == 1 else one.whole_parameter_bytes for one in found.stages[w :: mesh.pp])
        for w in range(mesh.pp)
    )
    formula = sent_bytes(
        mesh,
        padded_bytes(shapes, 4, mesh.fsdp) if mesh.pp == mesh.tp == 1 else of_stage,
        # Of two workers, each sends what is summed once.
        SHARD * bytes_per_sample(tensor_plan, sizes, 4) + bytes_per_pass(tensor_plan, model, 0, 4)
        if mesh.tp > 1
        else 0.0,
        SHARD * CONTEXT * WIDTH * 4 + generators,
        num_passes,
        stages_per_worker=more,
        # The tensor axis leaves an embedding whole that is the classifier of another stage.
        tied_bytes=-(-VOCABULARY // mesh.fsdp) * WIDTH * 4,
    )
    return Foretold(tuple(stage.layers[0] for stage in found.stages[1:]), by_worker, formula)


def _loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def _count(cases: list[tuple[Case, tuple[str, ...]]]) -> list[dict[AxisName, float]]:
    """What this worker sends on every axis in a step, but for the loss and such."""
    return in_turn(_counted, cases)


def _counted(case: Case, cuts: tuple[str, ...]) -> dict[AxisName, float]:
    mesh = parse_mesh(case.strategy, WORKERS)
    plan = Plan(
        world_size=WORKERS,
        mesh=mesh,
        pipeline=replace(case.pipeline, cuts=cuts),
        algorithm="all_reduce",
        timeout_s=60,
    )
    job = Job().with_values(global_batch_size=BATCH, virtual_shards=SHARDS, epochs=1, measure_noise=False)
    num_samples = (CHECKED_STEPS + 1) * BATCH
    sample = _sample(case.model)
    inputs = sample.expand(num_samples, *sample.shape).clone()
    targets = inputs if inputs.dtype == torch.int64 else torch.zeros(num_samples, dtype=torch.int64)
    data = TensorDataset(inputs, targets)
    with paceline.init(job, plan=plan) as run:
        model = MODELS[case.model]()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), example=inputs[:2])
        engine = run.engine
        assert isinstance(engine, MeshParallel)
        groups: dict[str, AxisName] = {engine._axes.device_mesh.get_group(axis).group_name: axis for axis in AXES}
        assert len(groups) == len(AXES)
        here, there = CommBytes(groups), CommBytes(groups)
        plain = dist.all_reduce

        def all_reduce(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                return plain(*args, **kwargs)
            with there:  # the replicas' gradients, on the communication thread
                return plain(*args, **kwargs)

        steps = iter(run.batches(data))
        for _ in range(CHECKED_STEPS):
            run.step(next(steps), _loss)
        dist.all_reduce = all_reduce
        try:
            with here:
                run.step(next(steps), _loss)
        finally:
            dist.all_reduce = plain
        sent = {axis: here.sent_bytes[axis] + there.sent_bytes[axis] for axis in AXES}
        besides: dict[AxisName, float] = {axis: here.bytes_of_calls[f"{axis} allreduce_"] for axis in ("pp", "fsdp")}
        assert max(besides.values()) <= A_FEW_BYTES
        compared = here.bytes_of_calls["fsdp allgather_"]
        assert compared % COMPARED_BYTES == 0 and compared <= 0.01 * sent["fsdp"]
        besides["fsdp"] += compared
        return {axis: sent[axis] - besides.get(axis, 0.0) for axis in AXES}


@pytest.mark.slow
def test_every_axis_sends_what_the_dry_run_and_the_formula_say() -> None:
    (with_forecasts,) = run_ranks(_foretell, 1, CASES, timeout_s=120)
    cases = [(case, one.cuts) for case, one in zip(CASES, with_forecasts, strict=True)]
    counted = run_ranks(_count, WORKERS, cases, timeout_s=240)
    for number, (case, expected) in enumerate(zip(CASES, with_forecasts, strict=True)):
        mesh = parse_mesh(case.strategy, WORKERS)
        for rank in range(WORKERS):
            place, sent = mesh.place(rank), counted[rank][number]
            if place["fsdp"] == place["tp"] == 0:  # the others' parts are smaller where rows do not divide
                assert sent == expected.by_worker[place["pp"]], f"{case}, rank {rank}"
            for axis in AXES:
                assert (sent[axis] > 0) == (mesh.degree(axis) > 1), f"{case}, {axis}"
        most = {axis: max(one[axis] for one in expected.by_worker) for axis in AXES}
        # The formula of the tensor axis is for all layers, of which each stage has some.
        most["tp"] = sum(one["tp"] for one in expected.by_worker)
        assert most == expected.formula, str(case)
