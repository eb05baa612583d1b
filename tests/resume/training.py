"""A training that is killed at a moment of its own choice, and goes on: what it has learned, drawn and read."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline

Moment = Literal["in a step", "between steps", "epoch's end", "evaluation", "snapshot", "worker-", "manifest"]
"""The last three: while the state is copied; before a file of that name in a checkpoint is opened or renamed."""

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS, STEPS_PER_EPOCH = 40, 12, 3, 4
NUM_STEPS = NUM_EPOCHS * STEPS_PER_EPOCH
"""The last step of an epoch has four samples for six virtual shards."""
FIRST_SAVE = 3
"""Later ones are left out while one is being written."""


@dataclass(frozen=True)
class Kill:
    """SIGKILL at the first such moment after so many steps; after more than `FIRST_SAVE` there is a checkpoint."""

    moment: Moment
    step: int
    victim: int | None
    """The rank of the one that meets the moment and is killed; None: rank 0 meets it, and all are killed."""


@dataclass(frozen=True)
class Outcome:
    """Of one worker, at the end of a training."""

    weights_sha256: str
    lr: float
    history: list[list[float]]
    said: str
    """On its screen."""


@dataclass(frozen=True)
class Learned:
    """What must not depend on interruptions."""

    weights_sha256: str
    lr: float
    history: list[list[float]]
    samples: dict[int, set[int]]
    """Their numbers, by step."""

    @classmethod
    def of(cls, outcomes: list[Outcome], samples: dict[int, set[int]]) -> Learned:
        """What all workers of a run have learned alike."""
        first = outcomes[0]
        assert all(one == replace(first, said=one.said) for one in outcomes)
        return cls(first.weights_sha256, first.lr, first.history, samples)


@dataclass
class History:
    """Something that the script keeps: what its own generators drew after each step, and what evaluations found."""

    rows: list[list[float]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = [list(row) for row in state["rows"]]


class Samples(Dataset[Any]):
    """(its number, inputs with random noise, target) of each sample."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        inputs = torch.tensor([index / NUM_SAMPLES, 1.0, (index % 7) / 7])
        return index, inputs + 0.1 * torch.rand(3), torch.tensor([float(index % 3)])


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))


class _Executioner:
    """Kills this worker, or all of them, at one moment."""

    def __init__(self, folder: Path, attempt: int, kill: Kill | None, rank: int) -> None:
        self.kill, self.folder, self.attempt = kill, folder, attempt
        (folder / f"pid-{attempt}-{rank}").write_text(str(os.getpid()))
        self._is_it = kill is not None and rank == (kill.victim or 0)
        if kill is not None and kill.moment in ("worker-", "manifest") and self._is_it:
            sys.addaudithook(self._watch_files)

    def pass_by(self, moment: Moment, num_steps: int) -> None:
        if self._is_it and self.kill is not None and moment == self.kill.moment and num_steps >= self.kill.step:
            self._strike()

    def _watch_files(self, event: str, values: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename") or self.kill is None:
            return
        for path in (Path(os.fsdecode(value)) for value in values[:2] if isinstance(value, str | bytes | os.PathLike)):
            place, _, step = path.parent.name.partition("-")
            is_late = place == "step" and step.isdigit() and int(step) >= self.kill.step
            if is_late and path.name.startswith(self.kill.moment):
                self._strike()

    def _strike(self) -> None:
        if self.kill is not None and self.kill.step > FIRST_SAVE:
            while not list(self.folder.glob("checkpoints/step-*/manifest.json")):
                time.sleep(0.01)
        (self.folder / "killed").touch()
        if self.kill is not None and self.kill.victim is None:
            for file in self.folder.glob(f"pid-{self.attempt}-*"):
                if (pid := int(file.read_text())) != os.getpid():
                    os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def train(
    folder: Path,
    attempt: int = 0,
    strategy: str = "dp",
    kill: Kill | None = None,
    after_step: Callable[[paceline.Run], None] | None = None,
    clip_norm: float = 1.0,
    **options: Any,
) -> Outcome:
    """Train in `folder`, from its newest checkpoint on; `options` are of `paceline.init`."""
    screen = io.StringIO()
    job = paceline.Job.from_mapping(
        {
            "global_batch_size": BATCH_SIZE,
            "virtual_shards": 6,
            "epochs": NUM_EPOCHS,
            "parity": "bitwise",
            "optim": {"clip_norm": clip_norm},
            "checkpoint": {"dir": str(folder / "checkpoints"), "every_steps": FIRST_SAVE, "every_minutes": None},
        }
    )
    with paceline.init(job, strategy=strategy, progress=screen, **options) as run:
        executioner = _Executioner(folder, attempt, kill, run.rank)
        model = build_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        model, optimizer = run.prepare(model, optimizer, scheduler=scheduler)
        history = History()
        of_torch, of_numpy, of_python = torch.Generator().manual_seed(1), np.random.default_rng(2), random.Random(3)
        run.keep("history", history)
        run.keep("of torch", of_torch)
        run.keep("of numpy", of_numpy)
        run.keep("of python", of_python)
        run.keep("executioner", _Snapshot(executioner, run))
        with (folder / f"seen-{attempt}-{run.rank}").open("a") as seen:

            def loss_fn(model: nn.Module, shard: Any) -> Tensor:
                executioner.pass_by("in a step", run.steps)
                print(json.dumps([run.steps, shard[0].tolist()]), file=seen, flush=True)
                return F.mse_loss(model(shard[1]), shard[2])

            def measure(model: nn.Module, batch: Any) -> dict[str, Tensor]:
                executioner.pass_by("evaluation", run.steps)
                return {"error": (model(batch[1]) - batch[2]).square().flatten()}

            for epoch in run.epochs():
                for batch in run.batches(Samples(), epoch):
                    run.step(batch, loss_fn)
                    drawn = float(torch.rand((), generator=of_torch)), of_numpy.random(), of_python.random()
                    history.rows.append(list(drawn))
                    executioner.pass_by("between steps", run.steps)
                    if after_step is not None:
                        after_step(run)
                executioner.pass_by("epoch's end", run.steps)
                history.rows.append(list(run.evaluate(Samples(), measure).values()))
        return Outcome(run.weights_sha256(), optimizer.param_groups[0]["lr"], history.rows, screen.getvalue())


@dataclass
class _Snapshot:
    """Kept only to learn when a checkpoint is made."""

    executioner: _Executioner
    run: paceline.Run

    def state_dict(self) -> dict[str, Any]:
        self.executioner.pass_by("snapshot", self.run.steps)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def samples_seen(folder: Path) -> dict[int, set[int]]:
    """The numbers of the samples of each step, of the attempt whose step lasted."""
    lasting: dict[int, set[int]] = {}
    for steps in _attempts(folder):
        lasting = {step: numbers for step, numbers in lasting.items() if step < min(steps)} | steps
    return lasting


def checkpoints_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoints/step-*"))


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def first_steps(folder: Path) -> list[int]:
    """The step that each attempt began with."""
    return [min(steps) for steps in _attempts(folder)]


def _attempts(folder: Path) -> Iterator[dict[int, set[int]]]:
    for attempt in range(100):
        files = list(folder.glob(f"seen-{attempt}-*"))
        if not files:
            return
        steps: dict[int, set[int]] = {}
        for file in files:
            for line in file.read_text().splitlines():
                step, numbers = json.loads(line)
                steps.setdefault(step, set()).update(numbers)
        yield steps
