"""Retention rules: which checkpoints are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.checkpoint.load import read_manifest, sort_folders, verify_checkpoint
from paceline.checkpoint.manifest import MANIFEST_FILE, Manifest
from paceline.checkpoint.storage import Storage
from paceline.errors import PacelineError
from paceline.spec.evaluation import best_place
from paceline.spec.job import CheckpointSpec


@dataclass(frozen=True)
class KnownCheckpoint:
    """The facts about a checkpoint that the retention rules use."""

    name: str
    saved_at_s: float
    """Seconds since the epoch."""
    metrics: dict[str, float]
    files: tuple[str, ...] = ()


def facts_of(name: str, manifest: Manifest) -> KnownCheckpoint:
    return KnownCheckpoint(name, manifest.saved_at_s, manifest.metrics, tuple(file.name for file in manifest.files))


def known_checkpoints(storage: Storage) -> tuple[list[KnownCheckpoint], dict[str, str]]:
    """What the manifests in a storage say, oldest first, and the problems of those that are damaged, by name."""
    known, damaged = [], {}
    for name in sort_folders(storage)[0]:
        try:
            known.append(facts_of(name, read_manifest(storage, name)))
        except PacelineError as problem:
            damaged[name] = str(problem)
    return known, damaged


def wanted(known: Sequence[KnownCheckpoint], spec: CheckpointSpec) -> set[str]:
    """The names of the checkpoints that the rules keep.

    The last `keep_last`; of every span of `keep_every_hours` hours the first; the best by `keep_best`.

    Args:
        known: oldest first.
    """
    keep = {one.name for one in known[-spec.keep_last :]}
    if spec.keep_every_hours is not None:
        spans: dict[int, str] = {}
        for one in known:
            spans.setdefault(int(one.saved_at_s // (spec.keep_every_hours * 3600)), one.name)
        keep |= set(spans.values())
    best = best_of(known, spec)
    return keep if best is None else keep | {best}


def best_of(known: Sequence[KnownCheckpoint], spec: CheckpointSpec) -> str | None:
    """The name of the best by `keep_best`, of equals the oldest: later ones have other weights, not evaluated yet.

    Args:
        known: oldest first.
    """
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


def sort_out(storage: Storage, spec: CheckpointSpec) -> Pruning:
    """Apply the retention rules to the checkpoints that are good; nothing is removed yet.

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
    keep = wanted(known, spec)
    return Pruning(
        stay=tuple(one.name for one in known if one.name in keep),
        go=tuple(one.name for one in known if one.name not in keep),
        damaged=dict(sorted(damaged.items())),
    )


def prune(storage: Storage, spec: CheckpointSpec) -> Pruning:
    """Remove the checkpoints that the rules do not keep; see `sort_out`."""
    pruning = sort_out(storage, spec)
    for name in pruning.go:
        discard(storage, name)
    return pruning


def discard(storage: Storage, name: str) -> None:
    """Remove a checkpoint, finished or not."""
    # Without its manifest it is no checkpoint any more, whatever happens next.
    storage.remove(f"{name}/{MANIFEST_FILE}")
    storage.remove(name)
