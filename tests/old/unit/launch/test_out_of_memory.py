"""Kills for memory, counted in made-up trees of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.launch.out_of_memory import count_oom_kills

PID = 4321
EVENTS = "low 0\nhigh 0\nmax 12\noom 3\noom_kill {count}\noom_group_kill 7\n"
OOM_CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {count}\n"
VERSION_1 = "5:devices:/\n4:memory:{path}\n3:cpu,cpuacct:/elsewhere\n1:name=systemd:/\n0::/\n"


class Tree:
    """/proc and /sys/fs/cgroup in a folder."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"

    def member(self, text: str) -> None:
        (self.proc / str(PID)).mkdir(parents=True, exist_ok=True)
        (self.proc / str(PID) / "cgroup").write_text(text)

    def file(self, path: str, text: str) -> None:
        (self.cgroups / path).parent.mkdir(parents=True, exist_ok=True)
        (self.cgroups / path).write_text(text)

    def count(self) -> int | None:
        return count_oom_kills(PID, self.proc, self.cgroups)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.mark.parametrize("count", [0, 2, 31])
def test_version_2(tree: Tree, count: int) -> None:
    tree.member("0::/user.slice/job_7\n")
    tree.file("user.slice/job_7/memory.events", EVENTS.format(count=count))
    assert tree.count() == count


@pytest.mark.parametrize("count", [0, 2, 31])
def test_version_1(tree: Tree, count: int) -> None:
    tree.member(VERSION_1.format(path="/slurm/job_7"))
    tree.file("memory/slurm/job_7/memory.oom_control", OOM_CONTROL.format(count=count))
    tree.file("elsewhere/memory.events", EVENTS.format(count=99))
    assert tree.count() == count


def test_both_versions_at_once(tree: Tree) -> None:
    tree.member("4:memory:/job\n0::/job\n")
    tree.file("unified/job/memory.events", EVENTS.format(count=5))
    assert tree.count() == 5
    tree.file("memory/job/memory.oom_control", OOM_CONTROL.format(count=1))  # who has the controller knows
    assert tree.count() == 1


def test_the_root_of_version_1(tree: Tree) -> None:
    tree.member(VERSION_1.format(path="/"))
    tree.file("memory/memory.oom_control", OOM_CONTROL.format(count=4))
    assert tree.count() == 4


def test_a_group_that_is_gone_by_name_and_one_with_a_colon(tree: Tree) -> None:
    tree.member("0::/job (deleted)\n")
    tree.file("job/memory.events", EVENTS.format(count=1))
    assert tree.count() == 1
    tree.member("0::/pod:7\n")
    tree.file("pod:7/memory.events", EVENTS.format(count=2))
    assert tree.count() == 2


def test_nobody_counts(tree: Tree) -> None:
    assert tree.count() is None  # no such process
    tree.member("")
    assert tree.count() is None
    tree.member("0::/\n")  # the root of version 2 has no events
    assert tree.count() is None
    tree.member(VERSION_1.format(path="/old"))  # a kernel before 4.13 has no such line
    tree.file("memory/old/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\n")
    assert tree.count() is None


def test_this_process_can_be_asked_about() -> None:
    count = count_oom_kills(os.getpid())
    assert count is None or count >= 0
