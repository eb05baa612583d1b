"""Where a command's workers run: on this node, or on nodes reached by one of the launchers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from paceline import env
from paceline.errors import LaunchError
from paceline.hardware import detect
from paceline.launch import run_workers, worker_commands
from paceline.launch.commands import Rendezvous, rendezvous_on_one_node
from paceline.launch.contained import contained
from paceline.launch.elastic import ElasticLimits, run_elastic
from paceline.launch.fleet import Describe, Fleet
from paceline.launch.hosts import HostSlots, parse_hosts, read_hosts_file
from paceline.launch.messages import Hello
from paceline.launch.ray import ray_argv, ray_nodes
from paceline.launch.remote_team import NodeAccess, RemoteTeam, open_nodes
from paceline.launch.run_workers import HANG_TIMEOUT_S, SAVE_S, Conditions
from paceline.launch.slurm import allocation, srun_argv
from paceline.launch.ssh import explain_ssh_failure, ssh_argv
from paceline.launch.team import Output
from paceline.launch.worker import run_program
from paceline.plan import pick
from paceline.spec import Cluster, Device, Node, Plan
from paceline.spec.codec import from_mapping
from paceline.workflows.strategy import Strategy

PRELOAD = ("paceline.train.loop", "torch._dynamo")
"""What takes long to load and every training needs; torch loads the last when it wraps a model or an optimizer."""

LauncherName = Literal["auto", "local", "debug", "ssh", "slurm", "ray"]


@dataclass(frozen=True)
class Where:
    """What a command line says of where to run; every field is an option of each command that runs workers."""

    launcher: Annotated[
        LauncherName,
        typer.Option(
            help="How nodes are reached; slurm and ray: those of the allocation or cluster; debug: no process."
        ),
    ] = "auto"
    hosts: Annotated[str | None, typer.Option(metavar="a:8,b:8", help="Nodes and their workers.")] = None
    hosts_file: Annotated[Path | None, typer.Option(help="The same, a node a line: name slots=8.")] = None
    interface: Annotated[str | None, typer.Option(help="Network interface between nodes; found by trying.")] = None
    container: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Run in image.sif, docker://NAME@sha256:… or podman://NAME.")
    ] = None
    python: Annotated[
        str | None, typer.Option(metavar="PATH", help="The interpreter on other nodes; the same as here.")
    ] = None
    hang_timeout_s: Annotated[
        float, typer.Option("--hang-timeout", min=1.0, help="Seconds to wait for a silent worker or node.")
    ] = HANG_TIMEOUT_S


ANYWHERE = Where()
"""A command line that says nothing of it."""


@dataclass(frozen=True)
class Elastic:
    """What a command line says of going on after a failure; every field is an option of `train` and `launch`."""

    min_workers: Annotated[
        int | None, typer.Option(min=1, help="Go on after a failure, with so many workers at least.")
    ] = None
    max_workers: Annotated[int | None, typer.Option(min=1, help="Never more workers, when nodes come back.")] = None
    max_restarts: Annotated[
        int | None, typer.Option(min=0, help="Restarts in a row without progress; 3 with --min-workers.")
    ] = None
    exclude_slower: Annotated[
        float | None,
        typer.Option(
            min=1.0, metavar="X", help="Go on without a worker that lastingly takes X times as long as the others."
        ),
    ] = None
    standby: Annotated[
        bool, typer.Option(help="A process on every node that has torch loaded, for quick restarts.")
    ] = True

    def limits(self, num_workers: int) -> ElasticLimits | None:
        """For a run of so many workers; None where a failure is to end it.

        Raises:
            LaunchError: options that contradict each other.
        """
        if self.min_workers is None:
            given = (
                ("--max-workers", self.max_workers),
                ("--max-restarts", self.max_restarts),
                ("--exclude-slower", self.exclude_slower),
            )
            for option, value in given:
                if value is not None:
                    raise LaunchError(f"{option} goes with --min-workers: with how few workers may the run go on?")
            return None
        most = min(num_workers, self.max_workers or num_workers)
        if self.min_workers > most:
            raise LaunchError(f"--min-workers {self.min_workers} is more than the {most} workers of this run.")
        return ElasticLimits(self.min_workers, most, 3 if self.max_restarts is None else self.max_restarts)


RIGID = Elastic()
"""A command line that says nothing of it."""


def says_where(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the fields of `Where`, `Elastic` and `Strategy` as options in place of parameters of these types.

    The command-line library reads the options of a command from its signature.
    """
    signature = inspect.signature(command, eval_str=True)
    groups = {
        name: (parameter.annotation, inspect.signature(parameter.annotation, eval_str=True).parameters)
        for name, parameter in signature.parameters.items()
        if parameter.annotation in (Where, Elastic, Strategy)
    }

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        together = {
            name: kind(**{field: values.pop(field) for field in fields}) for name, (kind, fields) in groups.items()
        }
        command(**together, **values)

    parameters = (
        groups[name][1].values() if name in groups else [parameter] for name, parameter in signature.parameters.items()
    )
    flat = [parameter.replace(kind=parameter.KEYWORD_ONLY) for group in parameters for parameter in group]
    with_options.__signature__ = signature.replace(parameters=flat)  # type: ignore[attr-defined]
    return with_options


