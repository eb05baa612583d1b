"""`paceline.checkpoint`: list, verify, prune and export the checkpoints of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from paceline.errors import CheckpointError, JobError, file_problems, shown
from paceline.spec.codec import from_mapping
from paceline.spec.job import CheckpointSpec
from paceline.workflows.arguments import Say, checked, silent

if TYPE_CHECKING:
    from paceline.checkpoint.format import Storage
    from paceline.checkpoint.load import Pruning

__all__ = ["CheckpointState", "export", "ls", "prune", "verify"]


@dataclass(frozen=True)
class CheckpointState:
    """One checkpoint. "complete": its manifest is complete; "good": every byte was read and verified."""

    name: str
    state: Literal["complete", "unfinished", "damaged", "good"]
    problem: str = ""
    """What is damaged."""
    step: int = 0
    saved_at: str = ""
    """UTC, as in ISO 8601."""
    workers: int = 0
    num_bytes: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


@checked
def ls(place: str | Path) -> tuple[CheckpointState, ...]:
    """The checkpoints of a run, oldest first, by what their manifests say; only `verify` reads them.

    Example: `paceline.checkpoint.ls("runs/mine")[-1].step`.

    Args:
        place: a run folder, a folder of checkpoints, one checkpoint, or an address such as s3://…

    Raises:
        CheckpointError: there are none, or the storage fails.
    """
    with _opened(place) as (storage, names):
        return tuple(_state(storage, name) for name in names)


@checked
def verify(place: str | Path) -> tuple[CheckpointState, ...]:
    """Read every byte of every checkpoint: which are good, damaged or unfinished.

    Example: `all(one.state == "good" for one in paceline.checkpoint.verify("runs/mine"))`.

    Args:
        place: as for `ls`.

    Raises:
        CheckpointError: there are none, or the storage fails.
    """
    with _opened(place) as (storage, names):
        return tuple(_state(storage, name, is_verified=True) for name in names)


@checked
def prune(
    place: str | Path,
    *,
    keep_last: int = CheckpointSpec.keep_last,
    keep_every_hours: float | None = None,
    keep_best: str | None = None,
    dry_run: bool = False,
) -> Pruning:
    """Remove the checkpoints that no rule keeps; a rule only counts checkpoints that were read and found good.

    Example: `paceline.checkpoint.prune("runs/mine", keep_last=2, dry_run=True).go`.

    Args:
        place: as for `ls`.
        keep_last: the number of latest checkpoints to keep.
        keep_every_hours: also keep the first checkpoint of every period of this many hours.
        keep_best: also keep the best checkpoint by a metric, such as "accuracy".
        dry_run: remove nothing.

    Returns:
        The names of those that stay, of those that go, and what is wrong with damaged ones, which are left alone.

    Raises:
        JobError: an invalid rule, or a metric that no checkpoint has.
        CheckpointError: there are none, or the storage fails.
    """
    from paceline.checkpoint import load

    rules = {"keep_last": keep_last, "keep_every_hours": keep_every_hours, "keep_best": keep_best}
    spec = from_mapping(CheckpointSpec, rules)
    with _opened(place) as (storage, names):
        metrics = sorted({metric for name in names for metric in _state(storage, name).metrics})
        if keep_best is not None and keep_best not in metrics:
            known = ", ".join(metrics) or "no metrics"
            raise JobError(f"keep_best = {shown(keep_best)}: the checkpoints in {storage.address} have {known}.")
        return load.prune(storage, spec, dry_run=dry_run)


@checked
def export(checkpoint: str | Path, target: str | Path, *, force: bool = False, say: Say = silent) -> CheckpointState:
    """Write the model of a checkpoint into one safetensors file, under plain state_dict names.

    Example: `paceline.checkpoint.export("runs/mine", "model.safetensors")`.

    Args:
        checkpoint: a checkpoint; or a run folder, whose newest good one is taken.
        target: the file, such as model.safetensors.
        force: replace the file if there is one.
        say: receives messages about newer checkpoints that cannot be used.

    Returns:
        The checkpoint whose weights were written.

    Raises:
        CheckpointError: there is none that can be used, the file is there already, or a storage fails.
    """
    from paceline.checkpoint.load import read_weights, save_weights

    with _opened(checkpoint) as (storage, names), file_problems(f"{target} cannot be written", CheckpointError):
        beside, file = _parent(str(target))
        if not force and file in beside.names():
            raise CheckpointError(f"{target} is there already; choose another name, or replace it with force = True.")
        for name in reversed(names):
            try:
                save_weights(read_weights(storage, name)[1], beside, file)
                return _state(storage, name)
            except CheckpointError as problem:
                say(f"The checkpoint {name} in {storage.address} cannot be used: {problem}.")
        raise CheckpointError(f"There is no checkpoint in {storage.address} that can be used.")


@contextlib.contextmanager
def _opened(place: Path | str) -> Iterator[tuple[Storage, list[str]]]:
    """The storage that is meant by a run folder, a folder of checkpoints or one checkpoint, as a path or an address;
    and the checkpoints there, complete or not, oldest first, or the one. Raises `CheckpointError` if there are none."""
    from paceline.checkpoint.format import IN_RUN_FOLDER, MANIFEST_FILE, Storage

    with file_problems(f"{place} cannot be read", CheckpointError):
        storage = Storage(place)
        content = storage.names()
        if MANIFEST_FILE in content:
            storage, name = _parent(str(place))
            yield storage, [name]
            return
        if f"{IN_RUN_FOLDER}/" in content:
            storage = Storage(f"{storage.address.rstrip('/')}/{IN_RUN_FOLDER}")
        names = list(storage.checkpoints())
        if not names:
            raise CheckpointError(f"There is no checkpoint in '{storage.address}'.")
        yield storage, names


def _parent(address: str) -> tuple[Storage, str]:
    """The storage that a path or an address is in, and its name there."""
    from paceline.checkpoint.format import Storage

    path = address if "://" in address else str(Path(address).resolve())  # "." and ".." are no names
    folder, _, name = path.rstrip("/").rpartition("/")
    return Storage(folder or "/"), name


def _state(storage: Storage, name: str, *, is_verified: bool = False) -> CheckpointState:
    """The state of a checkpoint by its manifest; `is_verified`: by all of its bytes."""
    from paceline.checkpoint.format import MANIFEST_FILE
    from paceline.checkpoint.load import read_manifest, verify_checkpoint

    if MANIFEST_FILE not in storage.names(name):
        return CheckpointState(name, "unfinished")
    try:
        manifest = verify_checkpoint(storage, name) if is_verified else read_manifest(storage, name)
    except CheckpointError as problem:
        return CheckpointState(name, "damaged", str(problem))
    state: Literal["good", "complete"] = "good" if is_verified else "complete"
    return CheckpointState(
        name, state, "", manifest.step, manifest.saved_at, manifest.world_size, manifest.num_bytes, manifest.metrics
    )
