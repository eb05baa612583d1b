"""What happens beside the training of a job: the events of its loop, and what may be done at them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.errors import JobError
from paceline.import_path import checked_options, imported
from paceline.spec import CallbackSpec

if TYPE_CHECKING:
    from paceline.train.training import Training


class Callback:
    """What happens beside the training of a job. Override the methods of the events that matter.

    Every worker has the same callbacks and calls the same methods at the same steps, in the order of the job's list.
    So a callback may make collectives (`training.run.evaluate`, `training.run.whole_state`) as long as it makes them on
    every worker; what one worker is to do alone (print, write a file, log) stands below `if training.run.rank == 0` and
    makes no collective. Whatever changes what is learned (weights, learning rates, `requires_grad`) has to change on
    every worker alike: after each evaluation and each epoch, workers compare their weights and learning rates, and the
    run ends with a `DivergenceError` where they differ. Reading a number from the device, such as `float(loss)`, makes
    the CPU wait for it: do it every so many steps.

    A callback that has `state_dict()` and `load_state_dict(state)` is saved with every checkpoint: they return and
    take tensors, numbers, texts, and lists and dictionaries of these, alike on all workers.
    """

    def run_began(self, training: Training) -> None:
        """Before the first step, or the first after a resume."""

    def step_made(self, training: Training, loss: Tensor) -> None:
        """After every optimizer update; `loss`, a scalar on the device, is that of the global batch."""

    def evaluated(self, training: Training, metrics: Mapping[str, float]) -> None:
        """After every evaluation on the test set."""

    def epoch_ended(self, training: Training) -> None:
        """After each epoch and its evaluation, if there was one; also where the run ends in the middle of an epoch."""

    def checkpoint_saved(self, training: Training, step: int) -> None:
        """A checkpoint is complete: that of an earlier step, since it is written while training goes on.

        The last one of a run is written after `run_ended`, and does not come here.
        """

    def run_ended(self, training: Training) -> None:
        """After the last step and evaluation, before the record is written; not after an error."""


def build_callbacks(specs: Sequence[CallbackSpec]) -> list[Callback]:
    """The callbacks that a job names. Raises `JobError` for an import path that names no subclass of `Callback`, or an
    option that it does not have."""
    callbacks = []
    for number, spec in enumerate(specs):
        make = imported(spec.name, f"callbacks[{number}].name")
        options = checked_options(make, spec.options, f"the callback {spec.name!r}", f"callbacks[{number}].options")
        callback = make(**options)
        if not isinstance(callback, Callback):
            raise JobError(
                f"callbacks[{number}].name = {spec.name!r} made a {type(callback).__name__}; it should name a subclass "
                "of paceline.Callback."
            )
        callbacks.append(callback)
    return callbacks
