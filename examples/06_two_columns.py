"""Rung 6: two columns as in AlexNet (2012), one a worker; beyond rung 5 only the marked lines.

paceline launch -n 2 examples/06_two_columns.py
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
with paceline.init(global_batch_size=64, epochs=5, seed=0, strategy="tp") as run:
    columns = nn.Sequential(
        nn.Conv2d(1, 32, 3, stride=2), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, groups=2), nn.ReLU(),  # <- columns apart: nothing is sent
        nn.Conv2d(64, 64, 3), nn.ReLU(),  # <- here they meet
        nn.Conv2d(64, 64, 3, groups=2), nn.ReLU(),  # <- apart again
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(columns.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = run.prepare(columns, optimizer)
    for batch in run.batches(train_set):
        loss = run.step(batch, loss_fn)
    accuracy = run.evaluate(test_set, metrics)["accuracy"]
    if run.rank == 0:
        print(f"accuracy {accuracy:.4f} on {run.world_size} workers")
