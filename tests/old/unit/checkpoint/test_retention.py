"""Which checkpoints stay: laws of the rules, and that the newest good one is always among them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint import newest_good
from paceline.checkpoint.load import folder_name, list_checkpoints
from paceline.checkpoint.retention import KnownCheckpoint, best_of, prune, sort_out, wanted
from paceline.errors import CheckpointError
from paceline.spec.job import CheckpointSpec
from tests.old.unit.checkpoint.memory import Memory, write_checkpoint, write_manifest

_METRICS = st.dictionaries(st.sampled_from(["accuracy", "loss"]), st.floats(-5, 5), max_size=2)
_KNOWN = st.lists(st.tuples(st.integers(0, 40_000), _METRICS), max_size=12).map(
    lambda facts: [
        KnownCheckpoint(folder_name(step), float(at_s), metrics)
        for step, (at_s, metrics) in enumerate(sorted(facts, key=lambda fact: fact[0]))
    ]
)
_SPECS = st.builds(
    CheckpointSpec,
    keep_last=st.integers(1, 4),
    keep_every_hours=st.none() | st.floats(0.01, 10),
    keep_best=st.sampled_from([None, "accuracy", "loss"]),
)


@given(_KNOWN, _SPECS)
def test_laws_of_the_rules(known: list[KnownCheckpoint], spec: CheckpointSpec) -> None:
    keep = wanted(known, spec)
    names = [one.name for one in known]
    assert set(names[-spec.keep_last :]) <= keep <= set(names)
    assert wanted([one for one in known if one.name in keep], spec) == keep  # what was pruned once stays so
    if spec.keep_every_hours is None and spec.keep_best is None:
        assert len(keep) == min(len(known), spec.keep_last)
    if spec.keep_every_hours is not None:
        for one in known:  # no span of time is left without one
            span = one.saved_at_s // (spec.keep_every_hours * 3600)
            assert any(
                other.name in keep and other.saved_at_s // (spec.keep_every_hours * 3600) == span for other in known
            )
    scored = [one for one in known if spec.keep_best in one.metrics]
    if spec.keep_best is not None and scored:
        best = (min if spec.keep_best == "loss" else max)(one.metrics[spec.keep_best] for one in scored)
        assert any(one.metrics[spec.keep_best] == best for one in scored if one.name in keep)


def _break(storage: Memory, step: int, file: str = "worker-00001.safetensors") -> None:
    path = f"{folder_name(step)}/{file}"
    storage.files[path] = storage.files[path][:-1]


@settings(max_examples=30)
@given(st.lists(st.sampled_from(["good", "part", "manifest"]), max_size=6), st.integers(1, 3))
def test_the_newest_good_ones_stay(states: list[str], keep_last: int) -> None:
    storage = Memory()
    for step, state in enumerate(states):
        write_checkpoint(storage, step)
        if state != "good":
            _break(storage, step, "manifest.json" if state == "manifest" else "worker-00001.safetensors")
    good = [folder_name(step) for step, state in enumerate(states) if state == "good"]
    before = list_checkpoints(storage)
    pruning = prune(storage, CheckpointSpec(keep_last=keep_last))
    assert list(pruning.stay) == good[-keep_last:]
    assert list_checkpoints(storage) == [name for name in before if name not in pruning.go]
    assert all(name < pruning.stay[0] for name in pruning.go)  # nothing at all goes where none is good
    assert set(good[:-keep_last]) <= set(pruning.go)
    if good:
        found, _ = newest_good(storage)
        assert found is not None and found.name == good[-1]


def test_damaged_ones_that_are_old_enough_go_unread() -> None:
    storage = Memory()
    for step in range(5):
        write_checkpoint(storage, step)
    _break(storage, 0)
    _break(storage, 3)
    pruning = sort_out(storage, CheckpointSpec(keep_last=2))
    assert pruning.stay == (folder_name(2), folder_name(4))
    assert pruning.go == (folder_name(0), folder_name(1))
    assert list(pruning.damaged) == [folder_name(3)]
    assert len(list_checkpoints(storage)) == 5  # it was only asked


def test_those_that_are_trusted_are_read_only_if_the_newest_is_damaged() -> None:
    read: list[str] = []

    class Noting(Memory):
        def pieces(self, name: str) -> Iterator[bytes]:
            read.append(name.split("/")[0])
            return super().pieces(name)

    storage = Noting()
    for step in range(3):
        write_checkpoint(storage, step)
    trusted = [folder_name(0), folder_name(1)]
    spec = CheckpointSpec(keep_last=3)
    assert len(sort_out(storage, spec, trusted).stay) == 3
    assert set(read) == {folder_name(2)}
    read.clear()
    _break(storage, 2)
    assert sort_out(storage, spec, trusted).stay == tuple(trusted)
    assert set(read) == {folder_name(2), folder_name(1)}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_metric_that_is_no_number_is_no_best(value: float) -> None:
    storage = Memory()
    write_checkpoint(storage, 1, {"loss": 0.5})
    manifest = write_checkpoint(storage, 2)
    write_manifest(storage, 2, manifest, values={**manifest.values, "metrics": {"loss": {"number": repr(value)}}})
    write_checkpoint(storage, 3)
    assert sort_out(storage, CheckpointSpec(keep_last=1, keep_best="loss")).stay == (folder_name(1), folder_name(3))


def test_nothing_good_nothing_removed() -> None:
    storage = Memory()
    for step in range(4):
        write_checkpoint(storage, step)
        _break(storage, step)
    assert prune(storage, CheckpointSpec(keep_last=1)).go == ()
    with pytest.raises(
        CheckpointError, match="None of the 4 checkpoints in memory can be used; the newest, step-00000003"
    ):
        newest_good(storage)


def test_the_best_of_equals_is_the_oldest_and_no_number_is_none() -> None:
    values = [math.nan, 0.5, 0.7, 0.7, math.inf]
    known = [KnownCheckpoint(f"step-{number}", float(number), {"f1": value}) for number, value in enumerate(values)]
    assert best_of(known, CheckpointSpec(keep_best="f1")) == "step-2"
    assert best_of(known, CheckpointSpec(keep_best="f1", best_mode="min")) == "step-1"
    assert best_of(known[:1], CheckpointSpec(keep_best="f1")) is None
    assert best_of(known, CheckpointSpec(keep_best="other")) is None
