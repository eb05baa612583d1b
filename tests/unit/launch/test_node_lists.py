"""Nodes are named on the command line, or by Slurm: each is understood, or its entry is named with what
is wrong."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import env
from paceline.errors import LaunchError
from paceline.hardware.detect import describe_node
from paceline.launch import agent, ray
from paceline.launch.command_lines import parse_node_list
from paceline.launch.run import Transport
from paceline.launch.slurm import allocation
from paceline.workflows import where

SLURM_LISTS: dict[str, list[str]] = json.loads(
    (Path(__file__).parents[2] / "data" / "slurm_node_lists.json").read_text()
)


def test_names_counts_users_and_addresses_are_understood() -> None:
    found = parse_node_list("a:8, kim@b.example:4,10.0.0.7,[fd00::3]:2")
    assert list(found.items()) == [("a", 8), ("kim@b.example", 4), ("10.0.0.7", None), ("fd00::3", 2)]


@pytest.mark.parametrize(
    "entry",
    [
        "a:0",
        "a:eight",
        "a:\u0663",
        "a:",
        "a:-1",
        "a:8:8",
        "a 8",
        "a slots=8",
        "-oProxyCommand=x",
        "a;reboot",
        "@a",
        "-x@a",
        "fd00::3",
        "[fd00::3",
        "[fd00::3]x",
        "",
    ],
)
def test_an_invalid_entry_is_named_with_its_number_and_what_is_right(entry: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse_node_list(f"gpu1,{entry}")
    told = str(caught.value)
    assert f"entry 2: {entry!r}" in told
    assert all(form in told for form in ("kim@gpu1:8", "[fd00::3]:8", "~/.ssh/config"))


@pytest.mark.parametrize("text", ["a,b,a", "gpu1:2,kim@GPU1:2", "a,A"])
def test_a_node_that_is_named_twice_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="before"):
        parse_node_list(text)


@given(st.text(max_size=40) | st.text("ab:[]@=,.-#1 \tslot", max_size=30))
def test_any_text_is_nodes_or_one_sentence(text: str) -> None:
    try:
        nodes = parse_node_list(text)
    except LaunchError as error:
        assert "\n" not in str(error)
    else:
        assert nodes
        assert not any(address.startswith("-") or set(address) & set(" ;$`'\"\\|&<>\n") for address in nodes)


@pytest.mark.parametrize("text", SLURM_LISTS)
def test_workers_of_srun_meet_on_the_first_node_of_slurms_list(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "MASTER_", "PACELINE_", "OMPI_", "RANK", "WORLD_SIZE")):
            monkeypatch.delenv(name)
    several = len(SLURM_LISTS[text])
    variables = {"PROCID": 1, "STEP_NUM_TASKS": 2 * several, "LOCALID": 1, "STEP_TASKS_PER_NODE": f"2(x{several})"}
    variables |= {"NODEID": 0, "STEP_NODELIST": text, "STEP_NUM_NODES": max(2, several), "JOB_ID": 7, "STEP_ID": 0}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    address = env.worker_facts().init_method.removeprefix("tcp://").rpartition(":")[0]
    assert address == SLURM_LISTS[text][0]


def scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of this name that knows the recorded lists."""
    cases = "\n".join(f"'{text}') printf '%s\\n' {' '.join(names)};;" for text, names in SLURM_LISTS.items())
    path = folder / "scontrol"
    path.write_text(f'#!/bin/sh\n[ "$1 $2" = "show hostnames" ] || exit 3\ncase "$3" in\n{cases}\n*) exit 2;;\nesac\n')
    path.chmod(0o700)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


@pytest.mark.parametrize("text", SLURM_LISTS)
def test_an_allocation_has_the_nodes_that_scontrol_names(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol(tmp_path, monkeypatch)
    found = allocation({"SLURM_JOB_NODELIST": text, "SLURM_GPUS_ON_NODE": "2"})
    assert list(found) == SLURM_LISTS[text]


@pytest.mark.parametrize(
    ("variables", "counts"),
    [
        ({"SLURM_TASKS_PER_NODE": "2(x2),1,3"}, [2, 2, 1, 3]),
        ({"SLURM_TASKS_PER_NODE": "4(x4)"}, [4, 4, 4, 4]),
        ({"SLURM_TASKS_PER_NODE": "1(x4)", "SLURM_GPUS_ON_NODE": "8"}, [8, 8, 8, 8]),
        ({"SLURM_GPUS_PER_NODE": "h100:4", "SLURM_GPUS_ON_NODE": "8"}, [4, 4, 4, 4]),
        ({}, [1, 1, 1, 1]),
        ({"SLURM_TASKS_PER_NODE": "2(x2)"}, None),
        ({"SLURM_TASKS_PER_NODE": "many"}, None),
    ],
)
def test_a_node_has_as_many_workers_as_gpus_else_as_tasks(
    variables: dict[str, str], counts: list[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol(tmp_path, monkeypatch)
    given = {"SLURM_JOB_NODELIST": "gpu[03-05,9]", **variables}
    if counts is None:
        with pytest.raises(LaunchError, match="SLURM_TASKS_PER_NODE"):
            allocation(given)
    else:
        assert list(allocation(given).values()) == counts


@pytest.mark.parametrize(("interface", "endpoint"), [("ib9,ib1", "10.1.0.1:7"), ("eth0", "10.0.0.1:7")])
def test_agents_meet_at_an_address_of_one_of_the_interfaces_that_are_named(interface: str, endpoint: str) -> None:
    told = describe_node() | {"addresses": [("eth0", "10.0.0.1"), ("ib1", "10.1.0.1")], "port": 7}
    answering = Transport(("gpu1",), lambda _program, _environ: [sys.executable, "-c", f"print({json.dumps(told)!r})"])
    assert where._ask({"gpu1": None}, {"gpu1": answering}, interface)[1] == endpoint
    with pytest.raises(LaunchError, match="gpu1 has no network interface eth9"):
        where._ask({"gpu1": None}, {"gpu1": answering}, "eth9")


def test_a_worker_that_has_just_ended_does_not_end_the_line_to_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []

    def kill(pid: int, number: int) -> None:
        if number == signal.SIGUSR1:
            raise ProcessLookupError
        killed.append((pid, number))

    monkeypatch.setattr(multiprocessing, "active_children", lambda: [SimpleNamespace(pid=1)])
    monkeypatch.setattr(os, "kill", kill)
    line, launcher = os.pipe()
    os.write(launcher, b"USR1\n")
    os.close(launcher)
    agent._obey(line)
    assert killed == [(os.getpid(), signal.SIGKILL)]


def test_an_agent_on_a_node_that_ray_chooses_has_no_name_of_the_launchers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.7")
    monkeypatch.setenv("MASTER_PORT", "1")
    (tmp_path / "requests").touch()
    told = "import os, sys; open('told', 'w').write(os.environ.get('PACELINE_NODE', 'none') + ' ' + sys.argv[1])"
    program = ["env", f"{env.NODE}=elsewhere", sys.executable, "-c", told, ray.FIRST_NODE]
    ray._start_agent({"program": program, "cwd": str(tmp_path), "requests": str(tmp_path / "requests")})
    assert (tmp_path / "told").read_text() == "none 10.0.0.7:20001"
