"""Rung 1: the same training on any number of devices, with the same result up to rounding.

python examples/01_many_devices.py
paceline launch -n 2 examples/01_many_devices.py
torchrun --nproc-per-node 2 examples/01_many_devices.py
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
    return {"accuracy": (model(images).argmax(1) == labels).double()}  # one value per sample


train_set, test_set = load("digits")
with paceline.init(global_batch_size=64, epochs=5, seed=0) as run:  # <- joins the other workers
    model = build("lenet")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = run.prepare(model, optimizer)  # <- ties the model to its copies
    for batch in run.batches(train_set):  # <- this worker's samples of every global batch
        loss = run.step(batch, loss_fn)  # <- forward, backward, aggregate, update
    accuracy = run.evaluate(test_set, metrics)["accuracy"]  # <- every sample once
    if run.rank == 0:
        print(f"accuracy {accuracy:.4f} on {run.world_size} workers")
