"""Trains on a folder of images, one folder for each class, of different sizes and read from disk when they are needed.

python examples/tasks/image_folder.py
paceline launch -n 2 examples/tasks/image_folder.py

The images are drawn here: discs and crosses in the plain PPM format. `read_ppm` would be an image library's `open`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

import paceline

CLASSES = ("cross", "disc")


def draw_folder(folder: Path, count: int, seed: int) -> None:
    """`count` images of each class below `folder`."""
    draws = np.random.default_rng(seed)
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
        for number in range(count):
            size, noise = int(draws.integers(16, 33)), draws.integers(0, 60, (3, 1, 1))
            across, down = np.mgrid[-1 : 1 : size * 1j, -1 : 1 : size * 1j]
            shape = across**2 + down**2 < 0.5 if name == "disc" else np.minimum(abs(across), abs(down)) < 0.2
            pixels = (noise + 180 * shape + draws.integers(0, 15, (3, size, size))).astype(np.uint8)
            header = f"P6 {size} {size} 255\n".encode()
            (folder / name / f"{number:04}.ppm").write_bytes(header + pixels.transpose(1, 2, 0).tobytes())


def read_ppm(path: Path) -> torch.Tensor:
    """An image of shape (3, height, width), 0 to 1."""
    header, _, pixels = path.read_bytes().partition(b"\n")
    width, height = (int(word) for word in header.split()[1:3])
    return torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(height, width, 3).permute(2, 0, 1) / 255


class ImageFolder(Dataset[tuple[torch.Tensor, int]]):
    """The images below a folder, all brought to one size; every other one is mirrored, by the draws of torch."""

    def __init__(self, folder: Path, is_augmented: bool) -> None:
        self.paths = sorted(folder.glob("*/*.ppm"))  # in one order on every node
        self.is_augmented = is_augmented

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = F.interpolate(read_ppm(self.paths[index])[None], size=(16, 16), mode="area")[0]
        if self.is_augmented and torch.rand(()) < 0.5:  # belongs to the sample, whoever reads it
            image = image.flip(-1)
        return image, CLASSES.index(self.paths[index].parent.name)


def loss_fn(model, batch):  # type: ignore[no-untyped-def]
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def metrics(model, batch):  # type: ignore[no-untyped-def]
    images, labels = batch
    return {"accuracy": (model(images).argmax(1) == labels).double()}


with tempfile.TemporaryDirectory() as name, paceline.init(global_batch_size=32, epochs=4, seed=0) as run:
    folder = Path(name)  # a folder of your own: the same on every worker
    draw_folder(folder / "train", 80, seed=1)
    draw_folder(folder / "test", 25, seed=2)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(128, 2),
    )
    model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    for batch in run.batches(ImageFolder(folder / "train", is_augmented=True)):
        loss = run.step(batch, loss_fn)
    accuracy = run.evaluate(ImageFolder(folder / "test", is_augmented=False), metrics)["accuracy"]
    if run.rank == 0:
        print(f"loss {float(loss):.4f} accuracy {accuracy:.4f} on {run.world_size} workers")
