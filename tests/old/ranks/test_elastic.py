"""A run that loses workers goes on with what is left, from what it saved, and says so."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.launch.fleet import Fleet
from paceline.launch.remote_team import NodeAccess, RemoteTeam, open_nodes
from paceline.spec import Cluster, Node
from paceline.spec.codec import from_mapping
from tests.old.ranks.launching import (
    COUNT_TO_THE_END,
    COUNTING_WITHOUT_TORCH,
    GENERATION,
    PATIENCE_S,
    TO_THE_END,
    Stage,
    open_stage,
    processes_of,
    wait_until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

START_S = 90.0
"""For several processes to load torch on a busy machine."""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with open_stage(tmp_path) as stage:
        yield stage


COUNTS = COUNTING_WITHOUT_TORCH + TO_THE_END


def launch(stage: Stage, body: str, *options: str) -> subprocess.Popen[str]:
    return stage.paceline("launch", "--out", str(stage.run_dir), *options, stage.script(body))


def generations(stage: Stage) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((stage.run_dir / "elastic.json").read_text())["generations"]
    return found


def await_training(stage: Stage, generation: int, world_size: int) -> None:
    names = [f"begun.{generation}.{rank}" for rank in range(world_size)]
    stage.await_marks(*names, timeout_s=START_S)
    assert {(stage.folder / name).read_text() for name in names} == {str(world_size)}


def hit(stage: Stage, generation: int, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(int((stage.folder / f"{generation}-{rank}.pid").read_text()), number)


def said_in_the_end(stage: Stage, launcher: subprocess.Popen[str]) -> list[str]:
    """The launcher's own lines about a run that is now let to its end, where every step was counted exactly once."""
    (stage.folder / "finish").touch()
    out, err = launcher.communicate(timeout=START_S)
    assert launcher.returncode == 0, out + err
    (counted,) = (line.split() for line in out.splitlines() if line.startswith("counted"))
    assert float(counted[2]) == 12 * int(counted[1])
    return [line for line in err.splitlines() if line.startswith("paceline: ")]


