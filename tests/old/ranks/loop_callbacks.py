"""Callbacks that the tests of the loop name in jobs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline import Callback
from paceline.train.training import Training


class Recorder(Callback):
    """Writes down every event, on every worker, and how many steps it has seen in all."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._num_steps = 0
        self._events: list[list[Any]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self._num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_steps = state["num_steps"]

    def run_began(self, training: Training) -> None:
        self._note(training, "began")

    def step_made(self, training: Training, loss: Tensor) -> None:
        assert loss.shape == ()
        self._num_steps += 1
        assert self._num_steps == training.run.steps

    def evaluated(self, training: Training, metrics: Mapping[str, float]) -> None:
        assert sorted(metrics) == ["accuracy", "loss"]
        self._note(training, "evaluated")

    def epoch_ended(self, training: Training) -> None:
        self._note(training, f"epoch {training.epoch}")

    def checkpoint_saved(self, training: Training, step: int) -> None:
        assert step < training.run.steps
        self._note(training, f"saved {step}")

    def run_ended(self, training: Training) -> None:
        self._note(training, "ended")
        own = self._folder / f"events-{training.run.rank}.json"
        earlier = json.loads(own.read_text()) if own.exists() else []
        own.write_text(json.dumps(earlier + self._events))

    def _note(self, training: Training, event: str) -> None:
        self._events.append([training.run.steps, event])


class StopOnOne(Callback):
    """Asks for the end on the last worker alone."""

    def __init__(self, at_step: int) -> None:
        self._at_step = at_step

    def step_made(self, training: Training, loss: Tensor) -> None:  # noqa: ARG002
        run = training.run
        if run.rank == run.world_size - 1 and run.steps == self._at_step:
            run.stop(f"asked on the last worker at step {self._at_step}")


class ChangeOnOne(Callback):
    """Changes the weights, or the learning rate, of the last worker alone."""

    def __init__(self, what: str) -> None:
        self._what = what

    def evaluated(self, training: Training, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        run = training.run
        if run.rank != run.world_size - 1:
            return
        if self._what == "weights":
            with torch.no_grad():
                next(run.model.parameters()).add_(1e-3)
        else:
            run.optimizer.param_groups[0]["lr"] *= 2


class NoCallback:
    """Is none."""
