"""All that a checkpoint holds of a run, and how a run goes on from it."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint.format import Manifest, Storage
from paceline.checkpoint.load import newest_that, read_state
from paceline.checkpoint.save import Snapshot
from paceline.data.randomness import RandomGenerator
from paceline.errors import CheckpointError, JobError, reason_of, shortened, shown
from paceline.spec import Job
from paceline.spec.job import differences
from paceline.train.batches import DataProgress
from paceline.train.meters import NoiseMeter
from paceline.train.model_state import TrainedModels, kind_of
from paceline.train.optim import ends_with_epochs


@runtime_checkable
class Stateful(Protocol):
    """Anything that a checkpoint can keep."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


Keepable = Stateful | RandomGenerator | dict[Any, Any]
"""Objects that a script may ask a run to save with checkpoints."""


@dataclass(frozen=True)
class KeptState:
    """Something without `state_dict` as something that a checkpoint can keep."""

    read: Callable[[], Any]
    put: Callable[[Any], Any]

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.read()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.put(state["state"])


def _stateful(thing: Any) -> Stateful | None:
    """A thing as a checkpoint can keep it; None if that is not possible."""
    if isinstance(thing, Stateful):
        return thing
    if isinstance(thing, dict):

        def fill(state: dict[Any, Any]) -> None:
            thing.clear()
            thing.update(state)

        return KeptState(lambda: thing, fill)
    if isinstance(thing, random.Random):
        return KeptState(thing.getstate, thing.setstate)
    if isinstance(thing, np.random.Generator):
        bits = thing.bit_generator
        return KeptState(lambda: _without_arrays(bits.state), lambda state: setattr(bits, "state", state))
    if isinstance(thing, np.random.RandomState):
        return KeptState(lambda: _without_arrays(thing.get_state(legacy=False)), thing.set_state)
    return KeptState(thing.get_state, thing.set_state) if isinstance(thing, torch.Generator) else None


