"""A step whose loss or gradient is not a number: noticed before it reaches the weights, and named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.errors import ModelError
from paceline.parallel.parts import local
from paceline.spec.job import Reaction

MOST_IN_A_ROW = 10
"""Steps without an update; a run that cannot make one any more is not worth paying for."""

_SHOWN_SAMPLES = 8

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Guard:
    """Looks at every step before it becomes an update."""

    def __init__(self, reaction: Reaction) -> None:
        self._reaction = reaction
        self._num_in_a_row = 0

    @property
    def is_on(self) -> bool:
        return self._reaction != "ignore"

    def look(
        self,
        step: int,
        loss: Tensor,
        gradients: Sequence[Tensor],
        model: nn.Module,
        samples: NDArray[Any],
        everywhere: Callable[[list[str]], list[str]] = list,
    ) -> str | None:
        """What is not finite in step `step` and the numbers of the samples that led there; None where all is well.

        Args:
            gradients: what to look at besides the loss; or one number that is finite exactly when they are.
            everywhere: from the names of this worker's parameters to those of all workers, where each has a part.

        Raises:
            ModelError: the run is to end because of it.
        """
        if not self.is_on or is_finite(loss, gradients):
            self._num_in_a_row = 0
            return None
        self._num_in_a_row += 1
        wrong = _describe(step, loss, everywhere(_culprits(model)), samples)
        if self._reaction == "stop":
            raise ModelError(f"{wrong}. The run ends, as nonfinite = 'stop' says; lower optim.lr or look at the data.")
        if self._num_in_a_row == MOST_IN_A_ROW:
            raise ModelError(f"{wrong}. That is the {MOST_IN_A_ROW}th in a row; lower optim.lr or look at the data.")
        return wrong


def is_finite(loss: Tensor, gradients: Sequence[Tensor]) -> bool:
    """Whether the loss and every gradient are; one pass over them, and on a GPU the host waits for it.

    Everything is added: infinity and NaN survive that, and it is the fastest look at every number there is. A gradient
    whose sum overflows its own dtype counts as infinite.
    """
    sums = [loss.detach().double().view(()), *(gradient.sum(dtype=_WIDE.get(gradient.dtype)) for gradient in gradients)]
    return bool(torch.isfinite(torch.stack([one.double() for one in sums]).sum()))


def _culprits(model: nn.Module) -> list[str]:
    """The parameters whose gradients are not finite, as far as this worker holds them."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not bool(torch.isfinite(local(parameter.grad)).all())
    ]


def _describe(step: int, loss: Tensor, culprits: Sequence[str], samples: NDArray[Any]) -> str:
    """What is not finite in step `step`, the first of its kind, and the numbers of the samples that led there."""
    what = [] if bool(torch.isfinite(loss)) else [f"the loss is {float(loss)}"]
    if not what and not culprits:
        what.append("the norm of the gradient is not finite")
    if culprits:
        more = f" and {len(culprits) - 1} more" if len(culprits) > 1 else ""
        what.append(f"the gradient of '{culprits[0]}'{more} is not finite")
    shown = ", ".join(map(str, samples[:_SHOWN_SAMPLES].tolist()))
    rest = f" and {len(samples) - _SHOWN_SAMPLES:,} more" if len(samples) > _SHOWN_SAMPLES else ""
    return f"Step {step + 1}: {' and '.join(what)}; its batch is samples {shown}{rest}"
