"""The noise scale as real workers measure it: right on any number of them, and without a trace in what is learned."""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
import torch

import paceline
from paceline import models
from paceline.data import ArraySet
from paceline.env import worker_facts
from paceline.noise import NoiseScale
from paceline.parallel.gradients.gradient_norms import GradientNorms
from paceline.spec import Job, Plan, RunRecord
from paceline.train import loop
from paceline.train.loop import RunOutput
from paceline.train.optimizers.optim import build_optimizer
from tests.kit.workers import run_ranks
from tests.old.ranks.training import images, loss_fn

BATCH, SHARDS, SAMPLES = 32, 8, 1600
MODEL: dict[str, Any] = {"name": "mlp", "options": {"in_features": 64, "hidden": 16, "dropout": 0.0}}


def _job(**values: Any) -> Job:
    return Job.from_mapping(
        {
            "global_batch_size": BATCH,
            "virtual_shards": SHARDS,
            "epochs": 4,
            "precision": "float64",
            "model": MODEL,
            # So small a rate that the gradient stays what it is.
            "optim": {"lr": 1e-9, "momentum": 0.0},
            **values,
        }
    )


def digits() -> ArraySet:
    """Noisy pictures with something to learn in them: the ten classes differ in brightness."""
    draw = np.random.default_rng(5)
    labels = draw.integers(0, 10, SAMPLES)
    pixels = np.clip(draw.normal(12 * labels[:, None, None, None] + 60, 40, (SAMPLES, 1, 8, 8)), 0, 255)
    return ArraySet(pixels.astype(np.uint8), labels, 10, (0.5,), (0.25,), None)


@dataclass(frozen=True)
class Measured:
    noise_scale: float | None
    each: list[NoiseScale]
    sha: str


class _Collector:
    """Every measurement by itself, besides what the run makes of them."""

    def __init__(self, run: paceline.Run) -> None:
        self.norms: list[GradientNorms] = []
        take = run._noise.take

        def take_both(norms: GradientNorms) -> None:
            self.norms.append(norms)
            take(norms)

        run._noise.take = take_both  # type: ignore[method-assign]

    def each(self) -> list[NoiseScale]:
        return [
            NoiseScale.from_norms(float(one.small_sqr), one.small_batch, float(one.large_sqr), one.large_batch)
            for one in self.norms
        ]


def measure(job: Job, data: ArraySet, measure_noise: bool = True, **plan: Any) -> Measured:
    facts = worker_facts()
    algorithm = "tree_exact" if job.parity == "bitwise" else "all_reduce"
    values: dict[str, Any] = {"world_size": facts.world_size, "algorithm": algorithm, "timeout_s": 60}
    spread = Plan(**values | plan)
    with paceline.init(job, plan=spread, measure_noise=measure_noise) as run:
        shape = data[0][0].shape
        model = models.build(job.model, num_classes=10, in_channels=shape[0], image_size=shape[-1])
        run.prepare(model, build_optimizer(job.optim, model))
        collector = _Collector(run) if measure_noise else None
        for batch in run.batches(data):
            run.step(batch, loss_fn)
        return Measured(run.noise_scale, collector.each() if collector else [], run.weights_sha256())


def direct(job: Job, data: ArraySet) -> NoiseScale:
    """From the gradient of every sample by itself; for batches drawn from these samples without putting any back."""
    torch.manual_seed(job.seed)
    model = models.build(job.model, num_classes=10, in_channels=1, image_size=8).double()
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(values: dict[str, torch.Tensor], inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(model, values, (inputs[None],))
        return torch.nn.functional.cross_entropy(logits, target[None])

    inputs = torch.stack([data[i][0] for i in range(len(data))]).double()
    targets = torch.tensor([int(data[i][1]) for i in range(len(data))])
    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, inputs, targets)
    flat = torch.cat([one.flatten(1) for one in gradients.values()], dim=1)
    mean = flat.mean(0)
    # With the divisor n - 1: what drawing without putting back leaves of the variance of a mean of B samples is then
    # var / B - var / n, hence norms lie about |G|^2 - var / n.
    grad_var = float(flat.var(0).sum())
    return NoiseScale(float(mean.square().sum()) - grad_var / len(data), grad_var)


