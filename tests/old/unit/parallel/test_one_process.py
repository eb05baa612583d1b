"""Several devices driven by one process: what one device computes, threads and all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import JobError, ModelError
from paceline.models.lenet import lenet
from paceline.parallel.assignment import Assignment
from paceline.parallel.engine import Engine, StepInput
from paceline.parallel.engines.dp import DataParallel
from paceline.parallel.engines.one_process import OneProcessDataParallel, devices_of_process
from paceline.parallel.gradients.gradient_norms import GradientNorms
from paceline.samples import Samples
from paceline.spec import Job, Plan

CPU = torch.device("cpu")
NUM_SHARDS = 5
JOB = Job(global_batch_size=11, virtual_shards=NUM_SHARDS)

Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Any], Tensor]


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def lenet_of_digits() -> nn.Module:
    return lenet(image_size=16)


def norm_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 10)
    )


def dropout_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, 10))


def step_input(batch: Batch, loss: Loss = loss_of, take_norms: Any = None, step: int = 0) -> StepInput:
    assignment = Assignment.of(len(batch[1]), NUM_SHARDS, 0, 1)

    return StepInput(
        assignment,
        Samples.of(batch, len(batch[1])),
        loss,
        shard_seed=lambda shard: 1000 * step + shard,
        scale=lambda value: value,
        take_norms=take_norms,
    )


@contextmanager
def one_process(model: nn.Module, num_devices: int, job: Job = JOB) -> Iterator[OneProcessDataParallel]:
    engine = OneProcessDataParallel(model, job, (CPU,) * num_devices)
    try:
        yield engine
    finally:
        engine.close()


def batches(dtype: torch.dtype) -> Iterator[Batch]:
    """Full ones, a ragged one, and one that leaves devices without a shard."""
    generator = torch.Generator().manual_seed(3)
    for size in (11, 11, 7, 1, 11):
        yield torch.randn(size, 1, 16, 16, generator=generator, dtype=dtype), torch.arange(size) % 10


def trained(model: nn.Module, engine: Engine, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and all gradients of five steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses: list[Tensor] = []
    gradients: list[Tensor] = []
    for step, batch in enumerate(batches(dtype)):
        optimizer.zero_grad()

        def update(_loss: Tensor) -> None:
            gradients.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
            optimizer.step()

        engine.buffers.begin_step()

        losses.append(engine.step(step_input(batch, step=step), update).loss)
    return losses, gradients


@pytest.mark.parametrize("build", [lenet_of_digits, norm_net, dropout_net])
@pytest.mark.parametrize("num_devices", [2, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-10)])
def test_many_devices_compute_what_one_does(
    build: Callable[[], nn.Module], num_devices: int, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    alone = build().to(dtype)
    together = copy.deepcopy(alone)
    plain = DataParallel(alone, Plan(), CPU, None, None, False)
    losses, gradients = trained(alone, plain, dtype)
    with one_process(together, num_devices) as engine:
        found_losses, found_gradients = trained(together, engine, dtype)
    assert len(found_gradients) == len(gradients) == 5 * len(list(alone.parameters()))
    for found, expected in zip(found_losses + found_gradients, losses + gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * max(1.0, float(expected.abs().max())))
    for found, expected in zip(together.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_gradient_norms_are_those_of_the_devices_parts() -> None:
    model = norm_net().double()
    batch = next(batches(torch.float64))
    told: list[GradientNorms] = []
    with one_process(model, 2) as engine:
        engine.gradients(step_input(batch, take_norms=told.append))
        (norms,) = told
        whole = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
        assert (norms.small_batch, norms.large_batch) == (5.5, 11)
        assert float(norms.large_sqr) == pytest.approx(whole)
        assert float(norms.small_sqr) > whole  # a smaller batch is noisier


def test_a_loss_that_bypasses_the_replicas_is_one_sentence() -> None:
    model = lenet_of_digits()
    with one_process(model, 2) as engine, pytest.raises(ModelError, match="the loss function is given"):
        engine.gradients(step_input(next(batches(torch.float32)), lambda _, batch: loss_of(model, batch)))


def test_what_one_process_cannot_do_is_refused() -> None:
    with pytest.raises(JobError, match="parity = 'bitwise' needs the strategy dp"):
        OneProcessDataParallel(norm_net(), JOB.with_values(parity="bitwise"), (CPU, CPU))
    if torch.cuda.device_count() < 64:
        with pytest.raises(JobError, match="should drive 64 GPUs from GPU 0 on"):
            devices_of_process(Plan(devices_in_process=64, device_kind="cuda"), torch.device("cuda", 0))
    assert devices_of_process(Plan(devices_in_process=3), CPU) == (CPU, CPU, CPU)
