"""A training that is killed at a moment of its own choice, and goes on: what it has learned, drawn and read."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS, STEPS_PER_EPOCH = 40, 12, 3, 4
NUM_STEPS = NUM_EPOCHS * STEPS_PER_EPOCH
"""The last step of an epoch has four samples for six virtual shards."""
FIRST_SAVE = 3
"""Steps. Later checkpoints are left out while one is being written."""
TIMEOUT_S = 200.0
"""For a training, on a machine that does much else."""

Moment = Literal["in a step", "between steps", "epoch's end", "evaluation", "snapshot", "worker-", "manifest", "a time"]
"""The three before the last: while the state is copied; before a file of that name in a checkpoint is opened or
renamed."""


@dataclass(frozen=True)
class Kill:
    """SIGKILL at the first such moment after so many steps; after more than `FIRST_SAVE` there is a checkpoint."""

    moment: Moment
    step: int
    victim: int | None
    """The rank of the one that meets the moment and is killed; None: rank 0 meets it, and all are killed."""
    after_s: float = 0.0
    """Seconds after the start of the training, of the moment "a time"."""


@dataclass(frozen=True)
class Outcome:
    """Of one worker, at the end of a training: what must not depend on interruptions, and what was on its screen."""

    weights_sha256: str
    lr: float
    history: list[list[float]]
    said: str = field(compare=False)


@dataclass(frozen=True)
class Undisturbed:
    """A run of one worker that nobody disturbed."""

    outcome: Outcome
    samples: dict[int, set[int]]

    def assert_equal(self, outcomes: list[Outcome], folder: Path) -> None:
        assert outcomes == [self.outcome] * len(outcomes)
        assert samples_seen(folder) == self.samples


class _Killer:
    """Kills this worker, or all of them, at one moment."""

    def __init__(self, folder: Path, attempt: int, kill: Kill, rank: int) -> None:
        self._folder, self._attempt, self._kill = folder, attempt, kill
        (folder / f"pid-{attempt}-{rank}").write_text(str(os.getpid()))
        self._is_it = rank == (kill.victim or 0)
        if self._is_it and kill.moment == "a time":
            timer = threading.Timer(kill.after_s, self._kill_now)
            timer.daemon = True
            timer.start()
        elif self._is_it:
            sys.addaudithook(self._watch_files)

    def pass_by(self, moment: Moment, num_steps: int) -> None:
        if self._is_it and moment == self._kill.moment and num_steps >= self._kill.step:
            self._kill_now()

    def _watch_files(self, event: str, values: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename"):
            for path in (Path(os.fsdecode(one)) for one in values[:2] if isinstance(one, str | bytes | os.PathLike)):
                place, _, step = path.parent.name.partition("-")
                is_late = place == "step" and step.isdigit() and int(step) >= self._kill.step
                if is_late and path.name.lstrip(".").startswith(self._kill.moment):
                    self._kill_now()

    def _kill_now(self) -> None:
        while self._kill.step > FIRST_SAVE and not list(self._folder.glob("checkpoints/step-*/manifest.json")):
            time.sleep(0.01)
        (self._folder / "killed").touch()
        others = [] if self._kill.victim is not None else self._folder.glob(f"pid-{self._attempt}-*")
        for pid in {int(file.read_text()) for file in others} - {os.getpid()}:
            os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class _History:
    """Something that the script keeps: what its own generators drew after each step, and what evaluations found."""

    is_copied: Callable[[], None]
    rows: list[list[float]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        self.is_copied()
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = [list(row) for row in state["rows"]]


class _Samples(Dataset[Any]):
    """(its number, inputs with random noise, target) of each sample."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        inputs = torch.tensor([index / NUM_SAMPLES, 1.0, (index % 7) / 7])
        return index, inputs + 0.1 * torch.rand(3), torch.tensor([float(index % 3)])


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))


def train(
    folder: Path,
    attempt: int = 0,
    strategy: str = "dp",
    kill: Kill | None = None,
    after_step: Callable[[paceline.Run], None] | None = None,
    clip_norm: float = 1.0,
    every_steps: int = FIRST_SAVE,
    **options: Any,
) -> Outcome:
    """Train in `folder`, from its newest checkpoint on; `options` are of `paceline.init`."""
    screen = io.StringIO()
    values = {"global_batch_size": BATCH_SIZE, "virtual_shards": 6, "epochs": NUM_EPOCHS, "parity": "bitwise"}
    checkpoint = {"dir": str(folder / "checkpoints"), "every_steps": every_steps, "every_minutes": None}
    job = paceline.Job.from_mapping({**values, "checkpoint": checkpoint, "optim": {"clip_norm": clip_norm}})
    with paceline.init(job, strategy=strategy, progress=screen, **options) as run:
        killer = None if kill is None else _Killer(folder, attempt, kill, run.rank)

        def pass_by(moment: Moment) -> None:
            if killer is not None:
                killer.pass_by(moment, run.steps)

        model = build_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        model, optimizer = run.prepare(model, optimizer, scheduler=scheduler)
        history = _History(lambda: pass_by("snapshot"))
        of_torch, of_numpy, of_python = torch.Generator().manual_seed(1), np.random.default_rng(2), random.Random(3)
        run.keep("history", history)
        run.keep("of torch", of_torch)
        run.keep("of numpy", of_numpy)
        run.keep("of python", of_python)
        with (folder / f"seen-{attempt}-{run.rank}").open("a") as seen:

            def loss_fn(model: nn.Module, shard: Any) -> Tensor:
                pass_by("in a step")
                print(json.dumps([run.steps, shard[0].tolist()]), file=seen, flush=True)
                return F.mse_loss(model(shard[1]), shard[2])

            def measure(model: nn.Module, batch: Any) -> dict[str, Tensor]:
                pass_by("evaluation")
                return {"error": (model(batch[1]) - batch[2]).square().flatten()}

            for epoch in run.epochs():
                for batch in run.batches(_Samples(), epoch):
                    run.step(batch, loss_fn)
                    drawn = float(torch.rand((), generator=of_torch)), of_numpy.random(), of_python.random()
                    history.rows.append(list(drawn))
                    pass_by("between steps")
                    if after_step is not None:
                        after_step(run)
                pass_by("epoch's end")
                history.rows.append(list(run.evaluate(_Samples(), measure).values()))
        return Outcome(run.weights_sha256(), optimizer.param_groups[0]["lr"], history.rows, screen.getvalue())


def samples_seen(folder: Path) -> dict[int, set[int]]:
    """The numbers of the samples of each step, of the attempt whose step lasted."""
    lasting: dict[int, set[int]] = {}
    for steps in _attempts(folder):
        lasting = {step: numbers for step, numbers in lasting.items() if step < min(steps)} | steps
    return lasting


def first_steps(folder: Path) -> list[int]:
    """The step that each attempt began with."""
    return [min(steps) for steps in _attempts(folder)]


def _attempts(folder: Path) -> list[dict[int, set[int]]]:
    found: dict[str, dict[int, set[int]]] = {}
    for file in sorted(folder.glob("seen-*")):
        steps = found.setdefault(file.name.split("-")[1], {})
        for step, numbers in map(json.loads, file.read_text().splitlines()):
            steps.setdefault(step, set()).update(numbers)
    return [steps for _, steps in sorted(found.items()) if steps]


def checkpoints_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoints/step-*"))


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)
