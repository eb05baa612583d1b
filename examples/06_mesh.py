"""Rung 6: two axes together, on four workers; beyond rung 4 only the marked line.

paceline launch -n 4 examples/06_mesh.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import paceline
from paceline.data import load
from paceline.models import build


def loss_fn(model, batch):  # type: ignore[no-untyped-def]
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def metrics(model, batch):  # type: ignore[no-untyped-def]
    images, labels = batch
    return {"accuracy": (model(images).argmax(1) == labels).double()}


train_set, test_set = load("digits")
with paceline.init(global_batch_size=64, epochs=5, seed=0, strategy="fsdp2 x pp2") as run:  # <- two sharded stages
    model = build("lenet")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    example = train_set[0][0][None]
    model, optimizer = run.prepare(model, optimizer, example=example)
    for batch in run.batches(train_set):
        loss = run.step(batch, loss_fn)
    accuracy = run.evaluate(test_set, metrics)["accuracy"]
    if run.rank == 0:
        print(f"accuracy {accuracy:.4f} on {run.world_size} workers")
