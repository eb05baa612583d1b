"""Refuses to train parameters that a loss function computes with and that belong to no model of the run.

The parameters of a criterion, such as the centres of classes, get a gradient from every pass, and nobody sums it over
workers: an optimizer of the script's own would train each worker's copy on that worker's samples.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from paceline.errors import ModelError
from paceline.parallel.kept.kept_values import FunctionNames, Namespace


class ForeignParameters:
    """The parameters that a loss function names, alone or in modules, and that are no model's of the run."""

    def __init__(self, names: FunctionNames, models: Iterable[nn.Module]) -> None:
        own = {id(parameter) for model in models for parameter in model.parameters()}
        places = names.places(lambda value: isinstance(value, nn.Parameter), reads=True)
        self._places: list[tuple[Namespace, str]] = [
            (place, name) for place, name in places.values() if id(place.get(name)) not in own
        ]
        self._with_gradient: list[tuple[str, nn.Parameter, int]] = []
        """Name, parameter and version of those that had a gradient when the last step had ended."""

    def begin_step(self) -> None:
        """
        Raises:
            ModelError: the script has changed one since the last step, which had a gradient then.
        """
        for name, parameter, version in self._with_gradient:
            if parameter._version != version:
                raise ModelError(
                    f"The script itself trains the parameter '{name}', of shape {tuple(parameter.shape)}, with which "
                    "the loss function computes: its gradient is of this worker's samples only. Make it part of the "
                    "model before run.prepare, and build the optimizer from model.parameters(); one that is moved "
                    "without gradients, such as a teacher's, gets requires_grad_(False)."
                )

    def end_step(self) -> None:
        """Whatever changes until `begin_step` is the script's doing."""
        found = [(name, place.get(name)) for place, name in self._places]
        self._with_gradient = [
            (name, one, one._version) for name, one in found if isinstance(one, nn.Parameter) and one.grad is not None
        ]
