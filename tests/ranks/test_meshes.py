"""The law of the world size for meshes: however a model is shared out, it learns what it learns on one worker."""

from __future__ import annotations

import functools
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from paceline.errors import JobError
from paceline.parallel.parts import local_bytes
from paceline.spec import Job, Plan, parse_mesh
from tests.ranks.harness import run_ranks
from tests.ranks.training import Outcome, images, largest_difference, train

STEPS = 10
PAIRS = ("dp2 x pp2", "dp2 x tp2", "fsdp2 x pp2", "fsdp2 x tp2", "tp2 x pp2")


def job_for(model: str, precision: str = "float64", **changes: Any) -> Job:
    values = {
        "model": model,
        "global_batch_size": 24,
        "virtual_shards": 6,
        "epochs": 2,
        "precision": precision,
        "optim": {"name": "sgd", "lr": 0.02, "momentum": 0.9, "weight_decay": 1e-4, "clip_norm": 1.0},
    }
    return Job().with_values(**(values | changes))


def on(job: Job, strategy: str, num_workers: int, **plan: Any) -> Outcome:
    # 130 samples are six batches of an epoch, the last of them ragged: 10 samples for six shards.
    size = 16 if job.model.name == "lenet" else 8
    data, test = images(130, (3, size, size)), images(45, (3, size, size), augment=False)
    mesh = None if num_workers == 1 else parse_mesh(strategy, num_workers)
    return train(job, data, test, max_steps=STEPS, mesh=mesh, **plan)


@functools.cache
def alone(job_key: tuple[str, str]) -> Outcome:
    outcome: Outcome = run_ranks(on, 1, job_for(*job_key), "dp", 1, timeout_s=120)[0]
    return outcome


def assert_same(model: str, strategy: str, num_workers: int, precision: str, **plan: Any) -> None:
    base = alone((model, precision))
    outcomes = run_ranks(_on, num_workers, job_for(model, precision), strategy, num_workers, plan, timeout_s=240)
    tolerance = 1e-10 if precision == "float64" else 1e-6
    first = outcomes[0]
    assert first.weights.keys() == base.weights.keys()
    assert largest_difference(base, first) <= 10 * tolerance  # of weights after ten steps with momentum
    assert max(abs(a - b) / abs(a) for a, b in zip(base.losses, first.losses, strict=True)) <= tolerance
    assert all(one.losses == first.losses and one.metrics == first.metrics for one in outcomes)
    assert len({one.sha for one in outcomes}) == 1
    assert first.metrics["accuracy"] == base.metrics["accuracy"]


def _on(job: Job, strategy: str, num_workers: int, plan: dict[str, Any]) -> Outcome:
    return on(job, strategy, num_workers, **plan)


def test_sharded_parameters() -> None:
    assert_same("lenet", "fsdp", 2, "float64")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "hsdp", "pp", "tp", *PAIRS])
def test_four_workers(strategy: str) -> None:
    """Six shards on four workers: two of them have one more pass than the others."""
    assert_same("lenet", strategy, 4, "float64")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2 x tp2", "dp2 x pp2"])
def test_batch_norm_on_four_workers(strategy: str) -> None:
    assert_same("resnet20", strategy, 4, "float64")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2 x pp2"])
def test_single_precision_and_recomputed_activations(strategy: str) -> None:
    assert_same("resnet20", strategy, 4, "float32", recompute=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [("fsdp", "pp"), ("tp2 x pp2", "hsdp"), ("dp", "fsdp2 x tp2"), ("fsdp2 x pp2", "dp")]
)
def test_a_run_goes_on_under_another_strategy(before: str, after: str, tmp_path: Path) -> None:
    """In the middle of an epoch; what it then learns is what it would have learned."""
    job = job_for("lenet", optim={"name": "adamw", "lr": 0.002}, checkpoint={"every_epoch": False})
    whole = run_ranks(_part, 1, job, "dp", 1, STEPS, None)[0]
    run_ranks(_part, 4, job, before, 4, 4, tmp_path, timeout_s=120)
    rest = run_ranks(_part, 4, job, after, 4, STEPS, tmp_path, timeout_s=120)[0]
    assert rest.losses == pytest.approx(whole.losses[4:], rel=1e-9)
    assert largest_difference(whole, rest) <= 1e-9


def _part(job: Job, strategy: str, num_workers: int, max_steps: int, folder: Path | None) -> Outcome:
    data = images(130, (3, 16, 16))
    mesh = parse_mesh(strategy, num_workers)
    return train(job, data, max_steps=max_steps, checkpoint_dir=folder, mesh=mesh)


