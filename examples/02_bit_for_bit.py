"""Rung 2: the last bit too, with batch norm, dropout, a schedule and clipping; beyond rung 1 only the marked lines.

paceline launch -n 3 examples/02_bit_for_bit.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import paceline
from paceline.data import load


def loss_fn(model, batch):  # type: ignore[no-untyped-def]
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def metrics(model, batch):  # type: ignore[no-untyped-def]
    images, labels = batch
    return {"accuracy": (model(images).argmax(1) == labels).double()}


train_set, test_set = load("digits")
with paceline.init(
    global_batch_size=96,
    virtual_shards=6,  # <- six of every batch: on 1, 2, 3, ... 6 workers
    epochs=3,
    seed=0,
    parity="bitwise",  # <- gradients are added in one fixed order
    optim={"schedule": "cosine", "warmup_epochs": 1, "clip_norm": 1.0},  # <- counted in samples, exact
) as run:
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * 13 * 13, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    model, optimizer = run.prepare(net, optimizer)
    for batch in run.batches(train_set):
        loss = run.step(batch, loss_fn)
    accuracy = run.evaluate(test_set, metrics)["accuracy"]
    if run.rank == 0:
        print(f"accuracy {accuracy:.4f} weights {run.weights_sha256()}")  # <- the same on any number of workers
