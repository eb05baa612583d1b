"""Checks that a script changes weights, learning rates and other inputs of the loss identically on all workers.

A worker has only its part of a batch, so values that a script computes from it between two steps differ between
workers. Checksums are sent with the status of a step, and a difference ends the run one step later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property

from torch import Tensor

from paceline.containers import versions
from paceline.errors import DivergenceError
from paceline.parallel.batch_norm.norm import has_other_norms
from paceline.spec import Mesh
from paceline.train.records.digest import checksums
from paceline.train.session.state import Trained

_MOST_REQUESTS = 3
"""How often a worker may request a comparison of weights because its script has changed them."""
_TOLERANCES = (1e-5, 1e-9, 1e-9, 1e-7, 1e-12)
"""The relative differences that rounding may explain, for each kind of checksum in the order of a status message."""
_HYPERPARAMETERS = ("lr", "weight_decay", "momentum", "betas")
_REMEDY = (
    "A worker has only its part of a batch: return what it gives beside the loss, and take the mean over the global "
    "batch from run.values, the same on every worker."
)


def is_examined(number: int) -> bool:
    """Whether what a script does in its step, or with its batch, of this number, counted from 1, is looked at closely:
    in the first ones, and in ever fewer of those that follow."""
    return number <= 3 or (number >= 32 and number.bit_count() == 1)


class ScriptChanges:
    """What a script does between steps to the weights, the buffers and the learning rates of one model."""

    def __init__(self, trained: Trained, mesh: Mesh) -> None:
        self._trained = trained
        self._requests_left = _MOST_REQUESTS
        holds_all_buffers = mesh.pp == mesh.tp == 1 and not has_other_norms(trained.model)
        self._buffers = [one for one in trained.model.buffers() if one.is_floating_point()] if holds_all_buffers else []
        """Floating-point buffers that are equal on all workers after a step; empty if workers hold parts of the model,
        or norm layers keep statistics of each device."""
        self._num_steps = 0
        self._versions: list[int] = []
        self._is_asked = False
        """Whether some worker has asked for the comparison of this step."""
        self.asks_all = False
        """Whether this worker asks all to compare weights after the next step, since its script has changed some, or
        has put others there for a while."""

    def end_step(self) -> None:
        """Note the state after a step: whatever changes until `checksums` was changed by the script."""
        self._num_steps += 1
        if self._requests_left:
            self._versions = versions(self._watched)

    def compare(self) -> None:
        """Compare weights in this step. To be called on all workers."""
        self._is_asked = True

    def checksums(self) -> tuple[float, float]:
        """Checksums of learning rates and of weights (0.0 if not compared in this step); equal on all workers."""
        engine = self._trained.engine
        if not engine.reads_assignment or engine.weights_diverge:
            return 0.0, 0.0
        weights, is_compared = 0.0, self._is_asked or is_examined(self._num_steps)
        self._is_asked = self.asks_all = False
        if self._watched and is_compared:
            weights = float(sum(checksums(dict(enumerate(self._compared)))))
        elif self._watched and self._requests_left:
            self.asks_all = versions(self._watched) != self._versions
            self._requests_left -= self.asks_all
        return sum(map(_rate_of, self._trained.optimizer.param_groups)), weights

    @cached_property
    def _compared(self) -> list[Tensor]:
        """The tensors that every worker holds whole."""
        return [*(self._trained.model.parameters() if self._trained.engine.holds_all else ()), *self._buffers]

    @cached_property
    def _watched(self) -> list[Tensor]:
        """Tensors that have a new version where one of them changed: kernels move running statistics without one, and
        layers count their calls beside them."""
        return [*self._compared, *(self._trained.model.buffers() if self._buffers else ())]


def check_alike(compared: Sequence[tuple[float, float] | None], names: Iterable[str]) -> None:
    """
    Args:
        compared: the smallest and the largest of the workers' checksums: of tensors that a loss follows from, of
            numbers that it reads, of learning rates, of weights, of generators before run.step; None: no worker sent
            one.
        names: of what this worker's script has changed that losses follow from.

    Raises:
        DivergenceError: on all workers, if the script computed other values on some of them.
    """
    named = ", ".join(f"'{name}'" for name in names) or "a tensor"
    sentences = (
        f"The loss function computes with {named}, which the script changed before the last step, to other values on "
        f"some workers than on others. {_REMEDY}",
        f"The loss function reads {named}, which the script changed before the last step, to another number on some "
        f"workers than on others. {_REMEDY}",
        f"The learning rates, or other numbers of the optimizer's groups, that the script has set differ between "
        f"workers. {_REMEDY}",
        f"After run.step, and what the script did after it, weights differ between workers, or buffers, such as the "
        "running statistics that a call of the model in training mode moves: call it in evaluation mode (model.eval(), "
        f"and model.train() again). {_REMEDY}",
        "Between run.batches and run.step some workers have drawn more than others before they drew for their samples, "
        "as for a log on rank 0, or once for each of a worker's samples. Draw for the samples first, in tensors with a "
        "row for each, or in the loss function, and for all else from a generator of its own.",
    )
    for pair, tolerance, sentence in zip(compared, _TOLERANCES, sentences, strict=True):
        if pair is not None and not math.isclose(*pair, rel_tol=tolerance):
            raise DivergenceError(sentence)


def _rate_of(group: dict[str, object]) -> float:
    """A number that moves with the learning rate of a group of parameters, and with what schedules move beside it."""
    total = 0.0
    for name in _HYPERPARAMETERS:
        value = group.get(name)
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, Tensor):
                one = float(one) if one.numel() == 1 and one.device.type == "cpu" else 0.0  # no waiting
            if isinstance(one, int | float) and math.isfinite(one):
                total += abs(one)
    return total