@dataclass(frozen=True)
class Allocation:
    """The nodes of a command and the way to run workers on them."""

    where: Where
    cluster: Cluster
    teams: Sequence[RemoteTeam] = ()
    image: str = ""
    """The container and its digest; empty without one."""
    describe: Describe | None = None
    """What a node that was lost is when it is back."""

    def run(
        self,
        plan: Plan,
        program: Sequence[str],
        *,
        run_dir: Path,
        output: Output = "rank0",
        environ: Mapping[str, str] | None = None,
        save_s: float | None = None,
    ) -> None:
        """Run `program` in every worker of `plan`; the rest, and what it raises, is as for `run_workers`."""
        if self.where.launcher == "debug":
            if plan.world_size != 1:
                raise LaunchError(f"--launcher debug runs one worker in this process, not {plan.world_size}; add -n 1.")
            run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            run_program(program)
            return
        run_workers(
            plan,
            program,
            run_dir=run_dir,
            nodes=self.teams,
            interface=self.where.interface,
            output=output,
            hang_timeout_s=self.where.hang_timeout_s,
            environ={**env.container_note(self.image), **(environ or {})},
            save_s=save_s,
        )

    def run_elastic(
        self,
        limits: ElasticLimits,
        plan_for: Callable[[Cluster, int], Plan],
        program_for: Callable[[Plan], Sequence[str]],
        *,
        run_dir: Path,
        output: Output = "rank0",
        environ: Mapping[str, str] | None = None,
        standby: bool = True,
    ) -> None:
        """Run a program through failures; the arguments, and what it raises, are as for `run_elastic`."""
        if self.where.launcher == "debug":
            raise LaunchError(
                "--launcher debug runs in this process, which cannot outlive a failure; leave --min-workers out."
            )
        cluster = with_room(self.cluster, plan_for(self.cluster, limits.max_workers))
        conditions = Conditions(
            run_dir,
            interface=self.where.interface,
            output=output,
            save_s=SAVE_S,
            hang_timeout_s=self.where.hang_timeout_s,
            environ={**env.container_note(self.image), **(environ or {})},
            preload=PRELOAD if standby else (),
        )
        with contextlib.closing(Fleet(cluster, self.teams, self.describe)) as fleet:
            run_elastic(fleet, limits, plan_for, program_for, conditions)


@contextlib.contextmanager
def open_allocation(where: Where, run_dir: Path | None = None) -> Iterator[Allocation]:
    """The nodes that are meant; agents on other nodes live as long as the block.

    Args:
        run_dir: what containers see beside the working directory.

    Raises:
        LaunchError: options that contradict each other, or nodes that cannot be reached or differ in versions.
    """
    slots = named_hosts(where)
    where = dataclasses.replace(where, launcher=settled(where.launcher, slots))
    if where.launcher == "debug" or (where.launcher == "local" and where.container is None):
        yield Allocation(where, detect())
        return
    given = given_nodes(where.launcher)
    # Ray says how many GPUs a node has; where it says nothing, the node has none.
    gpus = {host.host: host.num_workers or 0 for host in given} if where.launcher == "ray" else {}
    slots = slots or given
    reaches = [reach(where, host.host, gpus.get(host.host, 0)) for host in slots]
    image = ""
    if where.container is not None:
        python = where.python or "python3"
        binds = [] if run_dir is None else [run_dir.absolute()]
        reaches, digest = contained(reaches, where.container, cwd=Path.cwd(), binds=binds, python=python)
        image = f"{where.container} {digest}"
    by_name = {host.host: host for host in slots}

    def describe(hostname: str, hello: Hello) -> Node:
        node = dataclasses.replace(from_mapping(Node, hello.node), hostname=hostname, is_remote=True)
        return shared_out(node, by_name[hostname])

    with open_nodes(reaches) as (teams, hellos):
        nodes = tuple(describe(team.hostname, hello) for team, hello in zip(teams, hellos, strict=True))
        yield Allocation(where, Cluster(nodes), teams, image, describe)


def allocation_on_paper(where: Where) -> Allocation:
    """The same without a connection to anybody: other nodes are taken to be like this one."""
    slots = named_hosts(where)
    where = dataclasses.replace(where, launcher=settled(where.launcher, slots))
    here = detect()
    return Allocation(where, Cluster(tuple(_on_paper(here.nodes[0], host) for host in slots)) if slots else here)


def named_hosts(where: Where) -> tuple[HostSlots, ...]:
    if where.hosts is not None and where.hosts_file is not None:
        raise LaunchError("--hosts and --hosts-file name nodes twice; give one of them.")
    if where.hosts is not None:
        return parse_hosts(where.hosts)
    return () if where.hosts_file is None else read_hosts_file(where.hosts_file)


