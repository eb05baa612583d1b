"""The same training written as users of five libraries write it: Paceline, plain DDP, Accelerate, Fabric, Lightning.

    torchrun --nproc-per-node 2 benchmarks/peers/trainers.py ddp resnet20 --data DIR --steps 30
    paceline launch -n 2 benchmarks/peers/trainers.py paceline resnet20 --data DIR --steps 30

Models, samples, batch size, optimizer and memory format are the same for all. Peers read samples as their documentation
shows, by a `DataLoader`; Paceline by `Run.batches`. Rank 0 prints what its clock saw as one line of JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import io
import json
import os
import resource
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

WARMUP_STEPS = 5
CONTEXT = 128
NUM_LABELS = 10


@dataclass(frozen=True)
class Case:
    """What is trained."""

    model: str
    data: str
    global_batch_size: int
    is_of_images: bool = True


CASES = {
    "lenet": Case("lenet", "mnist", 256),
    "resnet20": Case("resnet20", "cifar10", 128),
    "resnet18": Case("resnet18", "cifar10", 64),
    "efficientnet-b0": Case("efficientnet-b0", "cifar10", 64),
    "gpt": Case("gpt", "text", 32, is_of_images=False),
    "bert": Case("bert", "labelled text", 32, is_of_images=False),
}


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


class Clock:
    """Times the steps of one worker."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self._ends_s: list[float] = []
        self._first_at = 0.0
        self._processor_s = 0.0

    def tick(self) -> bool:
        """A step has ended; whether it was the last one."""
        self._ends_s.append(time.perf_counter())
        if len(self._ends_s) == 1:
            self._first_at = time.time()
        if len(self._ends_s) == WARMUP_STEPS:
            self._processor_s = time.process_time()
        return len(self._ends_s) >= self.num_steps

    def report(self) -> str:
        num_timed = len(self._ends_s) - WARMUP_STEPS
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return json.dumps(
            {
                "steps_per_s": num_timed / (self._ends_s[-1] - self._ends_s[WARMUP_STEPS - 1]),
                "processor_s_per_step": (time.process_time() - self._processor_s) / num_timed,
                "first_step_s": self._first_at - float(os.environ["BENCH_STARTED_AT"]),
                "peak_mib": max(usage.ru_maxrss for usage in usages) / 1024,
            }
        )


def text_tensors(*, labelled: bool) -> tuple[Tensor, Tensor]:
    """Bytes of the standard library's sources, (n, CONTEXT); the next bytes, or which of ten modules they are from."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = ("argparse", "ast", "decimal", "difflib", "doctest", "inspect", "pickle", "subprocess", "tarfile", "typing")
    inputs, targets = [], []
    for label, name in enumerate(names):
        path = folder / f"{'_pydecimal' if name == 'decimal' else name}.py"
        tokens = torch.from_numpy(np.frombuffer(path.read_bytes(), np.uint8).astype(np.int64))
        rows = tokens[: (len(tokens) - 1) // CONTEXT * CONTEXT].view(-1, CONTEXT)
        inputs.append(rows)
        targets.append(torch.full((len(rows),), label) if labelled else tokens[1 : rows.numel() + 1].view(-1, CONTEXT))
    return torch.cat(inputs), torch.cat(targets)


def per_sample(case: Case, data: Path) -> Dataset[Any]:
    """The data set of a peer."""
    if case.is_of_images:
        return {"mnist": Mnist, "cifar10": Cifar10}[case.data](data / case.data, "train")
    return TensorDataset(*text_tensors(labelled=case.data == "labelled text"))


class Bert(nn.Module):
    """A small BERT that labels texts: logits (b, NUM_LABELS)."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=256, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512,
            max_position_embeddings=CONTEXT, num_labels=NUM_LABELS,
        )  # fmt: skip
        self.inner = BertForSequenceClassification(config)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.inner(input_ids=tokens).logits
        return logits


def build(case: Case) -> nn.Module:
    from paceline.models import build as named

    if case.model == "bert":
        return Bert()
    if case.model == "gpt":
        return named("gpt", vocab_size=256, context=CONTEXT)
    in_channels, size = (1, 28) if case.data == "mnist" else (3, 32)
    model = named(case.model, num_classes=NUM_LABELS, in_channels=in_channels, image_size=size)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def optimizer_of(case: Case, model: nn.Module, *, fused: bool = False) -> torch.optim.Optimizer:
    """As its user leaves it, or with torch's fused kernels."""
    chosen = True if fused else None
    if case.is_of_images:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=chosen)
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=chosen)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.float().flatten(0, -2), targets.flatten())


def formatted(case: Case, inputs: Tensor) -> Tensor:
    return inputs.contiguous(memory_format=torch.channels_last) if case.is_of_images else inputs


def forever(loader: Any) -> Any:
    epoch = 0
    while True:
        if hasattr(getattr(loader, "sampler", None), "set_epoch"):
            loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def ddp(case: Case, arguments: argparse.Namespace, clock: Clock) -> int:
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data.distributed import DistributedSampler

    dist.init_process_group("gloo")
    dataset = per_sample(case, arguments.data)
    loader = DataLoader(
        dataset,
        batch_size=case.global_batch_size // dist.get_world_size(),
        sampler=DistributedSampler(dataset),
        num_workers=arguments.loader_workers,
        drop_last=True,
    )
    model = DistributedDataParallel(build(case))
    optimizer = optimizer_of(case, model, fused=arguments.fused)
    for inputs, targets in forever(loader):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=arguments.bf16):
            outputs = model(formatted(case, inputs))
        optimizer.zero_grad()
        loss_of(outputs, targets).backward()
        optimizer.step()
        if clock.tick():
            return dist.get_rank()
    raise AssertionError


