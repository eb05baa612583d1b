"""From gradient norms, as tensors, to a smoothed noise scale."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.parallel.assignment import Assignment
from paceline.parallel.gradients.gradient_norms import GradientNorms, WorkerNorms, squared_norm
from paceline.spec import Job
from paceline.train.records.noise_meter import NoiseMeter


def _norms(grad_sqr: float, grad_var: float, small: float = 8, large: float = 32) -> GradientNorms:
    """As they are expected."""
    return GradientNorms(
        torch.tensor(grad_sqr + grad_var / small), small, torch.tensor(grad_sqr + grad_var / large), large
    )


def _meter(loss_scale: float | None = None) -> NoiseMeter:
    scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale or 1.0, enabled=loss_scale is not None)
    return NoiseMeter(Job(global_batch_size=32), scaler, torch.device("cpu"))


def test_nothing_is_known_before_the_first_step() -> None:
    assert _meter().read().mean is None


def test_the_mean_of_equal_steps_is_any_of_them() -> None:
    meter = _meter()
    for _ in range(120):  # more than are read at a time
        meter.take(_norms(2.0, 60.0))
    mean = meter.read().mean
    assert mean is not None
    assert mean.samples == pytest.approx(30.0, rel=1e-5)
    assert meter.read().num_measured == 120


def test_numerator_and_denominator_are_smoothed_by_themselves() -> None:
    meter = _meter()
    meter.take(_norms(-1.0, 40.0))  # no noise scale by itself
    meter.take(_norms(3.0, 80.0))
    mean = meter.read().mean
    assert mean is not None
    assert mean.grad_sqr == pytest.approx((0.99 * -1 + 3) / 1.99, rel=1e-5)
    assert mean.samples == pytest.approx((0.99 * 40 + 80) / (0.99 * -1 + 3), rel=1e-5)


def test_an_overflow_is_left_out_and_a_loss_scale_divided_out() -> None:
    scale = 1024.0
    meter = _meter(scale)
    meter.take(GradientNorms(torch.tensor(math.inf), 8, torch.tensor(math.nan), 32))
    take = meter.for_step(0, Assignment.of(32, 4, 0, 2))
    assert take is not None
    take(_norms(2.0 * scale**2, 60.0 * scale**2))
    mean = meter.read().mean
    assert mean is not None
    assert [mean.grad_sqr, mean.grad_var] == pytest.approx([2.0, 60.0], rel=1e-5)
    assert meter.read().num_measured == 1


def test_a_short_batch_and_every_other_step_are_not_asked() -> None:
    meter = _meter()
    assert meter.for_step(2, Assignment.of(16, 4, 0, 2)) is not None
    assert meter.for_step(2, Assignment.of(15, 4, 0, 2)) is None
    assert meter.for_step(3, Assignment.of(32, 4, 0, 2)) is None


def test_squared_norms_are_exact_enough_for_a_small_difference() -> None:
    """A plain float32 norm of so many numbers is 0.3 % short on some processors."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(6_000_000, generator=draw) + 0.5
    exact = float(values.double().square().sum())
    assert float(squared_norm([values])) == pytest.approx(exact, rel=1e-5)
    assert float(squared_norm([values[:10].view(2, 5).T, values[10:]])) == pytest.approx(exact, rel=1e-5)
    low = values[:1000].bfloat16()
    assert float(squared_norm([low])) == pytest.approx(float(low.double().square().sum()), rel=1e-6)


def test_workers_norms_come_together_in_the_next_step() -> None:
    """Three workers with 3, 3 and 2 of 8 samples, two steps, the sum formed by hand."""
    shares = [Assignment.of(8, 3, rank, 3) for rank in range(3)]
    draw = torch.Generator().manual_seed(1)
    gradients = torch.randn(3, 5, generator=draw, dtype=torch.float64)
    weights = [sum(share.sizes) / 8 for share in shares]
    told: list[GradientNorms] = []
    workers = [WorkerNorms(torch.zeros((), dtype=torch.float64)) for _ in shares]

    def step() -> None:
        for worker, share in zip(workers, shares, strict=True):
            worker.begin(share, told.append)
        small_sqr = sum((worker.to_be_summed for worker in workers), torch.zeros(1))[0]
        buckets = [gradient * weight for gradient, weight in zip(gradients, weights, strict=True)]
        for worker, bucket in zip(workers, buckets, strict=True):
            worker.bucket_filled(bucket)
        total = sum(buckets, torch.zeros(5))
        for bucket in buckets:
            bucket.copy_(total)
        for worker, weight in zip(workers, weights, strict=True):
            worker.end(small_sqr, weight, None)

    step()
    assert not told
    step()
    assert len(told) == 3
    for norms in told:
        assert (norms.small_batch, norms.large_batch) == (8 / 3, 8)
        mean_sqr = sum(weight * float(one @ one) for weight, one in zip(weights, gradients, strict=True))
        assert float(norms.small_sqr) == pytest.approx(mean_sqr)
        mean = sum(weight * one for weight, one in zip(weights, gradients, strict=True))
        assert float(norms.large_sqr) == pytest.approx(float(torch.as_tensor(mean).square().sum()))
