"""Retention rules: which checkpoints are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.checkpoint.format import Storage
from paceline.checkpoint.load import read_manifest, verify_checkpoint
from paceline.errors import PacelineError
from paceline.spec.job import CheckpointSpec
from paceline.spec.record import best_place


@dataclass(frozen=True)
class KnownCheckpoint:
    """The facts about a checkpoint that the retention rules use."""

    name: str
    saved_at_s: float
    """Seconds since the epoch."""
    metrics: dict[str, float]


def known_checkpoints(storage: Storage) -> tuple[list[KnownCheckpoint], dict[str, str]]:
    """What the manifests in a storage say, oldest first, and the problems of those that are damaged, by name."""
    known, damaged = [], {}
    for name, is_complete in storage.checkpoints().items():
        try:
            if is_complete:
                manifest = read_manifest(storage, name)
                known.append(KnownCheckpoint(name, manifest.saved_at_s, manifest.metrics))
        except PacelineError as problem:
            damaged[name] = str(problem)
    return known, damaged


def wanted(known: Sequence[KnownCheckpoint], spec: CheckpointSpec) -> set[str]:
    """The names of the checkpoints that the rules keep, of `known`, oldest first.

    The last `keep_last`; of every span of `keep_every_hours` hours the first; the best by `keep_best`.
    """
    keep = {one.name for one in known[-spec.keep_last :]}
    if spec.keep_every_hours is not None:
        span_s = spec.keep_every_hours * 3600
        keep |= {*{int(one.saved_at_s // span_s): one.name for one in reversed(known)}.values()}
    best = best_of(known, spec)
    return keep if best is None else keep | {best}


def best_of(known: Sequence[KnownCheckpoint], spec: CheckpointSpec) -> str | None:
    """The name of the best by `keep_best` of `known`, oldest first; of equals the oldest: later ones have other
    weights, not evaluated yet."""
    if spec.keep_best is None:
        return None
    values = [one.metrics.get(spec.keep_best, math.nan) for one in known]
    place = best_place(values, spec.keep_best, spec.best_mode)
    return None if place is None else known[place].name


@dataclass(frozen=True)
class Pruning:
    """The checkpoints to keep and to delete: names, oldest first."""

    stay: tuple[str, ...]
    """Checkpoints that were verified and are good."""
    go: tuple[str, ...]
    damaged: dict[str, str]
    """The problems of checkpoints that cannot replace others, by name; they are left as they are."""


def prune(storage: Storage, spec: CheckpointSpec, *, dry_run: bool = False) -> Pruning:
    """Remove the checkpoints that are good and that the rules do not keep; nothing with `dry_run`.

    Only what the rules would keep is read. One that turns out to be damaged does not count, and the rules are asked
    again, so the newest good one always stays.
    """
    known, damaged = known_checkpoints(storage)
    good: set[str] = set()
    while unread := wanted(known, spec) - good:
        for name in unread:
            try:
                verify_checkpoint(storage, name)
                good.add(name)
            except PacelineError as problem:
                damaged[name] = str(problem)
        known = [one for one in known if one.name not in damaged]
    go = tuple(one.name for one in known if one.name not in good)
    if not dry_run:
        for name in go:
            storage.remove(name)
    return Pruning(tuple(one.name for one in known if one.name in good), go, dict(sorted(damaged.items())))
