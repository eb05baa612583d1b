"""A run that was killed goes on from its newest checkpoint, on any number of workers, under another strategy too; it
ends with the bits of a run that nobody disturbed, and no sample is repeated or lost. A checkpoint is complete or absent
at every moment."""

from __future__ import annotations

import itertools
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import paceline
from paceline.errors import CheckpointError
from tests.kit.waiting import wait_until
from tests.kit.workers import run_ranks
from tests.resume.training import (
    FIRST_SAVE,
    NUM_SAMPLES,
    NUM_STEPS,
    STEPS_PER_EPOCH,
    TIMEOUT_S,
    Kill,
    Moment,
    Undisturbed,
    first_steps,
    train,
)


@dataclass(frozen=True)
class Team:
    num_workers: int
    strategy: str = "dp"


def killed(folder: Path, attempt: int, team: Team, kill: Kill) -> int:
    """Train until somebody is killed; the step of the newest good checkpoint, after a look at all of them."""
    with pytest.raises(AssertionError, match=r"died without a word|Connection|PeerLost"):
        run_ranks(train, team.num_workers, folder, attempt, team.strategy, kill, timeout_s=TIMEOUT_S)
    (folder / "killed").unlink()
    try:
        checkpoints = paceline.checkpoint.verify(folder / "checkpoints")
    except CheckpointError:  # there is none
        return 0
    assert {one.state for one in checkpoints} <= {"good", "unfinished"}
    return max((one.step for one in checkpoints if one.state == "good"), default=0)


CHAINS: dict[str, tuple[list[tuple[Team, Kill]], Team]] = {
    "2, 1 and 3 workers": ([(Team(2), Kill("between steps", 4, 1)), (Team(1), Kill("in a step", 8, 0))], Team(3)),
    "in the first save and before a manifest": (
        [(Team(2), Kill("manifest", 1, None)), (Team(2, "fsdp"), Kill("manifest", 5, None))],
        Team(1),
    ),
    "while the state is copied and written": (
        [(Team(2, "fsdp"), Kill("worker-", 4, 1)), (Team(2), Kill("snapshot", 9, None))],
        Team(2, "fsdp"),
    ),
    "at the end of an epoch and in an evaluation": (
        [(Team(2), Kill("epoch's end", 4, None)), (Team(3), Kill("evaluation", 8, 0))],
        Team(2),
    ),
}


@pytest.mark.budget(processor_s=10)
@pytest.mark.parametrize("name", CHAINS)
def test_a_run_that_is_killed_twice_ends_with_the_bits_of_an_undisturbed_one(
    tmp_path: Path, undisturbed: Undisturbed, name: str
) -> None:
    kills, last = CHAINS[name]
    begins = [killed(tmp_path, attempt, team, kill) for attempt, (team, kill) in enumerate(kills)]
    outcomes = run_ranks(train, last.num_workers, tmp_path, len(kills), last.strategy, timeout_s=TIMEOUT_S)
    assert first_steps(tmp_path) == [0, *begins]
    undisturbed.assert_equal(outcomes, tmp_path)


MOMENTS: list[Moment] = ["in a step", "between steps", "epoch's end", "evaluation", "snapshot", "worker-", "manifest"]


@pytest.mark.nightly
@pytest.mark.budget(processor_s=10)
@pytest.mark.parametrize(("moment", "strategy", "victim"), list(itertools.product(MOMENTS, ["dp", "fsdp"], [None, 0])))
def test_a_run_killed_at_any_moment_goes_on_exactly(
    tmp_path: Path, undisturbed: Undisturbed, moment: Moment, strategy: str, victim: int | None
) -> None:
    begin = killed(tmp_path, 0, Team(2, strategy), Kill(moment, 8, victim))
    assert begin >= FIRST_SAVE
    outcomes = run_ranks(train, 1, tmp_path, 1, timeout_s=TIMEOUT_S)
    assert first_steps(tmp_path) == [0, begin]
    undisturbed.assert_equal(outcomes, tmp_path)


@pytest.mark.nightly
@pytest.mark.budget(processor_s=300)
def test_twenty_kills_at_random_times_leave_the_bits_as_they_are(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Each run is killed up to twice, by a clock, and goes on with as many workers as are drawn, 1 to 3."""
    draw = random.Random(20)
    began = time.monotonic()
    run_ranks(train, 2, tmp_path, timeout_s=TIMEOUT_S)
    usual_s = time.monotonic() - began
    num_kills = 0
    for number in itertools.count():
        folder = tmp_path / f"run-{number}"
        folder.mkdir()
        for attempt in range(3):
            team = Team(draw.randint(1, 3), draw.choice(["dp", "fsdp"]))
            victim = draw.choice([None, *range(team.num_workers)])
            kill = Kill("a time", 0, victim, draw.uniform(0, usual_s)) if attempt < 2 else None
            try:
                outcomes = run_ranks(train, team.num_workers, folder, attempt, team.strategy, kill, timeout_s=TIMEOUT_S)
            except AssertionError:
                (folder / "killed").unlink()  # else it was not the kill
                num_kills += 1
            else:
                undisturbed.assert_equal(outcomes, folder)  # also of a run that ended before it was to be killed
                break
        if num_kills >= 20:
            return


def test_an_undisturbed_run_sees_each_sample_once_an_epoch(undisturbed: Undisturbed) -> None:
    """What the others are compared with."""
    assert sorted(undisturbed.samples) == list(range(NUM_STEPS))
    for begin in range(0, NUM_STEPS, STEPS_PER_EPOCH):
        steps = [undisturbed.samples[step] for step in range(begin, begin + STEPS_PER_EPOCH)]
        assert [len(numbers) for numbers in steps] == [12, 12, 12, 4]
        assert set().union(*steps) == set(range(NUM_SAMPLES))


def _lose_a_worker(folder: Path) -> None:
    """Rank 0 has all the time that it needs after rank 1 was killed."""
    has_ended = folder / "rank-0-has-ended"
    if os.environ["RANK"] == "0":
        try:
            train(folder)
        finally:
            has_ended.touch()
    elif os.fork() == 0:
        train(folder, kill=Kill("between steps", 2, 1))
        os._exit(1)
    else:
        wait_until(has_ended.exists)


def test_workers_that_are_left_save_what_they_have(tmp_path: Path) -> None:
    """Nothing else has been saved: the run is not that far."""
    with pytest.raises(AssertionError, match="rank 0"):
        run_ranks(_lose_a_worker, 2, tmp_path, timeout_s=TIMEOUT_S)
    (saved,) = paceline.checkpoint.verify(tmp_path / "checkpoints")
    assert (saved.step, saved.state) == (2, "good")
