"""The same training written as users of five libraries write it: Paceline, plain DDP, Accelerate, Fabric, Lightning.

    torchrun --nproc-per-node 2 benchmarks/peers/trainers.py ddp resnet20 --steps 30
    paceline launch -n 2 benchmarks/peers/trainers.py paceline resnet20 --steps 30
    paceline launch -n 2 benchmarks/peers/trainers.py paceline,ddp,accelerate,fabric gpt --steps 200

Several take turns in the same processes, some steps each: what disturbs the machine disturbs all of them, so that one
per cent shows. All but Lightning can; they share what the launcher has set (memory, threads).

Models, samples, batch size, optimizer and memory format are the same for all; pixels are random, of the sizes of MNIST
and CIFAR-10. Peers read samples as their documentation shows, by a `DataLoader`; Paceline by `Run.batches`. Rank 0
prints what its clock saw as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

WARMUP_STEPS = STEPS_PER_TURN = 5
CONTEXT = 128
NUM_LABELS, NUM_IMAGES = 10, 10_000


@dataclass(frozen=True)
class Case:
    """What is trained: on images of (channels, height, width), or on texts."""

    model: str
    global_batch_size: int
    shape: tuple[int, ...] = ()


CASES = {
    "lenet": Case("lenet", 256, (1, 28, 28)),
    "resnet20": Case("resnet20", 128, (3, 32, 32)),
    "resnet18": Case("resnet18", 64, (3, 32, 32)),
    "efficientnet-b0": Case("efficientnet-b0", 64, (3, 32, 32)),
    "gpt": Case("gpt", 32),
    "bert": Case("bert", 32),
}
_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def pixels_of(case: Case) -> tuple[Any, Any]:
    """Random images, uint8 (n, C, H, W), and their labels (n,)."""
    draw = np.random.default_rng(0)
    return draw.integers(256, size=(NUM_IMAGES, *case.shape), dtype=np.uint8), draw.integers(
        NUM_LABELS, size=NUM_IMAGES
    )


class Images(Dataset[tuple[Tensor, int]]):
    """Normalised sample by sample; of colour images with random crop, flip and cutout as tensor transforms."""

    def __init__(self, case: Case) -> None:
        self.images, self.labels = pixels_of(case)
        self.mean, self.std = (torch.tensor(each[: case.shape[0]]).view(-1, 1, 1) for each in (_MEAN, _STD))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.from_numpy(self.images[index]).float().div(255)
        is_augmented = len(image) == 3
        if is_augmented:
            top, left = (int(torch.randint(0, 9, ())) for _ in range(2))
            image = F.pad(image, (4, 4, 4, 4))[:, top : top + 32, left : left + 32]
            if torch.rand(()) < 0.5:
                image = image.flip(-1)
        image = (image - self.mean) / self.std
        if is_augmented:
            y, x = (int(torch.randint(0, 32, ())) for _ in range(2))
            image[:, max(0, y - 4) : y + 4, max(0, x - 4) : x + 4] = 0
        return image, int(self.labels[index])


def texts(*, labelled: bool) -> TensorDataset:
    """Bytes of the standard library's sources, (n, CONTEXT); the next bytes, or which of ten modules they are from."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = ("argparse", "ast", "difflib", "doctest", "inspect", "pickle", "subprocess", "tarfile", "turtle", "typing")
    inputs, targets = [], []
    for label, name in enumerate(names):
        tokens = torch.from_numpy(np.frombuffer((folder / f"{name}.py").read_bytes(), np.uint8).astype(np.int64))
        rows = tokens[: (len(tokens) - 1) // CONTEXT * CONTEXT].view(-1, CONTEXT)
        inputs.append(rows)
        targets.append(torch.full((len(rows),), label) if labelled else tokens[1 : rows.numel() + 1].view(-1, CONTEXT))
    return TensorDataset(torch.cat(inputs), torch.cat(targets))


class Clock:
    """Times the steps of one worker."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self._ends_s: list[tuple[float, float, float]] = []

    def tick(self) -> bool:
        """A step has ended; whether it was the last one."""
        self._ends_s.append((time.time(), time.perf_counter(), time.process_time()))
        return len(self._ends_s) >= self.num_steps

    def report(self) -> str:
        (first_at, _, _), warm, last = self._ends_s[0], self._ends_s[WARMUP_STEPS - 1], self._ends_s[-1]
        num_timed = len(self._ends_s) - WARMUP_STEPS
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return json.dumps(
            {
                "steps_per_s": num_timed / (last[1] - warm[1]),
                "processor_s_per_step": (last[2] - warm[2]) / num_timed,
                "first_step_s": first_at - float(os.environ["BENCH_STARTED_AT"]),
                "peak_mib": max(usage.ru_maxrss for usage in usages) / 1024,
            }
        )


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
    model = named(case.model, num_classes=NUM_LABELS, in_channels=case.shape[0], image_size=case.shape[1])
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.shape:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    if inputs.dim() == 4:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    return F.cross_entropy(model(inputs).float().flatten(0, -2), targets.flatten())


def loader_of(case: Case, arguments: argparse.Namespace, sampler: Any = None) -> DataLoader[Any]:
    """What a peer reads its part of each batch by."""
    dataset: Dataset[Any] = Images(case) if case.shape else texts(labelled=case.model == "bert")
    return DataLoader(
        dataset,
        batch_size=case.global_batch_size // int(os.environ["WORLD_SIZE"]),
        sampler=sampler and sampler(dataset),
        shuffle=None if sampler else True,
        num_workers=arguments.loader_workers,
        drop_last=True,
    )


def forever(loader: Any) -> Iterator[Any]:
    epoch = 0
    while True:
        if hasattr(getattr(loader, "sampler", None), "set_epoch"):
            loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def ddp(case: Case, arguments: argparse.Namespace) -> Iterator[None]:
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data.distributed import DistributedSampler

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    loader = loader_of(case, arguments, DistributedSampler)
    model = DistributedDataParallel(build(case))
    optimizer = optimizer_of(case, model)
    for batch in forever(loader):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=arguments.bf16):
            loss = loss_fn(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield


def accelerate(case: Case, arguments: argparse.Namespace) -> Iterator[None]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if arguments.bf16 else "no")
    model, loader = build(case), loader_of(case, arguments)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(case, model), loader)
    for batch in forever(loader):
        loss = loss_fn(model, batch)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        yield


def fabric(case: Case, arguments: argparse.Namespace) -> Iterator[None]:
    from lightning.fabric import Fabric

    world_size, precision = int(os.environ["WORLD_SIZE"]), "bf16-mixed" if arguments.bf16 else "32-true"
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy="ddp", precision=precision)
    fabric.launch()
    model = build(case)
    model, optimizer = fabric.setup(model, optimizer_of(case, model))
    loader = fabric.setup_dataloaders(loader_of(case, arguments))
    for batch in forever(loader):
        loss = loss_fn(model, batch)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        yield


def lightning(case: Case, arguments: argparse.Namespace, clock: Clock) -> None:
    import lightning as L

    class Module(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = build(case)

        def training_step(self, batch: Any, _: int) -> Tensor:
            return loss_fn(self.model, batch)

        def on_train_batch_end(self, *_: Any) -> None:
            clock.tick()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(case, self.model)

    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        precision="bf16-mixed" if arguments.bf16 else "32-true",
        max_steps=clock.num_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), loader_of(case, arguments))


def paceline(case: Case, arguments: argparse.Namespace) -> Iterator[None]:
    import paceline
    from paceline.data import ArraySet
    from paceline.spec import DataSpec

    with paceline.init(
        global_batch_size=case.global_batch_size,
        epochs=1000,
        precision="bfloat16" if arguments.bf16 else "float32",
        channels_last=bool(case.shape),
        virtual_shards=arguments.virtual_shards,
    ) as run:
        model = build(case)
        model, _ = run.prepare(model, optimizer_of(case, model))
        if case.shape:
            channels = case.shape[0]
            augment = DataSpec(augment=("crop", "flip", "cutout")) if channels == 3 else None
            dataset: Any = ArraySet(*pixels_of(case), NUM_LABELS, _MEAN[:channels], _STD[:channels], augment)
        else:
            dataset = texts(labelled=case.model == "bert")
        for batch in run.batches(dataset):
            run.step(batch, loss_fn)
            yield


TRAINERS: dict[str, Callable[[Case, argparse.Namespace], Iterator[None]]] = {
    "paceline": paceline,
    "ddp": ddp,
    "accelerate": accelerate,
    "fabric": fabric,
}
"""Each makes a step whenever it is asked for the next one."""


def take_turns(trainers: dict[str, Iterator[None]], num_steps: int) -> None:
    """Rank 0 prints a row for each: milliseconds of a step (median), their ratio to the first one's, turn by turn, and
    its standard error; wall time and this worker's processor time."""
    turns: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in trainers}
    for number in range(num_steps // STEPS_PER_TURN + 1):
        for name in list(trainers)[:: -1 if number % 2 else 1]:  # Paceline, where it is the first, starts the group
            clocks = time.perf_counter, time.process_time
            began_s = [clock() for clock in clocks]
            for _ in range(STEPS_PER_TURN):
                next(trainers[name])
            dist.barrier()
            for times_s, clock, began in zip(turns[name], clocks, began_s, strict=True):
                times_s.append(clock() - began)
    for name, own in turns.items():
        cells = [name]
        for times_s, first in zip(own, next(iter(turns.values())), strict=True):
            ratios = [one / other for one, other in zip(times_s, first, strict=True)][1:]  # one turn warms up
            low, middle, high = statistics.quantiles(ratios, n=4)
            error = (high - low) / len(ratios) ** 0.5  # of a median, nearly
            cells.append(f"{1000 * statistics.median(times_s) / STEPS_PER_TURN:.1f} | {middle:.3f} ± {error:.3f}")
        if os.environ["RANK"] == "0":
            print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainers", help="one, or several that take turns: " + ", ".join([*TRAINERS, "lightning"]))
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--virtual-shards", type=int, default=8, help="Paceline's")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case, names = CASES[arguments.case], arguments.trainers.split(",")
    clock = Clock(arguments.steps)
    if names == ["lightning"]:
        lightning(case, arguments, clock)
    else:
        trainers = {name: TRAINERS[name](case, arguments) for name in names}
        if len(names) > 1:
            take_turns(trainers, arguments.steps)
            return
        for _ in trainers[names[0]]:
            if clock.tick():
                break
    if os.environ["RANK"] == "0":
        print(clock.report(), flush=True)


if __name__ == "__main__":
    main()
