"""A step whose loss or gradient is not a number: noticed before it reaches the weights, and named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

MOST_IN_A_ROW = 10
"""Steps without an update; a run that cannot make one any more is not worth paying for."""

_SHOWN_SAMPLES = 8

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def is_finite(loss: Tensor, gradients: Sequence[Tensor]) -> bool:
    """Whether the loss and every gradient are; one pass over them, and on a GPU the host waits for it.

    Everything is added: infinity and NaN survive that, and it is the fastest look at every number there is. A gradient
    whose sum overflows its own dtype counts as infinite.
    """
    sums = [loss.detach().double().view(()), *(gradient.sum(dtype=_WIDE.get(gradient.dtype)) for gradient in gradients)]
    return bool(torch.isfinite(torch.stack([one.double() for one in sums]).sum()))


def describe(step: int, loss: Tensor, model: nn.Module, samples: NDArray[Any]) -> str:
    """What is not finite in step `step`, the first of its kind, and the numbers of the samples that led there."""
    culprits = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
    ]
    what = [] if bool(torch.isfinite(loss)) else [f"the loss is {float(loss)}"]
    if culprits:
        more = f" and {len(culprits) - 1} more" if len(culprits) > 1 else ""
        what.append(f"the gradient of '{culprits[0]}'{more} is not finite")
    shown = ", ".join(map(str, samples[:_SHOWN_SAMPLES].tolist()))
    rest = f" and {len(samples) - _SHOWN_SAMPLES:,} more" if len(samples) > _SHOWN_SAMPLES else ""
    return f"Step {step + 1}: {' and '.join(what)}; its batch is samples {shown}{rest}"
