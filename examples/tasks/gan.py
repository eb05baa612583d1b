"""Trains a GAN: two models, two optimizers, two steps on every batch.

python examples/tasks/gan.py
paceline launch -n 2 examples/tasks/gan.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import paceline


def points(count: int) -> torch.Tensor:
    """Noisy points on a circle, which the generator learns to draw."""
    draw = torch.Generator().manual_seed(1)
    angles = 2 * torch.pi * torch.rand(count, generator=draw)
    return torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(count, 2, generator=draw)


def loss_d(model, real):  # type: ignore[no-untyped-def]
    fake = generator(torch.randn(len(real), 4))  # drawn for each virtual shard: the same on any number of workers
    return F.softplus(-model(real)).mean() + F.softplus(model(fake)).mean()


def loss_g(model, real):  # type: ignore[no-untyped-def]
    return F.softplus(-discriminator(model(torch.randn(len(real), 4)))).mean()


def measure(model, real):  # type: ignore[no-untyped-def]
    return {"off": (model(torch.randn(len(real), 4)).norm(dim=1) - 1).abs()}


with paceline.init(global_batch_size=64, epochs=25, virtual_shards=4, seed=0) as run:
    generator = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    opt_g = torch.optim.SGD(generator.parameters(), lr=0.1)
    generator, opt_g = run.prepare(generator, opt_g, name="generator")
    discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(32, 1))
    opt_d = torch.optim.SGD(discriminator.parameters(), lr=0.2)
    discriminator, opt_d = run.prepare(discriminator, opt_d, name="discriminator")
    data = points(256)
    before = run.evaluate(data, measure, model=generator)["off"]
    for batch in run.batches(data):
        run.step(batch, loss_d, model=discriminator)
        run.step(batch, loss_g, model=generator)
    off = run.evaluate(data, measure, model=generator)["off"]
    if run.rank == 0:
        print(f"distance from the circle {off:.4f}, before training {before:.4f}, on {run.world_size} workers")
