"""Which checkpoints stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from paceline.checkpoint.load import list_checkpoints, read_manifest, verify_checkpoint
from paceline.checkpoint.manifest import MANIFEST_FILE
from paceline.checkpoint.storage import Storage
from paceline.errors import PacelineError
from paceline.spec.job import CheckpointSpec


@dataclass(frozen=True)
class Known:
    """What the rules ask of a checkpoint."""

    name: str
    saved_at_s: float
    """Seconds since the epoch."""
    metrics: dict[str, float]


def wanted(known: Sequence[Known], spec: CheckpointSpec) -> set[str]:
    """The names of those that the rules keep.

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
    if spec.keep_best is not None:
        sign = -1.0 if "loss" in spec.keep_best else 1.0
        scored = [(sign * one.metrics[spec.keep_best], one.name) for one in known if spec.keep_best in one.metrics]
        if scored:
            keep.add(max(scored)[1])
    return keep


def prune(storage: Storage, spec: CheckpointSpec) -> list[str]:
    """Remove the checkpoints that the rules do not keep; return their names.

    Nothing is removed unless one that stays is read through and found good. Those without a readable manifest are
    neither counted nor removed.
    """
    known = []
    for name in list_checkpoints(storage):
        try:
            manifest = read_manifest(storage, name)
        except PacelineError:
            continue
        saved_at_s = datetime.fromisoformat(manifest.saved_at).timestamp()
        metrics = manifest.values.get("metrics") or {}
        known.append(Known(name, saved_at_s, metrics))
    keep = wanted(known, spec)
    expendable = [one.name for one in known if one.name not in keep]
    if not expendable or not _any_good(storage, sorted(keep, reverse=True)):
        return []
    for name in expendable:
        # Without its manifest it is no checkpoint any more, whatever happens next.
        storage.remove(f"{name}/{MANIFEST_FILE}")
        storage.remove(name)
    return expendable


def _any_good(storage: Storage, names: Sequence[str]) -> bool:
    for name in names:
        try:
            verify_checkpoint(storage, name)
        except PacelineError:
            continue
        return True
    return False
