"""All that a checkpoint holds of a run, and how a run goes on from it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from paceline.checkpoint import Snapshot
from paceline.errors import CheckpointError, JobError, shortened, shown
from paceline.own_generators import RandomGenerator, full_state, set_state
from paceline.spec import Job
from paceline.spec.codec import MAY_DIVERGE, from_mapping
from paceline.spec.job import differences
from paceline.train.batches.data_progress import DataProgress
from paceline.train.optimizers.optim import ends_with_epochs
from paceline.train.records.noise_meter import NoiseMeter
from paceline.train.session.resume import Found
from paceline.train.session.state import TrainedModels
from paceline.words import on_one_line


@runtime_checkable
class Stateful(Protocol):
    """Anything that a checkpoint can keep."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


Keepable = Stateful | RandomGenerator
"""Objects that a script may ask a run to save with checkpoints."""


class KeptGenerator:
    """A generator of random numbers as something that a checkpoint can keep."""

    def __init__(self, generator: RandomGenerator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": _without_arrays(full_state(self.generator))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state(self.generator, state["state"])


def _without_arrays(state: Any) -> Any:
    """A state with lists in the place of NumPy's arrays, which its generator takes too."""
    if isinstance(state, Mapping):
        return {key: _without_arrays(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


class Kept:
    """Objects of the user's script that are saved with every checkpoint, by name."""

    def __init__(self) -> None:
        self._things: dict[str, Stateful] = {}
        self.moves_between_steps = False
        """Whether the script changes any of them itself."""
        self._restored: dict[str, Any] = {}
        """States from a checkpoint that have not been claimed yet."""
        self._after_restoring: Callable[[], None] = lambda: None

    def add(self, name: str, thing: Keepable, *, in_step: bool = False) -> None:
        """
        Args:
            in_step: whether it moves in `Run.step` alone, not in what the script does between two steps.

        Raises:
            JobError: a thing without a state, or a name that another thing has.
        """
        if not isinstance(thing, Keepable):
            raise JobError(
                f"run.keep({name!r}, …) takes something with state_dict() and load_state_dict(state), or a generator "
                f"of random numbers, not {shown(thing)}; put numbers into an object of your own that has both."
            )
        kept = KeptGenerator(thing) if isinstance(thing, RandomGenerator) else thing
        if name in self._things:
            raise JobError(f"run.keep({name!r}, …) was called before; give each thing a name of its own.")
        self._things[name] = kept
        self.moves_between_steps |= not in_step
        if name in self._restored:
            kept.load_state_dict(self._restored.pop(name))
            self._after_restoring()

    def state_dict(self) -> dict[str, Any]:
        return {name: thing.state_dict() for name, thing in self._things.items()}

    def load_state_dict(self, state: dict[str, Any], after_restoring: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            after_restoring: called after a thing has got its state back.
        """
        self._restored, self._after_restoring = dict(state), after_restoring
        for name in self._things.keys() & state.keys():  # what the script gave before `Run.prepare`
            self._things[name].load_state_dict(self._restored.pop(name))
        after_restoring()


@dataclass(frozen=True)
class _SavedMetrics:
    """The metrics of the last evaluation, as a checkpoint holds them."""

    metrics: dict[str, float] = field(metadata=MAY_DIVERGE)


@contextlib.contextmanager
def _as_saved(name: str) -> Iterator[None]:
    """A context that turns errors while a state is loaded into a `CheckpointError`: its checksums are right, but it is
    not a state that this run can load."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as problem:
        why = f"{type(problem).__name__}: {shortened(on_one_line(str(problem)), 200)}"
        raise CheckpointError(
            f"The checkpoint {name} holds no state that this run can resume from ({why})."
        ) from problem


@dataclass(frozen=True)
class RunState:
    """All that a checkpoint holds of a run."""

    job: Job
    progress: DataProgress
    noise: NoiseMeter
    models: TrainedModels
    kept: Kept
    metrics: dict[str, float]
    """The metrics of the last evaluation; changed in place."""

    def snapshot(self, collective: bool) -> Snapshot | None:
        """The state now; None where workers' weights differ and this step is no synchronisation point.

        Args:
            collective: whether all workers call this together; else None, too, where this worker holds only a shard
                of the model.
        """
        engines = [trained.engine for trained in self.models.by_name.values()]
        if collective:
            is_synchronised = [engine.sync_buffers() for engine in engines]  # collectives of every one of them
            is_possible = all(is_synchronised)
        else:
            is_possible = all(engine.holds_all and not engine.weights_diverge for engine in engines)
        if not is_possible:
            return None
        shared, own = self.models.take()
        shared |= {
            "progress": self.progress.state_dict(collective=collective),
            "noise": self.noise.state_dict(),
            "metrics": self.metrics,
            "kept": self.kept.state_dict(),
        }
        return Snapshot(self.progress.steps, self.job.to_mapping(), shared, own, is_part=not self.holds_all)

    @property
    def holds_all(self) -> bool:
        """Whether every worker holds all models and their optimizers."""
        return all(trained.engine.holds_all for trained in self.models.by_name.values())

    def restore(self, found: Found, *, force: bool) -> list[str]:
        """Resume from a checkpoint; returns notes. Raises `JobError` if it is of another job, unless `force` is set."""
        shared = found.shared
        with _as_saved(found.name):
            before, changes = self._changes(shared)
            if changes and not force:
                raise JobError(
                    f"The checkpoint to resume belongs to another job: {'; '.join(changes)}{_why(before, self.job)}. "
                    "Set it back, choose another folder, or resume nevertheless with force = True."
                )
            for name in self.models.by_name:
                self.models.put(name, shared, found.own, hyper=not changes)
            self.progress.load_state_dict(shared["progress"], check_order=not force)
            self.noise.load_state_dict(shared["noise"])
            self.metrics.update(from_mapping(_SavedMetrics, {"metrics": shared["metrics"]}).metrics)
            # A new scheduler writes its first learning rate into the optimizer, and loading its state leaves it there.
            self.kept.load_state_dict(shared["kept"], (lambda: None) if changes else self.models.hyperparameters())
            names = () if changes else self.models.by_name
            return [note for name in names for note in self.models.go_on(name, shared, found.own)]

    def restore_model(self, name: str, found: Found, *, force: bool) -> list[str]:
        """Give a model that was prepared after the others its state; with `force` it begins anew if there is none.
        Returns notes. Raises `CheckpointError` where the checkpoint has no such model."""
        if force and name not in found.shared["models"]:
            return []
        with _as_saved(found.name):
            changes = self._changes(found.shared)[1]
            self.models.put(name, found.shared, found.own, hyper=not changes)
            return [] if changes else self.models.go_on(name, found.shared, found.own)

    def _changes(self, shared: dict[str, Any]) -> tuple[Job, list[str]]:
        """The job of a checkpoint, and its differences from this run's job that change the result."""
        # Converted to a job: keys of a later release get their defaults.
        before = Job.from_mapping(shared["job"])
        changes = differences(before.to_mapping(), self.job.to_mapping())
        if self.job.epochs > before.epochs and not ends_with_epochs(before):
            changes = [change for change in changes if not change.startswith("epochs was ")]  # it goes on
        return before, changes


def _why(before: Job, job: Job) -> str:
    """Why a run cannot go on as another job, where that is not plain from what differs."""
    if job.epochs > before.epochs and ends_with_epochs(before):
        return " (its learning rates follow a schedule that ends with the epochs, so more would have changed them all)"
    if job.precision != before.precision:
        return f" (where 'auto' means {job.precision!r}, name precision = {before.precision!r} to go on in it)"
    return ""