def _without_arrays(state: Any) -> Any:
    """A state with lists in the place of NumPy's arrays, which its generator takes too."""
    if isinstance(state, Mapping):
        return {key: _without_arrays(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


class KeptObjects:
    """Objects of the user's script that are saved with every checkpoint, by name."""

    def __init__(self) -> None:
        self._things: dict[str, Stateful] = {}
        self.moves_between_steps = False
        """Whether the script changes any of them itself."""
        self._restored: dict[str, Any] = {}
        """States from a checkpoint that have not been claimed yet."""
        self.after_restoring: list[Callable[[], None]] = []
        """Called whenever a thing has got its state back before the first step."""

    def add(self, name: str, thing: Keepable, *, in_step: bool = False) -> None:
        """`in_step`: it moves in `Run.step` alone, not in what the script does between two steps. Raises `JobError` for
        a thing without a state, or a name that another thing has."""
        kept = _stateful(thing)
        if kept is None:
            raise JobError(
                f"run.keep({name!r}, …) takes a dictionary, something with state_dict() and load_state_dict(state), or "
                f"a generator of random numbers, not {shown(thing)}; put numbers into a dictionary."
            )
        if name in self._things:
            raise JobError(f"run.keep({name!r}, …) was called before; give each thing a name of its own.")
        self._things[name] = kept
        self.moves_between_steps |= not in_step
        self._restore([name])

    def _restore(self, names: Sequence[str]) -> None:
        found = [name for name in names if name in self._restored]
        for name in found:
            self._things[name].load_state_dict(self._restored.pop(name))
        for put_right in self.after_restoring if found else ():
            put_right()

    def state_dict(self) -> dict[str, Any]:
        return {name: thing.state_dict() for name, thing in self._things.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored = dict(state)
        self._restore([*self._things])  # what the script gave before `Run.prepare`


@dataclass(frozen=True)
class RunState:
    """All that a checkpoint holds of a run."""

    job: Job
    progress: DataProgress
    noise: NoiseMeter
    models: TrainedModels
    kept: KeptObjects
    metrics: dict[str, float]
    """The metrics of the last evaluation; changed in place."""

    def snapshot(self, collective: bool) -> Snapshot | None:
        """The state now; None where workers' weights differ and this step is no synchronisation point, and, unless all
        workers call this together, where this one holds only a shard of the model."""
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
        return Snapshot(self.progress.steps, dataclasses.asdict(self.job), shared, own, is_part=not self.holds_all)

    @property
    def holds_all(self) -> bool:
        """Whether every worker holds all models and their optimizers."""
        return all(trained.engine.holds_all for trained in self.models.by_name.values())

    def restore(self, found: ReadCheckpoint, *, force: bool) -> list[str]:
        """Resume from a checkpoint; returns notes. Raises `JobError` if it is of another job, unless `force` is set."""
        shared = found.shared
        notes = [note for name in self.models.by_name for note in self.restore_model(name, found, force=force)]
        with _as_saved(found.name):
            self.progress.load_state_dict(shared["progress"], check_order=not force)
            self.noise.load_state_dict(shared["noise"])
            self.metrics.update(shared["metrics"])
            self.kept.load_state_dict(shared["kept"])
            return notes

    def restore_model(self, name: str, found: ReadCheckpoint, *, force: bool) -> list[str]:
        """Give a model its state, also one that was prepared after the others; returns notes. Raises `JobError` as
        `restore` does, `CheckpointError` where the checkpoint has no such model."""
        with _as_saved(found.name):
            before, changes = self._changes(found.shared)
            if changes and not force:
                raise JobError(
                    f"The checkpoint to resume belongs to another job: {'; '.join(changes)}{_why(before, self.job)}. "
                    "Set it back, choose another folder, or resume nevertheless with force = True."
                )
            notes = self.models.put(name, found.shared, found.own, hyper=not changes, goes_on=not changes)
        if not changes:
            # A new scheduler writes its first learning rate into the optimizer, and loading its state leaves it there.
            self.kept.after_restoring.append(self.models.by_name[name].hyperparameters())
        return notes

    def _changes(self, shared: dict[str, Any]) -> tuple[Job, list[str]]:
        """The job of a checkpoint, and the differences of this run that change the result: of its job, and of the kinds
        of its optimizers."""
        # Converted to a job: keys of a later release get their defaults.
        before = Job.from_mapping(shared["job"])
        changes = differences(before.to_mapping(), self.job.to_mapping())
        kinds = {name: kind_of(one.optimizer) for name, one in self.models.by_name.items() if name in shared["models"]}
        saved = {name: shared["models"][name]["optimizer"].get("kind", kind) for name, kind in kinds.items()}
        changes += differences({"optimizer": saved}, {"optimizer": kinds})
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


@contextlib.contextmanager
def _as_saved(name: str) -> Iterator[None]:
    """A context that turns errors while a state is loaded into a `CheckpointError`: its checksums are right, but it is
    not a state that this run can load."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as problem:
        why = f"{type(problem).__name__}: {shortened(' '.join(str(problem).split()), 200)}"
        raise CheckpointError(
            f"The checkpoint {name} holds no state that this run can resume from ({why})."
        ) from problem


# --- reading the newest good checkpoint, by all workers of a run together ---


@dataclass(frozen=True)
class ReadCheckpoint:
    """The part of a checkpoint that this worker needs."""

    name: str
    shared: dict[str, Any]
    """The state common to all workers, and the job."""
    own: dict[str, Any]
    """The per-worker state, redistributed among the workers of this run."""


def newest_checkpoint(
    storage: Storage,
    group: dist.ProcessGroup | None,
    say: Callable[[str], None],
    wanted: Callable[[dict[str, Any]], dict[str, Any]] | None,
) -> ReadCheckpoint | None:
    """The newest good checkpoint. A collective of all workers in `group`, which uses CPU memory.

    `say` receives, on rank 0, messages about unusable checkpoints. `wanted` maps the common state, not read yet, to the
    slices that this worker reads (`Trained.own_shards`); None: every worker holds all of it. Raises `CheckpointError`
    where there are checkpoints, and none is good.
    """
    rank, num_workers = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def needed(shared: dict[str, Any], owns: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        mine = shared if wanted is None else wanted(shared)
        return mine, owns[rank : rank + 1] if len(owns) == num_workers else owns

    def read(name: str) -> tuple[str, Manifest, dict[str, Any], list[dict[str, Any]]]:
        manifest, (shared, owns) = read_state(storage, name, group, needed)
        return name, manifest, shared, owns

    try:
        found, problems = newest_that(read, storage, group)
    except OSError as failure:
        raise CheckpointError(reason_of(failure)) from None
    for problem in problems:
        say(problem)
    if found is None:
        if problems:
            say("There is no other checkpoint: the run starts from the beginning.")
        return None
    name, manifest, shared, owns = found
    if wanted is not None and any(manifest.workers):
        raise CheckpointError(
            f"{name} in {storage.address} holds state of each worker's own (means of weights that differed, or "
            "gradients not sent yet), from which a sharded model cannot resume; resume it with strategy = 'dp'."
        )
    own = owns[0] if owns else {}
    if len(manifest.workers) != num_workers:  # what each gets: sums over all workers stay, and means
        own = {
            "sums": _scaled_sum([own.get("sums", {}) for own in owns], 1 / num_workers),
            "means": _scaled_sum([own.get("means", {}) for own in owns], 1 / len(owns)),
        }
    return ReadCheckpoint(name, {"job": manifest.job, **shared}, own)


def _scaled_sum(values: Sequence[Any], factor: float) -> Any:
    """The sum of trees times a factor; integers and non-numbers are taken from the first tree."""
    first = values[0]
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for value in values for key in value)  # a worker without samples has no momentum yet
        return {key: _scaled_sum([value[key] for value in values if key in value], factor) for key in keys}
    if isinstance(first, list | tuple):
        return type(first)(_scaled_sum(items, factor) for items in zip(*values, strict=True))
    if isinstance(first, Tensor) and first.is_floating_point():
        return torch.stack([value.double() for value in values]).sum(0).mul_(factor).to(first.dtype)
    return sum(values) * factor if isinstance(first, float) else first
