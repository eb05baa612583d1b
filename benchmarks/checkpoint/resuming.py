"""Whether a run that was ended in the middle of an epoch goes on as if it had not been, each as its guide shows.

Every script trains the same small net on the same 60 samples with Adam, five batches of 12 an epoch for two epochs, in
two workers; it is ended after 7 batches and started again in two workers or in one, with the same global batch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.kit.workers import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.spec import Job, Plan

from .cost import say
from .ways import WAYS, join_workers, rank, world_size

SAMPLES, BATCH, EPOCHS, STOP = 60, 12, 2, 7
BY_HAND = "torch.save, batches skipped by hand"


def net(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Dropout(dropout), nn.Linear(8 * 7 * 7, 10)
    )  # fmt: skip


def samples() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(SAMPLES, 3, 16, 16, generator=draw), torch.randint(0, 10, (SAMPLES,), generator=draw)
    )


def weights(model: nn.Module) -> np.ndarray[Any, Any]:
    return torch.cat([tensor.flatten() for tensor in model.state_dict().values()]).numpy()


def loss_of(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def with_paceline(folder: str, stop: int | None, dropout: float) -> np.ndarray[Any, Any]:
    """`paceline.init` with a folder for checkpoints; nothing else has to be done."""
    job = Job(global_batch_size=BATCH, virtual_shards=2, epochs=EPOCHS, parity="bitwise")
    plan = Plan(world_size=worker_facts().world_size, algorithm="tree_exact", timeout_s=60)
    with paceline.init(job, plan=plan, max_steps=stop, checkpoint_dir=folder) as run:
        model = net(dropout)
        run.prepare(model, Adam(model.parameters(), lr=0.01))
        for batch in run.batches(samples()):
            run.step(batch, loss_of)
        return weights(model)


def with_torch(folder: str, stop: int | None, dropout: float, *, way: str, skips: bool = False) -> np.ndarray[Any, Any]:
    """DistributedDataParallel and DistributedSampler; the tutorials save the epoch and begin it again.

    Args:
        skips: count batches by hand and leave out as many of the epoch's as have been trained.
    """
    join_workers()
    model = net(dropout)
    optimizer = Adam(model.parameters(), lr=0.01)
    saver = WAYS[way](Path(folder), model, optimizer)
    steps = saver.load() if any(Path(folder).iterdir()) else 0
    epochs = -(-SAMPLES // BATCH)
    first, skipped = divmod(steps, epochs) if skips else (steps // epochs, 0)
    parallel = DistributedDataParallel(model) if world_size() > 1 else model
    dataset = samples()
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, world_size(), rank(), shuffle=True)
    loader = DataLoader(dataset, BATCH // world_size(), sampler=sampler)
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        for batch in islice(loader, skipped if epoch == first else 0, None):
            _update(parallel, optimizer, batch, lambda loss: loss.backward())
            steps += 1
            if steps == stop:
                saver.save(steps)
                saver.wait()
                return weights(model)
    return weights(model)


def with_accelerate(folder: str, stop: int | None, dropout: float) -> np.ndarray[Any, Any]:
    """Accelerator.prepare, save_state, load_state and skip_first_batches, with its seedable sampler."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed

    join_workers()
    set_seed(0)
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    model = net(dropout)
    loader = DataLoader(samples(), BATCH // world_size(), shuffle=True)
    parallel, optimizer, loader = accelerator.prepare(model, Adam(model.parameters(), lr=0.01), loader)
    steps = 0
    if any(Path(folder).iterdir()):
        accelerator.load_state()
        steps = STOP  # users keep count themselves
    first, skipped = divmod(steps, -(-SAMPLES // BATCH))
    for epoch in range(first, EPOCHS):
        loader.set_epoch(epoch)
        active = accelerator.skip_first_batches(loader, skipped) if epoch == first and skipped else loader
        for batch in active:
            _update(parallel, optimizer, batch, accelerator.backward)
            steps += 1
            if steps == stop:
                accelerator.save_state()
                return weights(model)
    return weights(model)


def with_fabric(folder: str, stop: int | None, dropout: float) -> np.ndarray[Any, Any]:
    """Fabric.setup, save and load; the guide keeps the count of epochs and begins the one that was left again."""
    from lightning_fabric import Fabric, seed_everything

    join_workers()
    seed_everything(0, verbose=False)
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=world_size())
    fabric.launch()
    plain = net(dropout)
    model, optimizer = fabric.setup(plain, Adam(plain.parameters(), lr=0.01))
    loader = fabric.setup_dataloaders(DataLoader(samples(), BATCH // world_size(), shuffle=True))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "epoch": 0}
    path = Path(folder) / "checkpoint.ckpt"
    if path.exists():
        fabric.load(path, state)
    steps = state["epoch"] * -(-SAMPLES // BATCH)
    for epoch in range(state["epoch"], EPOCHS):
        for batch in loader:
            _update(model, optimizer, batch, fabric.backward)
            steps += 1
            if steps == stop:
                fabric.save(path, state | {"epoch": epoch})
                return weights(plain)
    return weights(plain)


def _update(model: nn.Module, optimizer: Optimizer, batch: Any, backward: Callable[[Tensor], Any]) -> None:
    loss = loss_of(model, batch)
    optimizer.zero_grad()
    backward(loss)
    optimizer.step()


Script = Callable[[str, int | None, float], np.ndarray[Any, Any]]
"""Called with a folder, the step to end at and the share of dropout; returns the weights."""

SCRIPTS: Mapping[str, Script] = {
    "Paceline": with_paceline,
    "torch.save": partial(with_torch, way="torch.save"),
    BY_HAND: partial(with_torch, way="torch.save", skips=True),
    "DCP save": partial(with_torch, way="DCP save"),
    "DCP async_save": partial(with_torch, way="DCP async_save"),
    "Accelerate": with_accelerate,
    "Lightning Fabric": with_fabric,
}
"""By the name in the tables."""


def resumes(names: Sequence[str], scratch: Path) -> dict[str, Any]:
    """Of each script, how far it ends from where it would have ended: "exact" is bit for bit.

    Without dropout and with it, and with one worker after two. A script that does not repeat itself even undisturbed
    is called that.
    """
    table = {}
    for name in names:
        row = {}
        for dropout, num_workers, kind in ((0.0, 2, "same_workers"), (0.5, 2, "dropout"), (0.0, 1, "one_worker")):
            undisturbed, repeated = (_run(SCRIPTS[name], scratch, dropout) for _ in range(2))
            if not np.array_equal(undisturbed, repeated):
                row[kind] = "does not repeat itself"
                continue
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                run_ranks(_to_the_end, 2, SCRIPTS[name], folder, STOP, dropout)
                try:
                    resumed = run_ranks(_to_the_end, num_workers, SCRIPTS[name], folder, None, dropout)[0]
                except AssertionError as problem:
                    row[kind] = str(problem).strip().splitlines()[-1]
                    continue
            off = float(np.abs(resumed - undisturbed).max())
            row[kind] = "exact" if np.array_equal(resumed, undisturbed) else f"off by {off:.0e}"
        table[name] = row
        say(f"resume  {name}: {row}")
    return table


def _run(script: Script, scratch: Path, dropout: float) -> np.ndarray[Any, Any]:
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        whole: np.ndarray[Any, Any] = run_ranks(_to_the_end, 2, script, folder, None, dropout)[0]
        return whole


def _to_the_end(script: Script, folder: str, stop: int | None, dropout: float) -> np.ndarray[Any, Any]:
    answer = script(folder, stop, dropout)
    if dist.is_initialized():
        dist.barrier()  # who ended first would take its side of the connections with it
    return answer
