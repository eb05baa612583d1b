"""What the options of a command line mean; nobody is connected to."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline import env
from paceline.errors import LaunchError
from paceline.launch.elastic import ElasticLimits
from paceline.launch.forking import ForkServer
from paceline.launch.node_list import NodeSlots
from paceline.launch.team import LaunchOptions
from paceline.plan.placement import spread
from paceline.spec import Cluster, Device, Node, NodePlacement, Plan
from paceline.spec.cluster import DeviceKind
from paceline.workflows import allocation
from paceline.workflows.allocation import allocation_on_paper, with_num_workers, with_room
from paceline.workflows.dry_run import dry_run
from paceline.workflows.launchers import chosen_launcher, node_access
from paceline.workflows.where import Elastic, LauncherName, Where

SLOTS = (NodeSlots("a", 2), NodeSlots("b", 2))
PROGRAM = ("train.py", "--name", "two words")


def node(kind: DeviceKind = "cpu", num_devices: int = 4, hostname: str = "here") -> Node:
    devices = tuple(Device(kind, i, "a device", 2**30) for i in range(num_devices))
    return Node(hostname, 8, 2**33, "a cpu", devices)


def test_more_workers_than_the_named_hosts_have_are_refused() -> None:
    allocation = allocation_on_paper(Where(hosts="a:1"))
    for least in (None, 1):
        with pytest.raises(LaunchError, match="3 workers are more than the 1 of hosts; give a node more of them"):
            allocation.first_plan(3, Elastic(min_workers=least), spread)
    assert allocation.first_plan(1, Elastic(), spread).world_size == 1
    assert allocation_on_paper(Where(hosts="a,b:1")).first_plan(3, Elastic(), spread).world_size == 3


def test_hosts_are_named_once(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a slots=2\nb\n")
    assert Where().named_hosts() == ()
    assert Where(hosts="a:2,b:2").named_hosts() == SLOTS
    assert Where(hosts_file=path).named_hosts() == (NodeSlots("a", 2), NodeSlots("b"))
    with pytest.raises(LaunchError, match=r"hosts = .* and hosts_file = .* both name nodes"):
        Where(hosts="a:2", hosts_file=path).named_hosts()
    with pytest.raises(LaunchError, match="entry 1"):
        Where(hosts="").named_hosts()  # an empty list is a mistake, not this node


@pytest.mark.parametrize(
    ("launcher", "slots", "meant"),
    [
        ("auto", (), "local"),
        ("auto", SLOTS, "ssh"),
        ("local", (), "local"),
        ("debug", (), "debug"),
        ("ssh", SLOTS, "ssh"),
        ("slurm", (), "slurm"),
        ("slurm", SLOTS, "slurm"),
        ("ray", (), "ray"),
    ],
)
def test_the_launcher_that_is_meant(launcher: LauncherName, slots: tuple[NodeSlots, ...], meant: str) -> None:
    assert chosen_launcher(launcher, slots) == meant


@pytest.mark.parametrize(
    ("launcher", "slots", "words"),
    [
        ("local", SLOTS, "launcher = 'local' runs on this node alone; leave hosts out"),
        ("debug", SLOTS, "launcher = 'debug' runs on this node alone; leave hosts out"),
        ("ssh", (), "launcher = 'ssh' needs nodes: hosts"),
    ],
)
def test_options_that_contradict_each_other(launcher: LauncherName, slots: tuple[NodeSlots, ...], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        chosen_launcher(launcher, slots)


def test_a_node_has_as_many_devices_as_it_was_given_workers() -> None:
    assert with_num_workers(node(), NodeSlots("here")) == node()
    assert with_num_workers(node(), NodeSlots("here", 4)) == node()
    more = with_num_workers(node(), NodeSlots("here", 8))  # CPU workers may outnumber cores and share the memory
    assert [device.index for device in more.devices] == list(range(8))
    assert {device.kind for device in more.devices} == {"cpu"}
    assert sum(device.memory_bytes for device in more.devices) <= more.memory_bytes
    assert len(with_num_workers(node(), NodeSlots("here", 1)).devices) == 1


def test_a_node_is_not_given_more_workers_than_gpus() -> None:
    assert [device.index for device in with_num_workers(node("cuda"), NodeSlots("here", 2)).devices] == [0, 1]
    with pytest.raises(LaunchError, match="here has 4 free GPUs, not 5; see paceline topo there"):
        with_num_workers(node("cuda"), NodeSlots("here", 5))


def test_every_launcher_runs_the_program_on_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(env.DATA_DIR, "/data sets")
    program = ["python", "-m", "a.module"]
    by_ssh = list(node_access(Where("ssh"), "kim@a").argv(program))
    assert by_ssh[0] == "ssh"
    assert by_ssh[by_ssh.index("--") + 1] == "kim@a"
    (line,) = by_ssh[by_ssh.index("--") + 2 :]
    assert shlex.split(line)[:4] == ["cd", "--", str(tmp_path), "&&"]
    assert shlex.split(line)[-3:] == program
    by_slurm = node_access(Where("slurm"), "a").argv(program)
    assert by_slurm[0] == "srun" and "--nodelist=a" in by_slurm and f"--chdir={tmp_path}" in by_slurm
    by_ray = list(node_access(Where("ray"), "a", 3).argv(program))
    assert by_ray[:3] == [sys.executable, "-m", "paceline.launch.ray"]
    assert by_ray[by_ray.index("--num-gpus") + 1] == "3" and by_ray[by_ray.index("--") + 1] == "a"
    for argv in (shlex.split(line), by_slurm, by_ray):
        assert list(argv[-3:]) == program
        assert f"{env.DATA_DIR}=/data sets" in argv


def test_where_a_node_has_another_python() -> None:
    launchers: tuple[LauncherName, ...] = ("ssh", "slurm", "ray", "local")
    assert {node_access(Where(launcher), "a").python for launcher in launchers} == {sys.executable}
    assert {node_access(Where(launcher, python="/opt/python"), "a").python for launcher in launchers} == {"/opt/python"}


def test_only_ssh_explains_why_it_failed() -> None:
    why = node_access(Where("ssh"), "kim@a").explain(255, "ssh: connect to host a port 22: Connection refused")
    assert why is not None and "kim@a" in why
    assert node_access(Where("slurm"), "a").explain(255, "Connection refused") is None


def ranks_of(text: str) -> dict[int, tuple[dict[str, str], list[str]]]:
    """The variables and the command of each rank, as a shell reads its line."""
    found = {}
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("# rank "):
            words = shlex.split(lines[number + 1])
            num_variables = next(i for i, word in enumerate(words) if "=" not in word)
            variables = dict(word.split("=", 1) for word in words[:num_variables])
            found[int(line.removeprefix("# rank "))] = (variables, words[num_variables:])
    return found


def test_a_dry_run_on_this_node_can_be_typed(tmp_path: Path) -> None:
    text = dry_run(Plan(world_size=3, threads_per_worker=2), PROGRAM, tmp_path / "a run", Where("local"))
    assert text.splitlines()[0] == "# 3 workers, launcher local, backend gloo"
    assert "ssh" not in text
    found = ranks_of(text)
    assert list(found) == [0, 1, 2]
    for rank, (variables, argv) in found.items():
        facts = env.worker_facts(variables)
        assert (facts.rank, facts.world_size, facts.local_rank) == (rank, 3, rank)
        assert facts.init_method.startswith("file://")
        assert (variables["OMP_NUM_THREADS"], variables["PACELINE_RUN_DIR"]) == ("2", str(tmp_path / "a run"))
        assert variables["GLOO_SOCKET_IFNAME"] == "lo"
        assert argv == [sys.executable, "-m", "paceline.launch.worker", *PROGRAM]
    assert list(tmp_path.iterdir()) == []  # nothing was touched


@pytest.mark.parametrize("launcher", ["ssh", "slurm", "ray"])
def test_a_dry_run_on_several_nodes_names_what_only_a_run_can_know(launcher: LauncherName, tmp_path: Path) -> None:
    shares = (NodePlacement("a", 2, devices=(3, 0)), NodePlacement("b", 1, devices=(5,)))
    plan = Plan(world_size=3, device_kind="cuda", nodes=shares)
    text = dry_run(plan, PROGRAM, tmp_path, Where(launcher))
    assert text.splitlines()[0] == f"# 3 workers, launcher {launcher}, backend nccl"
    assert [line.split()[2] for line in text.splitlines() if line.startswith("# node ")] == ["a:", "b:"]
    assert all("paceline agent" in line for line in text.splitlines() if line.startswith("# node "))
    found = ranks_of(text)
    assert [variables["CUDA_VISIBLE_DEVICES"] for variables, _ in found.values()] == ["3,0", "3,0", "5"]
    assert [variables["LOCAL_RANK"] for variables, _ in found.values()] == ["0", "1", "0"]
    assert {env.worker_facts(variables).init_method for variables, _ in found.values()} == {
        "tcp://ADDRESS_OF_a:PORT_BOUND_THERE"
    }
    assert {variables["NCCL_SOCKET_IFNAME"] for variables, _ in found.values()} == {"INTERFACE_THAT_REACHES_IT"}
    named = ranks_of(dry_run(plan, PROGRAM, tmp_path, Where(launcher, interface="ib0")))
    assert {variables["NCCL_SOCKET_IFNAME"] for variables, _ in named.values()} == {"ib0"}


def test_nodes_on_paper_are_like_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "detect", lambda: Cluster((node(),)))
    assert allocation_on_paper(Where()).cluster == Cluster((node(),))
    assert allocation_on_paper(Where()).where.launcher == "local"
    planned = allocation_on_paper(Where(hosts="a,kim@b:7"))
    assert planned.where.launcher == "ssh" and planned.teams == ()
    assert [(n.hostname, n.is_remote, len(n.devices)) for n in planned.cluster.nodes] == [
        ("a", True, 4),
        ("kim@b", True, 7),
    ]
    plan = spread(planned.cluster, 11)
    assert [(share.hostname, share.num_workers) for share in plan.nodes] == [("a", 4), ("kim@b", 7)]


def test_what_is_busy_here_is_not_busy_on_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    here = node("cuda")
    here = replace(here, devices=(replace(here.devices[0], busy="90 % busy"), *here.devices[1:]))
    monkeypatch.setattr(allocation, "detect", lambda: Cluster((here,)))
    plan = spread(allocation_on_paper(Where(hosts="a:2,b:2")).cluster, 4)
    assert [share.num_workers for share in plan.nodes] == [2, 2]


def test_how_far_a_run_may_shrink_and_grow() -> None:
    assert Elastic().limits(4) is None
    assert Elastic(min_workers=2).limits(4) == ElasticLimits(2, 4, 3)
    assert Elastic(min_workers=2, max_workers=3, max_restarts=0).limits(4) == ElasticLimits(2, 3, 0)
    assert Elastic(min_workers=2, max_workers=8).limits(4) == ElasticLimits(2, 4, 3)


def test_restarts_alone_mean_as_many_workers_as_before() -> None:
    assert Elastic(max_restarts=2).limits(4) == ElasticLimits(4, 4, 2)
    assert Elastic(max_restarts=0).limits(4) is None


@pytest.mark.parametrize(
    ("elastic", "words"),
    [
        (Elastic(max_workers=2), "max_workers = 2 needs min_workers"),
        (Elastic(exclude_slower=2.0), "exclude_slower = 2.0 needs min_workers"),
        (Elastic(min_workers=5), "min_workers = 5 is more than the 4 workers of this run"),
        (Elastic(min_workers=3, max_workers=2), "min_workers = 3 is more than the 2 workers of this run"),
    ],
)
def test_limits_that_cannot_be_meant(elastic: Elastic, words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        elastic.limits(4)


def test_cpu_workers_may_outnumber_the_cores_of_a_run_that_goes_on() -> None:
    cluster = Cluster((node(), replace(node(hostname="b"), is_remote=True)))
    plan = Plan(world_size=8, nodes=(NodePlacement("", 6), NodePlacement("b", 2)))
    assert [len(one.devices) for one in with_room(cluster, plan).nodes] == [6, 4]
    assert with_room(cluster, Plan(world_size=2)) == cluster


def test_one_worker_alone_can_be_debugged(tmp_path: Path) -> None:
    here = allocation.Allocation(Where("debug"), Cluster((node(),)))
    with pytest.raises(
        LaunchError, match="launcher = 'debug' runs one worker in this process, not 2; ask for 1 worker"
    ):
        here.run(Plan(world_size=2), PROGRAM, run_dir=tmp_path / "run")
    with pytest.raises(LaunchError, match="leave min_workers out"):
        here.run_job(1, Elastic(min_workers=1), spread, lambda _plan: PROGRAM, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("program", "num_workers", "has_more_runs", "is_forked"),
    [
        (("-m", "paceline.train"), 2, False, True),
        (("-m", "paceline.train"), 1, False, False),
        (("-m", "paceline.train"), 1, True, True),
        (PROGRAM, 2, True, False),
    ],
)
def test_workers_are_forked_where_that_loads_torch_less_often(
    program: tuple[str, ...],
    num_workers: int,
    has_more_runs: bool,
    is_forked: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once for all runs of a study, even if its first has one worker; never for a program of the user."""
    given: list[ForkServer | None] = []

    def note(
        _plan: Plan, _program: object, options: LaunchOptions, *, fork_server: ForkServer | None, **_: Any
    ) -> None:
        assert bool(options.preload) == is_forked  # for agents
        given.append(fork_server)

    monkeypatch.setattr(allocation, "run_workers", note)
    server = ForkServer(())
    here = allocation.Allocation(Where(), Cluster((node(),)), fork_server=server, has_more_runs=has_more_runs)
    here.run(Plan(world_size=num_workers), program, run_dir=tmp_path / "run")
    here.run(
        Plan(world_size=2 * num_workers, nodes=(NodePlacement("a", num_workers), NodePlacement("b", num_workers))),
        program,
        run_dir=tmp_path / "run",
    )
    assert given == [server if is_forked else None] * 2
