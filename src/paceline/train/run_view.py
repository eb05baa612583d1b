"""The read-only part of `Run`: its models, progress and measurements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import JobError
from paceline.noise import SmoothedNoise
from paceline.object_collectives import broadcast_object
from paceline.parallel import Engine
from paceline.train.batches.data_progress import DataProgress
from paceline.train.process.process_group import World
from paceline.train.records.digest import weights_sha256
from paceline.train.records.noise_meter import NoiseMeter
from paceline.train.session.state import Trained
from paceline.train.session.trained_models import TrainedModels
from paceline.train.steps.step import Stepper


class RunView:
    """The part of `Run` that changes nothing.

    Attributes:
        rank, world_size, device: this worker's rank, the number of workers, and this worker's device.
    """

    def __init__(self, world: World, progress: DataProgress, noise: NoiseMeter) -> None:
        self.world = world
        self.rank, self.world_size, self.device = world.rank, world.world_size, world.device
        self._progress = progress
        self._noise = noise
        self._models = TrainedModels()
        self._prepared: Stepper | None = None

    def epochs(self) -> Iterator[int]:
        """The numbers of the remaining epochs, from 0: all of the job's, or in a resumed run those not yet finished.

        The last one is the epoch in which the run ends, because of `max_steps`, `max_minutes` or `stop`.
        """
        progress = self._progress
        if progress.steps and progress.steps_left == 0 and progress.at_epoch_start:
            return  # the run had ended with the epoch before
        for epoch in progress.epochs():
            yield epoch
            if progress.steps_left == 0:
                return

    def consensus(self) -> AbstractContextManager[None]:
        """A context in which the model is the same on every worker: the mean of their weights where they synchronise
        every few steps only. Training then continues unchanged. `evaluate` enters it by itself.

        A collective: every worker has to enter it.
        """
        return self.engine.consensus()

    def whole_state(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        """The whole model's state_dict, in whole shapes. A collective; where the model is spread, rank 0 alone gets it.

        Args:
            model: which of several models that are trained; None: the first.
        """
        trained = self._trained(model)
        if not trained.engine.holds_all:
            self.stepper.session.enter_together("run.whole_state")
        return trained.engine.whole(trained.model.state_dict(keep_vars=True))

    def weights_sha256(self, model: nn.Module | None = None) -> str:
        """A fingerprint of the weights: equal exactly when every bit is. A collective where the model is spread.

        It is that of this worker's own copy where it holds the whole model.

        Args:
            model: which of several models that are trained; None: the first.
        """
        state = self.whole_state(model)
        if self.engine.holds_all:
            return weights_sha256(state)
        digest: str = broadcast_object(weights_sha256(state) if self.rank == 0 else None, self.world.group)
        return digest

    def _trained(self, model: nn.Module | None = None) -> Trained:
        """The prepared model; of several, the first, or the one that is named."""
        if model is not None:
            return self._models.of(model)
        if not self._models.by_name:
            raise JobError("Call run.prepare(model, optimizer) first.")
        return self._models.first

    @property
    def stepper(self) -> Stepper:
        """The object that makes the steps of the prepared models."""
        if self._prepared is None:
            raise JobError("Call run.prepare(model, optimizer) first.")
        return self._prepared

    @property
    def engine(self) -> Engine:
        """The engine that trains the prepared model, the first if there are several."""
        return self._trained().engine

    @property
    def model(self) -> nn.Module:
        """The prepared model, the first if there are several."""
        return self._trained().model

    @property
    def optimizer(self) -> Optimizer:
        """The prepared optimizer, of the first model if there are several."""
        return self._trained().optimizer

    @property
    def steps(self) -> int:
        """Number of optimizer updates made so far."""
        return self._progress.steps

    @property
    def samples_seen(self) -> int:
        """Number of samples, over all workers, used by optimizer updates so far."""
        return self._progress.samples_seen

    def total_steps(self, num_samples: int) -> int:
        """Optimizer updates of the whole run on a training set of `num_samples`: of all epochs, or `max_steps`.

        Raises:
            JobError: before the run was saved the number was another one, from which the script may have built a
                learning-rate schedule.
        """
        return self._progress.total_steps(num_samples)

    @property
    def noise(self) -> SmoothedNoise:
        """The measurements of gradient noise so far. On a GPU, reading it waits for the steps before."""
        return self._noise.read()

    @property
    def noise_scale(self) -> float | None:
        """The gradient noise scale in samples; None if not measured, or while noise hides the gradient."""
        return self._noise.scale()