def check(measured: Measured, expected: NoiseScale) -> None:
    """Within four standard errors, which have to be small enough to mean something."""
    assert len(measured.each) >= 4 * SAMPLES // BATCH // 2 - 1
    for name in ("grad_sqr", "grad_var"):
        values = [getattr(one, name) for one in measured.each]
        error = stdev(values) / math.sqrt(len(values))
        truth = getattr(expected, name)
        assert error < 0.1 * truth
        assert abs(fmean(values) - truth) < 4 * error
    assert measured.noise_scale == pytest.approx(expected.samples, rel=0.5)


@pytest.mark.slow
def test_shards_one_by_one_agree_with_the_gradients_of_single_samples() -> None:
    job = _job(parity="bitwise")
    expected = direct(job, digits())
    (alone,) = run_ranks(measure, 1, job, digits())
    check(alone, expected)
    for world_size in (2, 4):
        for one in run_ranks(measure, world_size, job, digits()):
            assert one.sha == alone.sha
            assert one.noise_scale == pytest.approx(alone.noise_scale, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_workers_agree_with_the_gradients_of_single_samples(world_size: int) -> None:
    job = _job()
    results = run_ranks(measure, world_size, job, digits())
    check(results[0], direct(job, digits()))
    assert {one.noise_scale for one in results} == {results[0].noise_scale}


@pytest.mark.slow
def test_one_worker_too() -> None:
    job = _job()
    (alone,) = run_ranks(measure, 1, job, digits())
    check(alone, direct(job, digits()))


@pytest.mark.slow
@pytest.mark.parametrize("parity", ["bitwise", "numeric"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_measuring_leaves_no_trace_in_the_weights(parity: str, world_size: int) -> None:
    job = _job(
        parity=parity,
        epochs=2,
        precision="float32",
        model="resnet20",
        optim={"lr": 0.05, "momentum": 0.9, "clip_norm": 1.0},
    )
    data = images(100)
    on, off = (run_ranks(measure, world_size, job, data, wanted)[0] for wanted in (True, False))
    assert on.sha == off.sha
    assert off.noise_scale is None
    assert bool(on.each) == (parity == "bitwise" or world_size > 1)


@pytest.mark.slow
def test_ragged_batches_and_idle_workers() -> None:
    """With 4 samples for 6 shards in the last batch, the last of 4 workers has none; 3 are too few to measure."""
    job = _job(global_batch_size=8, virtual_shards=6, epochs=3)
    # Every second of 15 steps is measured and told in the next one; without those on 3 samples, steps 4, 9 and 14.
    for num_samples, num_measured in ((36, 7), (35, 6)):
        data = ArraySet(digits().inputs[:num_samples], digits().targets[:num_samples], 10, (0.5,), (0.25,), None)
        results = run_ranks(measure, 4, job, data)
        assert len({tuple(one.each) for one in results}) == 1
        assert len(results[0].each) == num_measured
        assert all(one.grad_var > 0 for one in results[0].each)


def _train(job: Job, run_dir: Path) -> tuple[RunRecord, str]:
    words = io.StringIO()
    plan = Plan(world_size=1, algorithm="tree_exact", timeout_s=60)
    return loop.train(job, plan, RunOutput(run_dir, words)), words.getvalue()


@pytest.mark.slow
def test_every_epoch_says_it_and_a_far_too_large_batch_is_warned_of_once(tmp_path: Path) -> None:
    job = _job(
        parity="bitwise",
        precision="float32",
        global_batch_size=1024,
        epochs=60,
        model={"name": "mlp", "options": {"hidden": 8, "dropout": 0.0}},
        data="digits",
        eval_every_epochs=60,
    )
    ((record, words),) = run_ranks(_train, 1, job, tmp_path)
    scales = [epoch.noise_scale for epoch in record.epochs]
    assert all(scale is not None and 1 < scale < 256 for scale in scales)
    assert RunRecord.load(tmp_path / "record.json").epochs == record.epochs
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["noise_scale"] for line in lines if "noise_scale" in line] == scales
    assert f"noise scale {scales[-1]:,.0f}\n" in words
    assert words.count("times the gradient noise scale") == 1
    assert sum("times the gradient noise scale" in note for note in record.notes) == 1


@pytest.mark.slow
def test_float16_is_measured_without_its_loss_scale() -> None:
    exact, scaled = (
        run_ranks(measure, 2, _job(precision=precision), digits())[0] for precision in ("float32", "float16")
    )
    for name in ("grad_sqr", "grad_var"):
        means = [fmean(getattr(one, name) for one in result.each) for result in (exact, scaled)]
        assert means[1] == pytest.approx(means[0], rel=0.02)