def accelerate(case: Case, arguments: argparse.Namespace, clock: Clock) -> int:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if arguments.bf16 else "no")
    model = build(case)
    loader = DataLoader(
        per_sample(case, arguments.data),
        batch_size=case.global_batch_size // accelerator.num_processes,
        shuffle=True,
        num_workers=arguments.loader_workers,
        drop_last=True,
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(case, model, fused=arguments.fused), loader)
    for inputs, targets in forever(loader):
        outputs = model(formatted(case, inputs))
        optimizer.zero_grad()
        accelerator.backward(loss_of(outputs, targets))
        optimizer.step()
        if clock.tick():
            return int(accelerator.process_index)
    raise AssertionError


def fabric(case: Case, arguments: argparse.Namespace, clock: Clock) -> int:
    from lightning.fabric import Fabric

    world_size = int(os.environ["WORLD_SIZE"])
    fabric = Fabric(
        accelerator="cpu", devices=world_size, strategy="ddp", precision="bf16-mixed" if arguments.bf16 else "32-true"
    )
    fabric.launch()
    model = build(case)
    model, optimizer = fabric.setup(model, optimizer_of(case, model, fused=arguments.fused))
    loader = fabric.setup_dataloaders(
        DataLoader(
            per_sample(case, arguments.data),
            batch_size=case.global_batch_size // world_size,
            shuffle=True,
            num_workers=arguments.loader_workers,
            drop_last=True,
        )
    )
    for inputs, targets in forever(loader):
        outputs = model(formatted(case, inputs))
        optimizer.zero_grad()
        fabric.backward(loss_of(outputs, targets))
        optimizer.step()
        if clock.tick():
            return int(fabric.global_rank)
    raise AssertionError


def lightning(case: Case, arguments: argparse.Namespace, clock: Clock) -> int:
    import lightning as L

    class Module(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = build(case)

        def training_step(self, batch: Any, _: int) -> Tensor:
            inputs, targets = batch
            return loss_of(self.model(formatted(case, inputs)), targets)

        def on_train_batch_end(self, *_: Any) -> None:
            clock.tick()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(case, self.model, fused=arguments.fused)

    world_size = int(os.environ["WORLD_SIZE"])
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy="ddp",
        precision="bf16-mixed" if arguments.bf16 else "32-true",
        max_steps=clock.num_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(
        per_sample(case, arguments.data),
        batch_size=case.global_batch_size // world_size,
        shuffle=True,
        num_workers=arguments.loader_workers,
        drop_last=True,
    )
    trainer.fit(Module(), loader)
    return int(trainer.global_rank)


def paceline(case: Case, arguments: argparse.Namespace, clock: Clock) -> int:
    import paceline
    from paceline.data import load
    from paceline.spec import DataSpec

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        return loss_of(model(inputs), targets)

    with paceline.init(
        global_batch_size=case.global_batch_size,
        epochs=1000,
        precision="bfloat16" if arguments.bf16 else "float32",
        channels_last=case.is_of_images,
        parity=arguments.parity,
        virtual_shards=arguments.virtual_shards,
    ) as run:
        model = build(case)
        model, _ = run.prepare(model, optimizer_of(case, model, fused=arguments.fused))
        if case.is_of_images:
            spec = DataSpec(case.data, dir=str(arguments.data / case.data))
            if case.data == "cifar10":
                spec = dataclasses.replace(spec, augment=("crop", "flip", "cutout"), cutout_size=8)
            dataset: Any = load(spec)[0]
        else:
            dataset = per_sample(case, arguments.data)
        for batch in run.batches(dataset):
            run.step(batch, loss_fn)
            if clock.tick():
                return run.rank
    raise AssertionError


def limit(case: Case, arguments: argparse.Namespace, clock: Clock) -> int:
    """The same model on a batch that lies ready, in processes that never talk to each other."""
    from paceline.train.process_group import set_malloc

    set_malloc(keeps_freed=True)
    world_size = int(os.environ["WORLD_SIZE"])
    dataset = per_sample(case, arguments.data)
    inputs, targets = next(iter(DataLoader(dataset, batch_size=case.global_batch_size // world_size)))
    model, inputs = build(case), formatted(case, inputs)
    optimizer = optimizer_of(case, model, fused=arguments.fused)
    while True:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=arguments.bf16):
            outputs = model(inputs)
        optimizer.zero_grad()
        loss_of(outputs, targets).backward()
        optimizer.step()
        if clock.tick():
            return int(os.environ["RANK"])


TRAINERS: dict[str, Callable[[Case, argparse.Namespace, Clock], int]] = {
    "paceline": paceline,
    "ddp": ddp,
    "accelerate": accelerate,
    "fabric": fabric,
    "lightning": lightning,
    "limit": limit,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=TRAINERS)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--data", type=Path, required=True, help="folder with mnist/ and cifar10/")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--fused", action="store_true", help="the user asks for torch's fused optimizer kernels")
    parser.add_argument("--parity", default="numeric", help="Paceline's")
    parser.add_argument("--virtual-shards", type=int, default=8, help="Paceline's")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    clock = Clock(arguments.steps)
    if TRAINERS[arguments.trainer](CASES[arguments.case], arguments, clock) == 0:
        print(clock.report(), flush=True)


if __name__ == "__main__":
    main()
