"""Which checkpoints stay: the last ones, the first of every span of hours and the best, by laws of the rules; and
the newest good one is always among them, for only what was read and found good counts."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline.checkpoint.format import KnownCheckpoint, best_of, wanted
from paceline.errors import CheckpointError, JobError
from paceline.spec.job import CheckpointSpec
from tests.unit.checkpoint.saving import train

METRICS = st.dictionaries(st.sampled_from(["accuracy", "loss"]), st.floats(-5, 5), max_size=2)
KNOWN = st.lists(st.tuples(st.integers(0, 40_000), METRICS), max_size=12).map(
    lambda facts: [
        KnownCheckpoint(f"step-{step:08d}", float(saved_at_s), metrics)
        for step, (saved_at_s, metrics) in enumerate(sorted(facts, key=lambda fact: fact[0]))
    ]
)
RULES = st.builds(
    CheckpointSpec,
    keep_last=st.integers(1, 4),
    keep_every_hours=st.none() | st.floats(0.01, 10),
    keep_best=st.sampled_from([None, "accuracy", "loss"]),
)


@given(KNOWN, RULES)
def test_the_rules_keep_the_last_one_of_every_span_and_the_best(
    known: list[KnownCheckpoint], rules: CheckpointSpec
) -> None:
    keep, names = wanted(known, rules), [one.name for one in known]
    assert set(names[-rules.keep_last :]) <= keep <= set(names)
    assert wanted([one for one in known if one.name in keep], rules) == keep  # what was pruned once stays so
    allowed = set(names[-rules.keep_last :])
    if rules.keep_every_hours is not None:
        spans: dict[int, str] = {}
        for one in known:
            spans.setdefault(int(one.saved_at_s // (rules.keep_every_hours * 3600)), one.name)
        assert set(spans.values()) <= keep
        allowed |= set(spans.values())
    scored = [one for one in known if rules.keep_best in one.metrics]
    if scored and rules.keep_best is not None:
        choose = min if rules.keep_best == "loss" else max
        best = choose(one.metrics[rules.keep_best] for one in scored)
        first = next(one.name for one in scored if one.metrics[rules.keep_best] == best)
        assert first in keep
        allowed.add(first)
    assert keep == allowed


def test_the_best_of_equals_is_the_oldest_and_what_is_no_number_is_never_the_best() -> None:
    values = [math.nan, 0.5, 0.7, 0.7, math.inf]
    known = [KnownCheckpoint(f"step-{number}", float(number), {"f1": value}) for number, value in enumerate(values)]
    assert best_of(known, CheckpointSpec(keep_best="f1")) == "step-2"
    assert best_of(known, CheckpointSpec(keep_best="f1", best_mode="min")) == "step-1"
    assert best_of(known[:1], CheckpointSpec(keep_best="f1")) is None
    assert best_of(known, CheckpointSpec(keep_best="other")) is None


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of steps 1 to 6; that of step 2 has the smallest loss."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    losses = {1: 0.5, 2: 0.25, 3: 0.5, 4: 0.75, 5: 0.25, 6: 1.0}
    train(folder, 6, losses=losses, saves=range(9), keep_last=99)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def spoil(folder: Path, step: int, file: str = "worker-00000*") -> None:
    (path,) = (folder / f"step-{step:08d}").glob(file)
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "spoiled", "kept"),
    [
        (2, None, [], [5, 6]),
        (1, None, [], [6]),
        (9, None, [], [1, 2, 3, 4, 5, 6]),
        (1, "loss", [], [2, 6]),
        (2, None, [6], [4, 5, 6]),  # a damaged one is left, and does not count
        (1, None, [6, 5], [4, 5, 6]),
        (1, "loss", [2], [2, 5, 6]),
        (2, None, [1], [5, 6]),  # damaged and old enough
        (1, None, [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]),  # nothing goes where nothing is good
    ],
)
def test_pruning_keeps_what_the_rules_say_of_those_that_are_good(
    folder: Path, keep_last: int, keep_best: str | None, spoiled: list[int], kept: list[int]
) -> None:
    for step in spoiled:
        spoil(folder, step)
    asked = paceline.checkpoint.prune(folder, keep_last=keep_last, keep_best=keep_best, dry_run=True)
    assert steps_in(folder) == [1, 2, 3, 4, 5, 6]
    pruned = paceline.checkpoint.prune(folder, keep_last=keep_last, keep_best=keep_best)
    assert pruned == asked
    assert steps_in(folder) == kept
    good = [step for step in range(1, 7) if step not in spoiled]
    assert [int(name[5:]) for name in pruned.stay] == [step for step in kept if step in good]
    if good:
        assert train(folder, 6).first_step == good[-1]


def test_a_damaged_manifest_counts_for_nothing(folder: Path) -> None:
    spoil(folder, 6, "manifest.json")
    pruned = paceline.checkpoint.prune(folder, keep_last=1)
    assert steps_in(folder) == [5, 6]
    assert list(pruned.damaged) == ["step-00000006"]


def test_pruning_by_a_metric_that_no_checkpoint_has_is_refused(folder: Path) -> None:
    with pytest.raises(JobError, match=r"los.*loss"):
        paceline.checkpoint.prune(folder, keep_best="los")
    with pytest.raises(JobError, match="keep_last"):
        paceline.checkpoint.prune(folder, keep_last=0)
    with pytest.raises(CheckpointError, match="nowhere"):
        paceline.checkpoint.prune(folder / "nowhere")
    assert steps_in(folder) == [1, 2, 3, 4, 5, 6]


def test_a_run_prunes_as_it_saves_and_names_the_latest_and_the_best(tmp_path: Path) -> None:
    losses = {1: 0.5, 2: 0.25, 3: 0.5, 4: 0.75}
    train(tmp_path, 4, losses=losses, saves=range(9), keep_last=1, keep_best="loss")
    assert steps_in(tmp_path) == [2, 4]
    assert (tmp_path / "latest").read_text() == "step-00000004\n"
    assert (tmp_path / "best").read_text() == "step-00000002\n"


def test_spans_of_hours_keep_the_first_of_each(folder: Path) -> None:
    """All were saved within one: the first of them stays, beside the last."""
    paceline.checkpoint.prune(folder, keep_last=1, keep_every_hours=10_000_000)
    assert steps_in(folder) == [1, 6]
