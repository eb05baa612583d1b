"""Detects and reports a non-finite loss or gradient before it reaches the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import ModelError
from paceline.object_collectives import all_gather_objects
from paceline.parallel.dtensor import local_shard
from paceline.train.session import Session
from paceline.train.state import Trained

MOST_IN_A_ROW = 10
"""The run ends after this many consecutive steps without an update."""

_SHOWN_SAMPLES = 8

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class NonFiniteGuard:
    """Looks at the loss and gradients of every step before they become an update."""

    def __init__(self, session: Session, trained: Trained) -> None:
        self._session = session
        self._trained = trained
        self._reaction = session.state.job.nonfinite
        self._num_in_a_row = 0

    def allows_update(self, step: int, loss: Tensor, norm: Callable[[], Tensor], samples: NDArray[Any]) -> bool:
        """Whether to make an update; the same answer on all workers that aggregate every step.

        Args:
            step: the number of global batches trained on before.
            norm: returns the norm of the whole model's gradient; called if workers hold shards. Then a collective.
            samples: the numbers of the samples in the step's batch.

        Raises:
            ModelError: the run is to end because of this step.
        """
        if self._reaction == "ignore" or is_finite(loss, self._looked_at(norm)):
            self._num_in_a_row = 0
            return True
        self._num_in_a_row += 1
        wrong = _describe(step, loss, self._culprits(), samples)
        if self._reaction == "stop":
            raise ModelError(f"{wrong}. The run ends, as nonfinite = 'stop' says; lower optim.lr or look at the data.")
        if self._num_in_a_row == MOST_IN_A_ROW:
            raise ModelError(f"{wrong}. That is the {MOST_IN_A_ROW}th in a row; lower optim.lr or look at the data.")
        if self._reaction == "skip":
            self._session.say(f"{wrong}. The step is skipped.")
            return False
        checkpoint = self._session.roll_back()
        if checkpoint is None:
            raise ModelError(f"{wrong}. There is no checkpoint yet to go back to; lower optim.lr or look at the data.")
        self._session.say(f"{wrong}. Weights and optimizer are again those of {checkpoint}; the data goes on.")
        return False

    def _looked_at(self, norm: Callable[[], Tensor]) -> list[Tensor]:
        """Tensors that are finite exactly when the whole model's gradient is."""
        if self._trained.precision.scaler.is_enabled():
            return []  # it skips a step that overflows under its loss scale, and scales less
        if not self._trained.engine.holds_all:
            return [norm()]
        return [parameter.grad for parameter in self._trained.model.parameters() if parameter.grad is not None]

    def _culprits(self) -> list[str]:
        """The parameters whose gradients are not finite. A collective where the model is spread."""
        own = [
            name
            for name, parameter in self._trained.model.named_parameters()
            if parameter.grad is not None and not bool(torch.isfinite(local_shard(parameter.grad)).all())
        ]
        if self._trained.engine.holds_all:
            return own
        found = {name for names in all_gather_objects(own, self._session.world.group) for name in names}
        return [name for name in self._trained.names.first if name in found]  # in the model's order


def is_finite(loss: Tensor, gradients: Sequence[Tensor]) -> bool:
    """Whether the loss and every gradient are finite; one pass over them, for which the CPU waits for the GPU.

    Everything is added: infinity and NaN survive that, and it is the fastest look at every number there is. A gradient
    whose sum overflows its own dtype counts as infinite.
    """
    sums = [loss.detach().double().view(()), *(gradient.sum(dtype=_WIDE.get(gradient.dtype)) for gradient in gradients)]
    return bool(torch.isfinite(torch.stack([one.double() for one in sums]).sum()))


def _describe(step: int, loss: Tensor, culprits: Sequence[str], samples: NDArray[Any]) -> str:
    """What is not finite in step `step`, and the numbers of the samples in its batch."""
    what = [] if bool(torch.isfinite(loss)) else [f"the loss is {float(loss)}"]
    if not what and not culprits:
        what.append("the norm of the gradient is not finite")
    if culprits:
        more = f" and {len(culprits) - 1} more" if len(culprits) > 1 else ""
        what.append(f"the gradient of '{culprits[0]}'{more} is not finite")
    shown = ", ".join(map(str, samples[:_SHOWN_SAMPLES].tolist()))
    rest = f" and {len(samples) - _SHOWN_SAMPLES:,} more" if len(samples) > _SHOWN_SAMPLES else ""
    return f"Step {step + 1}: {' and '.join(what)}; its batch is samples {shown}{rest}"
