"""What gradients that are late by a constant number of updates do to accuracy, with and without the adapted momentum.

    python -m benchmarks.late_gradients

One process and one server's slice of the parameters: each batch's gradient is computed with the parameters from some
updates before, so that, unlike in a real asynchronous run, nothing depends on how busy the machine is. The server is
told how late a gradient is, or that it is not late, which leaves the momentum as it is. LeNet on the digits inside
the package, batches of 64, 5 epochs, cosine schedule after half an epoch of warm-up.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from paceline import models
from paceline.comm.parameter_server_async.server import ParameterSlice
from paceline.data import ArraySet
from paceline.data.digits import load_digits
from paceline.spec import DataSpec, Job
from paceline.train.optimizers.schedule import lr_factor

BATCH_SIZE, EPOCHS = 64, 5
SETTINGS = ((0.9, 0.05), (0.5, 0.1), (0.0, 0.1))
"""Momentum and learning rate."""
LATENESS = (0, 1, 2, 4, 8)
"""In updates."""


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    train, test = (_tensors(one) for one in load_digits(DataSpec("digits")))
    print("| momentum, rate | lateness, updates | momentum stays | momentum adapted |\n|---|---|---|---|")
    for momentum, lr in SETTINGS:
        for lateness in LATENESS:
            stays = _accuracy(train, test, momentum, lr, lateness, is_told=False)
            can_adapt = lateness > 0 and momentum > 0
            adapted = _accuracy(train, test, momentum, lr, lateness, is_told=True) if can_adapt else stays
            print(f"| {momentum}, {lr} | {lateness} | {100 * stays:.0f} % | {100 * adapted:.0f} % |", flush=True)


def _tensors(samples: ArraySet) -> tuple[Tensor, Tensor]:
    pairs = [samples[index] for index in range(len(samples))]
    inputs = torch.stack([torch.as_tensor(np.asarray(image), dtype=torch.float32) for image, _ in pairs])
    return inputs, torch.tensor([int(label) for _, label in pairs])


def _accuracy(
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    momentum: float,
    lr: float,
    lateness: int,
    *,
    is_told: bool,
) -> float:
    torch.manual_seed(0)
    images, labels = train
    model = models.build("lenet", num_classes=10, in_channels=1, image_size=images.shape[-1])
    parameters = list(model.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    job = Job.from_mapping(
        {"model": "lenet", "data": "digits", "epochs": EPOCHS, "optim": {"schedule": "cosine", "warmup_epochs": 0.5}}
    )
    steps_per_epoch = len(images) // BATCH_SIZE
    server = ParameterSlice(
        torch.optim.SGD(parameters, lr=lr, momentum=momentum),
        (0, sum(sizes)),
        lambda _batch: 1,
        lambda batch: lr_factor(job, batch * BATCH_SIZE, steps_per_epoch * BATCH_SIZE),
        first_batch=0,
    )
    used = torch.ones(len(parameters), dtype=torch.bool)
    for batch in range(EPOCHS * steps_per_epoch):
        epoch, place = divmod(batch, steps_per_epoch)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        chosen = order[place * BATCH_SIZE : (place + 1) * BATCH_SIZE]
        version = max(0, batch - lateness)
        _fetch(server, version, parameters, sizes)
        gradients = torch.autograd.grad(nn.functional.cross_entropy(model(images[chosen]), labels[chosen]), parameters)
        server.push(
            batch,
            version if is_told else batch,
            version,
            [(0, 1)],
            [torch.cat([gradient.flatten() for gradient in gradients])],
            used,
        )
    _fetch(server, EPOCHS * steps_per_epoch, parameters, sizes)
    model.eval()
    with torch.no_grad():
        return float((model(test[0]).argmax(1) == test[1]).float().mean())


def _fetch(server: ParameterSlice, version: int, parameters: list[nn.Parameter], sizes: list[int]) -> None:
    found = server.pull(version)
    assert found is not None
    with torch.no_grad():
        for parameter, values in zip(parameters, found.split(sizes), strict=True):
            parameter.copy_(values.view(parameter.shape))


if __name__ == "__main__":
    main()
