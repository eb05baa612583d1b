"""What is looked at around one loss function: what it keeps from call to call, and what it computes with that is of no
model of the run."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from paceline.own_generators import OwnGenerators
from paceline.parallel.kept.counters import Counters
from paceline.parallel.kept.foreign_norms import ForeignNorms
from paceline.parallel.kept.foreign_parameters import ForeignParameters
from paceline.parallel.kept.kept_tensors import KeptTensors
from paceline.parallel.kept.kept_values import FunctionNames
from paceline.parallel.kept.read_numbers import ReadNumbers
from paceline.parallel.kept.snapshot import KeptState
from paceline.parallel.losses import LossOf


class WatchedLoss:
    """A loss function, and what is known of what it can name."""

    def __init__(self, loss_fn: object, models: Sequence[nn.Module]) -> None:
        """
        Args:
            models: the models of the run.
        """
        names = FunctionNames(loss_fn)
        self.function = loss_fn
        self.generators = OwnGenerators(loss_fn)
        self.counters = Counters.of_function(names)
        self.numbers = ReadNumbers(loss_fn, names, models)
        self.tensors = KeptTensors.of_function(names, models)
        self.kept = KeptState(loss_fn, models)
        self.foreign_norms = ForeignNorms(names, models)
        self._foreign_parameters = ForeignParameters(names, models)

    def around(self, loss_of: LossOf) -> LossOf:
        """The loss function with every call of it watched."""
        return self.counters.around(self.tensors.around(loss_of))

    def begin_step(self) -> None:
        """Look at what the script has changed since `end_step`. Raises `ModelError` if it trains a parameter itself."""
        self.counters.begin_step()
        self.tensors.begin_step()
        self._foreign_parameters.begin_step()
        self.numbers.begin_step()

    def end_step(self) -> None:
        """Whatever changes until `begin_step` is the script's doing."""
        self.counters.end_step()
        self.tensors.end_step()
        self._foreign_parameters.end_step()
        self.numbers.end_step()
