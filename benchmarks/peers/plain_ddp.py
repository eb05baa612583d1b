"""The peer: data parallel training as PyTorch's documentation would have a user write it.

A map-style data set whose samples are made one by one, DataLoader, DistributedSampler, DistributedDataParallel.

    torchrun --nproc-per-node 2 benchmarks/peers/plain_ddp.py --case mnist --data DIR
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Mnist(Dataset[tuple[Tensor, int]]):
    """ToTensor and Normalize, sample by sample."""

    def __init__(self, folder: Path, split: str) -> None:
        with gzip.open(folder / f"{split}-images-idx3-ubyte.gz") as file:
            self.images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28)
        with gzip.open(folder / f"{split}-labels-idx1-ubyte.gz") as file:
            self.labels = np.frombuffer(file.read(), np.uint8, offset=8)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.from_numpy(self.images[index].copy()).unsqueeze(0).float().div(255)
        return (image - 0.1307) / 0.3081, int(self.labels[index])


class Cifar10(Dataset[tuple[Tensor, int]]):
    """Random crop, flip and cutout as tensor transforms, sample by sample."""

    def __init__(self, folder: Path, split: str) -> None:
        import pyarrow.parquet as parquet
        from PIL import Image

        table = parquet.read_table(folder / f"{split}.parquet")
        encoded = [row["bytes"] for row in table.column("img").to_pylist()]
        self.images = np.stack([np.asarray(Image.open(io.BytesIO(data)).convert("RGB")) for data in encoded])
        self.labels = np.array(table.column("label").to_pylist())
        self.augment = split == "train"
        self.mean = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
        self.std = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.from_numpy(self.images[index].copy()).permute(2, 0, 1).float().div(255)
        if self.augment:
            top, left = (int(torch.randint(0, 9, ())) for _ in range(2))
            image = F.pad(image, (4, 4, 4, 4))[:, top : top + 32, left : left + 32]
            if torch.rand(()) < 0.5:
                image = image.flip(-1)
        image = (image - self.mean) / self.std
        if self.augment:
            y, x = (int(torch.randint(0, 32, ())) for _ in range(2))
            image[:, max(0, y - 4) : y + 4, max(0, x - 4) : x + 4] = 0
        return image, int(self.labels[index])


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def small_net() -> nn.Module:
    """A net lighter than its data: one strided convolution and a linear layer."""
    return nn.Sequential(nn.Conv2d(3, 16, 4, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 8 * 8, 10))


CASES: dict[str, tuple[Any, Any, tuple[str, str]]] = {
    "mnist": (Mnist, lenet, ("train", "t10k")),
    "cifar10": (Cifar10, small_net, ("train", "test")),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--bf16", action="store_true")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data_class, build, (train_split, test_split) = CASES[arguments.case]
    train_set = data_class(arguments.data, train_split)
    sampler: DistributedSampler[Any] = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=256 // world_size, sampler=sampler, num_workers=arguments.loader_workers)
    model = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr)

    steps, samples, train_s, first_step_at = 0, 0, 0.0, 0.0
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        since = time.perf_counter()
        for inputs, targets in loader:
            if steps == arguments.max_steps:
                break
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=arguments.bf16):
                loss = F.cross_entropy(model(inputs).float(), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
            if steps == 1:
                first_step_at = time.time()
                since = time.perf_counter()  # throughput without the first step
                continue
            samples += len(targets) * world_size
        train_s += time.perf_counter() - since

    if rank == 0:
        model.eval()
        correct, test_set = 0, data_class(arguments.data, test_split)
        with torch.no_grad():
            for inputs, targets in DataLoader(test_set, batch_size=256):
                correct += int((model.module(inputs).argmax(1) == targets).sum())
        print(
            json.dumps(
                {
                    "samples_per_s": samples / train_s if train_s else None,
                    "accuracy": correct / len(test_set),
                    "time_to_first_step_s": first_step_at - float(os.environ["BENCH_STARTED_AT"]),
                }
            )
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
