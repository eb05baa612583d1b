"""A run takes the newest good checkpoint of its folder, says which newer ones it cannot use, and refuses to mix two
jobs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.kit.workers import run_ranks
from tests.resume.training import (
    TIMEOUT_S,
    Outcome,
    Undisturbed,
    checkpoints_in,
    first_steps,
    flip_a_bit,
    samples_seen,
    train,
)


def go_on(folder: Path, num_workers: int = 1, **options: Any) -> list[Outcome]:
    return run_ranks(partial(train, **options), num_workers, folder, 1, timeout_s=TIMEOUT_S)


def halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped bit": (flip_a_bit, "worker-00001"),
    "half of the manifest": (halve, "manifest.json"),
    "a missing file": (Path.unlink, "worker-00000"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_the_checkpoint_before_a_damaged_one_is_taken_and_said(
    stopped: Path, undisturbed: Undisturbed, name: str
) -> None:
    damage, file = DAMAGES[name]
    before, newest = checkpoints_in(stopped)
    (path,) = newest.glob(f"{file}*")
    damage(path)
    outcomes = go_on(stopped)
    assert first_steps(stopped) == [0, int(before.name[5:])]
    undisturbed.assert_equal(outcomes, stopped)
    said = outcomes[0].said
    assert newest.name in said and file in said, said


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_whole_run_is_the_same_as_one_in_two_parts(stopped: Path, undisturbed: Undisturbed, num_workers: int) -> None:
    outcomes = go_on(stopped, num_workers)
    assert first_steps(stopped) == [0, 7]
    undisturbed.assert_equal(outcomes, stopped)


def test_a_run_of_another_job_is_refused_unless_forced(stopped: Path, undisturbed: Undisturbed) -> None:
    with pytest.raises(AssertionError, match=r"JobError.*clip_norm was 1\.0 and is 0\.001"):
        go_on(stopped, clip_norm=0.001)
    assert first_steps(stopped) == [0]
    outcomes = go_on(stopped, clip_norm=0.001, force=True)
    assert first_steps(stopped) == [0, 7]
    assert samples_seen(stopped) == undisturbed.samples
    assert outcomes[0].weights_sha256 != undisturbed.outcome.weights_sha256


def test_a_checkpoint_that_cannot_be_written_costs_this_checkpoint_alone(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000003").write_text("not a folder")
    outcomes = run_ranks(train, 2, tmp_path, timeout_s=TIMEOUT_S)
    undisturbed.assert_equal(outcomes, tmp_path)
    assert outcomes[0].said.count("could not be written") == 1 and "step 3 " in outcomes[0].said, outcomes[0].said
    assert (tmp_path / "checkpoints" / "step-00000012" / "manifest.json").exists()