def left(stage: Stage) -> list[str]:
    """Command lines of all processes that were started for the run in this folder, the fork server too."""
    found = []
    for process in processes_of(stage.run_dir):
        with contextlib.suppress(OSError):  # it has ended since
            found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def test_two_workers_are_killed_in_turn(stage: Stage) -> None:
    launcher = launch(stage, COUNT_TO_THE_END, "-n", "3", "--min-workers", "2")
    await_training(stage, 0, 3)
    launcher.send_signal(signal.SIGUSR1)
    stage.await_marks(*(f"asked-to-save.{rank}" for rank in range(3)))
    hit(stage, 0, 2)
    await_training(stage, 1, 3)
    hit(stage, 1, 0)
    await_training(stage, 2, 3)
    lines = said_in_the_end(stage, launcher)
    assert [line.partition(" at step ")[0] for line in lines] == [
        "paceline: worker 2 was killed",
        "paceline: worker 0 was killed",
    ]
    assert lines[1].endswith("; going on with 3 workers from the last checkpoint (restart 2)")
    first, second, third = generations(stage)
    assert [one["world_size"] for one in (first, second, third)] == [3, 3, 3]
    assert (first["why"], third["why"]) == (lines[0].removeprefix("paceline: ").partition(";")[0], "done")
    assert first["step"] > 0
    assert third["step"] >= max(1, (first["step"] - 1) // 10 * 10)  # it saves every ten steps, and may die before that
    assert first["recovery_s"] > 0 and second["recovery_s"] > 0 and third["recovery_s"] is None
    reports = [json.loads((stage.run_dir / f"failure-{n}.json").read_text()) for n in (1, 2)]
    assert [(report["cause"], report["ranks"]) for report in reports] == [("signal", [2]), ("signal", [0])]
    assert not (stage.run_dir / "failure.json").exists()
    log = (stage.run_dir / "logs" / "rank2.log").read_text().splitlines()
    assert log == [f"--- restart {n}: rank 2 begins here ---" for n in (1, 2)]
    assert left(stage) == []


def test_a_worker_that_was_stopped_is_replaced(stage: Stage) -> None:
    launcher = launch(stage, COUNTS, "-n", "2", "--min-workers", "1", "--no-standby", "--hang-timeout", "2")
    await_training(stage, 0, 2)
    hit(stage, 0, 1, signal.SIGSTOP)
    await_training(stage, 1, 2)
    (line,) = said_in_the_end(stage, launcher)
    assert line.startswith("paceline: worker 1 was stopped at step ")
    assert left(stage) == []


FAILS_IN_ITS_THIRD_PLACE = (
    GENERATION
    + """
for number in range(5):
    heartbeat.step(number)
tell(f"begun.{GENERATION}.{RANK}", str(WORLD_SIZE))
for rank in range(WORLD_SIZE):
    await_mark(f"begun.{GENERATION}.{rank}")
if RANK == 2:
    os.kill(os.getpid(), signal.SIGKILL)
await_mark("finish")
"""
)
"""Counts and saves nothing, so that no generation gets further than the first."""


def test_a_place_that_fails_again_and_again_is_left_out(stage: Stage) -> None:
    launcher = launch(stage, FAILS_IN_ITS_THIRD_PLACE, "-n", "3", "--min-workers", "2", "--no-standby")
    await_training(stage, 2, 2)
    (stage.folder / "finish").touch()
    out, err = launcher.communicate(timeout=START_S)
    assert launcher.returncode == 0, out + err
    lines = err.splitlines()
    assert [line.partition("going on with ")[2].partition(" from")[0] for line in lines] == ["3 workers", "2 workers"]


def test_a_place_that_is_needed_is_tried_as_often_as_allowed(stage: Stage) -> None:
    limits = ("--min-workers", "3", "--max-restarts", "2")
    launcher = launch(stage, FAILS_IN_ITS_THIRD_PLACE, "-n", "3", *limits, "--no-standby")
    out, err = launcher.communicate(timeout=START_S)
    assert launcher.returncode == 128 + signal.SIGKILL, out + err
    assert "Rank 2 of 3" in err and "was killed by SIGKILL" in err
    assert "The run was started again 2 times without getting beyond step 4." in err
    assert f"The report: {stage.run_dir}/failure.txt" in err
    assert len(generations(stage)) == 3
    assert left(stage) == []


SAVES_WHEN_THE_OTHER_IS_GONE = (
    GENERATION
    + """
heartbeat.step(0)
heartbeat.step(1)
tell(f"begun.{GENERATION}.{RANK}", str(WORLD_SIZE))
for rank in range(WORLD_SIZE):
    await_mark(f"begun.{GENERATION}.{rank}")
if GENERATION == 0 and RANK == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if GENERATION == 0:
    heartbeat.save()
    time.sleep(1.5)
    tell("saved")
    sys.exit(1)
"""
)


def test_those_who_are_left_have_the_time_to_save(stage: Stage) -> None:
    launcher = launch(stage, SAVES_WHEN_THE_OTHER_IS_GONE, "-n", "2", "--min-workers", "1", "--no-standby")
    out, err = launcher.communicate(timeout=START_S)
    assert launcher.returncode == 0, out + err
    assert (stage.folder / "saved").exists()
    assert (
        err == "paceline: worker 1 was killed at step 1; going on with 2 workers from the last checkpoint (restart 1)\n"
    )


def test_an_exception_of_every_worker_is_the_programs_fault(stage: Stage) -> None:
    launcher = launch(
        stage,
        COUNTING_WITHOUT_TORCH + "raise ValueError('no such label: 11')",
        "-n",
        "2",
        "--min-workers",
        "1",
        "--no-standby",
    )
    out, err = launcher.communicate(timeout=START_S)
    assert launcher.returncode == 1, out + err
    assert "failed with ValueError: no such label: 11" in err and "going on" not in err
    assert len(generations(stage)) == 1


def test_an_exception_of_one_worker_is_not(stage: Stage) -> None:
    body = (
        "if RANK == 1 and not (STAGE / 'begun.0.1').exists():\n    tell('begun.0.1')\n    raise OSError('a bad disk')\n"
    )
    launcher = launch(stage, body + COUNTS, "-n", "2", "--min-workers", "1", "--no-standby")
    await_training(stage, 1, 2)
    (line,) = said_in_the_end(stage, launcher)
    assert line.startswith("paceline: worker 1 raised an error (OSError: a bad disk) before the first step; ")


def test_the_users_mistake_keeps_its_sentence(stage: Stage) -> None:
    body = "from paceline.errors import DataError\nraise DataError('train.bin is cut short.')"
    launcher = launch(stage, body, "-n", "2", "--min-workers", "1", "--no-standby")
    out, err = launcher.communicate(timeout=START_S)
    assert (launcher.returncode, err) == (2, "paceline: train.bin is cut short.\n"), out + err


@pytest.mark.parametrize("moment", ["training", "restarting"])
def test_the_launcher_is_asked_to_end(stage: Stage, moment: str) -> None:
    launcher = launch(stage, COUNTS, "-n", "2", "--min-workers", "1", "--no-standby")
    await_training(stage, 0, 2)
    if moment == "restarting":
        hit(stage, 0, 1)
        wait_until(lambda: len(generations(stage)) == 2)
    launcher.terminate()
    assert launcher.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert left(stage) == []
    if moment == "training":
        stage.await_marks("saved.0")  # there was time for it
    assert generations(stage)[-1]["why"] == "ended by SIGTERM"
    assert not list(stage.folder.glob("paceline-*"))


def test_nothing_is_left_of_a_launcher_that_is_killed(stage: Stage) -> None:
    launcher = launch(stage, COUNTS, "-n", "2", "--min-workers", "1")
    await_training(stage, 0, 2)
    wait_until(lambda: any("fork_server" in line for line in left(stage)), START_S)
    launcher.kill()
    wait_until(lambda: left(stage) == [], 5.0)


def test_an_agent_that_ended_is_reached_again(stage: Stage) -> None:
    def describe(team: RemoteTeam) -> Node:
        return replace(from_mapping(Node, team.hello.node), hostname=team.hostname, is_remote=True)

    reaches = [NodeAccess(hostname, lambda program: program) for hostname in "ab"]
    with open_nodes(reaches) as teams:
        nodes = tuple(map(describe, teams))
        with contextlib.closing(Fleet(Cluster(nodes), teams, describe)) as fleet:
            os.kill(teams[0].hello.pid, signal.SIGKILL)
            assert fleet.lose_unusable(["b"], PATIENCE_S) == ["a"]
            assert fleet.lose_unusable([], 0.0) == []
            assert [node.hostname for node in fleet.cluster.nodes] == ["b"]
            wait_until(lambda: fleet.has_returned)
            assert not fleet.awaits_first_retry
            assert fleet.take_back() == ["a"]
            assert [node.hostname for node in fleet.cluster.nodes] == ["a", "b"]
            assert sorted(team.hostname for team in fleet.teams) == ["a", "b"]
            assert fleet.lose_unusable(["b"], 0.0) == ["b"]  # and the end comes before it is back


def test_a_node_that_is_gone_for_good_is_tried_until_the_end(stage: Stage) -> None:
    attempts = stage.folder / "attempts"
    agent = [sys.executable, "-m", "paceline", "agent"]
    once = (
        f"if [ -e {attempts} ]; then echo again >> {attempts}; exit 1; fi; touch {attempts}; exec {shlex.join(agent)}"
    )
    with open_nodes([NodeAccess("a", lambda _program: ["sh", "-c", once])]) as teams:
        node = replace(from_mapping(Node, teams[0].hello.node), hostname="a", is_remote=True)
        with contextlib.closing(Fleet(Cluster((node,)), teams, lambda _team: node)) as fleet:
            fleet.lose("a")
            wait_until(lambda: not fleet.awaits_first_retry)
            assert attempts.read_text() == "again\n"
            assert (fleet.take_back(), fleet.has_returned, fleet.num_slots) == ([], False, 0)


SLOW_MODEL = """
import os, time
from torch import nn

class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.06 if os.environ["RANK"] == "2" else 0.01)  # as on a device that is shared with somebody
        return super().forward(x)

def build():
    return nn.Sequential(nn.Flatten(), Slow(28 * 28, 10))
"""


def test_a_worker_that_lastingly_holds_the_others_up_is_left_out(stage: Stage) -> None:
    (stage.folder / "slow_model.py").write_text(SLOW_MODEL)
    launcher = stage.paceline(
        *("train", "digits-lenet", "-n", "3", "--set", "model=slow_model:build", "--set", "epochs=6", "--quiet"),
        *("--min-workers", "2", "--exclude-slower", "2", "--out", str(stage.run_dir)),
    )
    out, err = launcher.communicate(timeout=2 * START_S)
    assert launcher.returncode == 0, out + err
    assert [one["world_size"] for one in generations(stage)] == [3, 2]
    assert "worker 2 left, for it held the others up" in err
    assert "on 2 x cpu" in out
