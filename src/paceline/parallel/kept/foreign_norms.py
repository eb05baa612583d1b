"""Batch norm layers that a loss function calls and that belong to no model of the run.

A copy of the model that the script moves itself, such as the teacher of a self-distillation, computes in training mode
in many recipes. Every pass would then move its running statistics by the samples of this worker, and an evaluation of
the copy would depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.parallel.kept.kept_values import FunctionNames, Namespace

NOTE = (
    "The loss function calls batch norm layers in training mode that belong to no model given to run.prepare. They "
    "normalise by the samples of the batch, and no step moves their running statistics, which would follow from each "
    "worker's own samples: copy those of the model that is trained, or give theirs to run.prepare."
)


class ForeignNorms:
    """The batch norm layers that a loss function names, and that are no model's of the run."""

    def __init__(self, names: FunctionNames, models: Iterable[nn.Module]) -> None:
        own = {id(module._buffers) for model in models for module in model.modules()}
        places = names.places(_has_running_statistics, reads=True)
        self._layers: list[Namespace] = [
            layer for layer, name in places.values() if name == "_buffers" and id(layer.get(name)) not in own
        ]
        self._were_noted = False

    @contextmanager
    def unmoved(self) -> Iterator[None]:
        """A context after which their running statistics are as before it."""
        moving = [layer.get("_buffers") for layer in self._layers if layer.get("training")]
        # Kernels move them without a new version.
        before = [(one, one.clone()) for buffers in moving for one in buffers.values() if isinstance(one, Tensor)]
        try:
            yield
        finally:
            with torch.no_grad():
                for one, values in before:
                    one.copy_(values)

    def newly_in_training(self) -> bool:
        """Whether there are some in training mode, which this has not said before."""
        is_new = not self._were_noted and any(layer.get("training") for layer in self._layers)
        self._were_noted |= is_new
        return is_new


def _has_running_statistics(value: object) -> bool:
    return type(value) is dict and isinstance(value.get("running_mean"), Tensor)