def settled(launcher: LauncherName, slots: Sequence[HostSlots]) -> LauncherName:
    """The launcher that "auto" means."""
    if launcher == "auto":
        return "ssh" if slots else "local"
    if launcher in ("local", "debug") and slots:
        raise LaunchError(f"--launcher {launcher} runs on this node alone; leave --hosts out.")
    if launcher == "ssh" and not slots:
        raise LaunchError("--launcher ssh needs nodes; name them with --hosts a:8,b:8 or --hosts-file.")
    return launcher


def given_nodes(launcher: LauncherName) -> tuple[HostSlots, ...]:
    """The nodes that a scheduler has given this command; this one where there is no scheduler."""
    if launcher == "slurm":
        return allocation(env.everything())
    return ray_nodes() if launcher == "ray" else (HostSlots(socket.gethostname()),)


def reach(where: Where, node: str, num_gpus: int = 0) -> NodeAccess:
    """How the launcher runs a program on a node, in this working directory; only Ray asks how many GPUs it needs."""
    cwd, environ = Path.cwd(), env.passed_on()
    python = where.python or sys.executable
    match where.launcher:
        case "slurm":
            return NodeAccess(node, lambda program: srun_argv(node, program, cwd=cwd, environ=environ), python=python)
        case "ray":
            return NodeAccess(
                node,
                lambda program: ray_argv(node, program, cwd=cwd, environ=environ, num_gpus=num_gpus),
                python=python,
            )
        case "ssh":
            return NodeAccess(
                node,
                lambda program: ssh_argv(node, program, cwd=cwd, environ=environ),
                lambda exit_code, stderr: explain_ssh_failure(exit_code, stderr, node),
                python,
            )
        case _:
            return NodeAccess(node, lambda program: program, python=python)


def shared_out(node: Node, slots: HostSlots) -> Node:
    """The node with as many devices as the user gave it workers.

    Raises:
        LaunchError: more than it has GPUs. CPU workers may outnumber cores.
    """
    count = slots.num_workers
    if count is None or count == len(node.devices):
        return node
    if node.device_kind == "cuda":
        free = [device.index for device in node.devices if not device.busy]
        if count > len(free):
            raise LaunchError(f"{node.hostname} has {len(free)} free GPUs, not {count}; see paceline topo there.")
        chosen = pick(node, count, free).devices
        return dataclasses.replace(node, devices=tuple(device for device in node.devices if device.index in chosen))
    devices = tuple(Device("cpu", i, node.cpu_name, node.memory_bytes // count) for i in range(count))
    return dataclasses.replace(node, devices=devices)


def with_room(cluster: Cluster, plan: Plan) -> Cluster:
    """The cluster with a device for every worker of the plan: on CPU they may outnumber cores."""
    counts = {share.hostname: share.num_workers for share in plan.placements}
    nodes = []
    for node in cluster.nodes:
        count = counts.get(node.hostname if node.is_remote else "", 0)
        is_full = node.device_kind == "cpu" and count > len(node.devices)
        nodes.append(shared_out(node, HostSlots(node.hostname, count)) if is_full else node)
    return dataclasses.replace(cluster, nodes=tuple(nodes))


def _on_paper(here: Node, slots: HostSlots) -> Node:
    count = slots.num_workers or len(here.devices)
    one = here.devices[0]
    devices = tuple(Device(one.kind, index, one.name, one.memory_bytes) for index in range(count))
    return dataclasses.replace(here, hostname=slots.host, is_remote=True, devices=devices, links=())


def dry_run(
    plan: Plan, program: Sequence[str], run_dir: Path, where: Where, environ: Mapping[str, str] | None = None
) -> str:
    """The commands of every worker as a person would type them; starts nothing and connects to nobody."""
    lines = [f"# {plan.world_size} workers, launcher {where.launcher}, backend {plan.backend}"]
    if first := plan.placements[0].hostname:
        place = f"tcp://ADDRESS_OF_{first}:PORT_BOUND_THERE"
        rendezvous = Rendezvous(place, tuple(where.interface or "INTERFACE_THAT_REACHES_IT" for _ in plan.nodes))
    else:
        rendezvous = rendezvous_on_one_node(Path("NEW_FOLDER"))
    commands = worker_commands(plan, program, run_dir=run_dir, rendezvous=rendezvous, launched_at=0.0, environ=environ)
    for number, share in enumerate(plan.placements):
        if share.hostname:
            way = reach(where, share.hostname)
            lines += ["", f"# node {share.hostname}: {shlex.join(way.argv([way.python, '-m', 'paceline', 'agent']))}"]
        for command in (command for command in commands if command.node == number):
            variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(command.variables.items()))
            argv = [where.python or command.argv[0], *command.argv[1:]]
            lines += [f"# rank {command.rank}", f"{variables} {shlex.join(argv)}"]
    return "\n".join(lines)