# --- memory ---


def _wide(num_layers: int, width: int) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(num_layers)]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def _held_bytes(strategy: str, num_workers: int) -> int:
    """Parameters and optimizer state on this worker after a step."""
    plan = Plan(world_size=num_workers, mesh=parse_mesh(strategy, num_workers), algorithm="all_reduce", timeout_s=60)
    with paceline.init(Job().with_values(global_batch_size=8, virtual_shards=4, epochs=1), plan=plan) as run:
        model = _wide(6, 64)
        run.prepare(model, torch.optim.Adam(model.parameters()))
        for batch in run.batches(_vectors(8, 64)):
            run.step(batch, _loss)
        state = [value for entry in run.optimizer.state.values() for value in entry.values()]
        return local_bytes([*run.model.parameters(), *state])


def _vectors(num_samples: int, width: int) -> Any:
    draw = torch.Generator().manual_seed(0)
    return torch.utils.data.TensorDataset(
        torch.randn(num_samples, width, generator=draw), torch.randint(0, 10, (num_samples,), generator=draw)
    )


def _loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def test_a_worker_holds_its_part() -> None:
    whole = run_ranks(_held_bytes, 1, "dp", 1)[0]
    parts = run_ranks(_held_bytes, 4, "fsdp", 4)
    assert max(parts) <= 0.35 * whole


LAYERS, WIDTH = 64, 1024
THREADS_BYTES = 64 << 20
"""Stacks of the threads that a run starts for itself."""


def _trained_within(limit_bytes: int, strategy: str, num_workers: int) -> float:
    """The loss after two steps of a model on the meta device, with so much more memory than torch itself takes."""
    used = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) * 1024
    most = used + limit_bytes + THREADS_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    mesh = parse_mesh(strategy, num_workers)
    plan = Plan(world_size=num_workers, mesh=mesh, algorithm="all_reduce", timeout_s=60)
    job = Job().with_values(global_batch_size=4, virtual_shards=4, epochs=1, measure_noise=False)
    with paceline.init(job, plan=plan) as run:
        with torch.device("meta"):
            model = _wide(LAYERS, WIDTH)
        run.prepare(model, torch.optim.Adam(model.parameters()))
        return [float(run.step(batch, _loss)) for batch in run.batches(_vectors(8, WIDTH))][-1]


@pytest.mark.slow
def test_a_model_three_times_too_large_for_a_worker() -> None:
    needed = 16 * (LAYERS * WIDTH**2)  # parameters, gradients and two moments, four bytes each
    losses = run_ranks(_trained_within, 4, needed // 3, "fsdp", 4, timeout_s=120)
    assert losses == pytest.approx([losses[0]] * 4)
    with pytest.raises(AssertionError, match=r"MemoryError|allocate"):
        run_ranks(_trained_within, 1, needed // 3, "dp", 1, timeout_s=120)


def _first_loss(strategy: str, num_workers: int, on_meta: bool) -> float:
    mesh = parse_mesh(strategy, num_workers)
    plan = Plan(world_size=num_workers, mesh=mesh, algorithm="all_reduce", timeout_s=60)
    with paceline.init(Job().with_values(global_batch_size=8, virtual_shards=4, epochs=1), plan=plan) as run:
        with torch.device("meta" if on_meta else "cpu"):
            model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return next(float(run.step(batch, _loss)) for batch in run.batches(_vectors(8, 12)))


def test_weights_drawn_layer_by_layer_are_those_of_a_model_built_at_once() -> None:
    expected = run_ranks(_first_loss, 1, "dp", 1, False)[0]
    assert run_ranks(_first_loss, 1, "dp", 1, True)[0] == expected
    assert run_ranks(_first_loss, 4, "fsdp", 4, True) == pytest.approx([expected] * 4, rel=1e-6)


# --- refused ---


@pytest.mark.parametrize(
    "changes", [{"parity": "bitwise"}, {"norm": "sync"}, {"precision": "float16"}, {"aggregation": {"wire": "topk"}}]
)
def test_what_needs_whole_replicas_is_refused(changes: dict[str, Any]) -> None:
    from paceline.parallel.meshed import check_mesh

    with pytest.raises(JobError, match="needs the whole model on every worker"):
        check_mesh(Job().with_values(**changes), parse_mesh("fsdp", 2))
