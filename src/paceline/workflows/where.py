"""Where workers run: on this node, on nodes reached over SSH, or on those of a Slurm allocation or a Ray cluster."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from paceline import env
from paceline.errors import LaunchError, file_problems
from paceline.files import lock_folder, make_run_folder
from paceline.hardware import detect
from paceline.hardware.detect import versions
from paceline.launch.command_lines import container_argv, parse_node_list, srun_argv, ssh_argv, with_variables
from paceline.launch.ray import FIRST_NODE, ray_argv, ray_nodes
from paceline.launch.run import LaunchOptions, Transport, agent_commands, run_workers
from paceline.launch.slurm import allocation as slurm_allocation
from paceline.plan.placement import pick
from paceline.spec import Cluster, Device, Node, Plan
from paceline.spec.codec import Bounds, check_values, from_mapping

DESCRIBE_S = 60.0
"""Timeout for a node's first answer: login, start of a container and an interpreter, hardware detection."""


@dataclass(frozen=True)
class Where:
    """Where workers run; the default is this node. Example: `Where(hosts="gpu1:8,gpu2:8")`.

    The fields are options of the command line too; the text below each is its help.
    """

    launcher: Literal["slurm", "ray"] | None = None
    """Start workers on the Slurm allocation or Ray cluster; None: on this node, or over SSH on those that are named."""
    hosts: str | None = None
    """Nodes and the number of workers on each, such as "gpu1:8,gpu2:8"."""
    interface: str | None = None
    """Network interface that nodes use between each other, or several as "a,b"; None: found automatically."""
    container: str | None = None
    """Run in image.sif, docker://NAME@sha256:… or podman://NAME."""
    python: str | None = None
    """The Python interpreter that workers run in; None: the same path as here."""
    hang_timeout_s: Annotated[float, Bounds(low=1)] | None = None
    """Seconds that workers of a run may wait for another one; None: 60, and before the first step as long as torch."""

    def __post_init__(self) -> None:
        check_values(self)
        self.named_hosts()  # a mistake in them is told before anything begins

    @property
    def started_by(self) -> Literal["local", "ssh", "slurm", "ray"]:
        return self.launcher or ("local" if self.hosts is None else "ssh")

    def named_hosts(self) -> dict[str, int | None]:
        """The nodes that are named, and their workers. Raises `LaunchError` for an invalid name, or the same twice."""
        return {} if self.hosts is None else parse_node_list(self.hosts)


HERE = Where()


@dataclass(frozen=True)
class Allocation:
    """The nodes of a command and the way to run workers on them."""

    where: Where
    cluster: Cluster
    transports: Callable[[Plan], Sequence[Transport]]
    """How the agents of a plan's nodes are started."""
    endpoint: str = "127.0.0.1:0"
    """Address and port on the first node where the agents meet."""

    def run(self, plan: Plan, program: Sequence[str], options: LaunchOptions) -> None:
        """Run `program` in every worker of `plan`; what it raises is as for `run_workers`."""
        run_workers(plan, program, self._with_variables(options), self.transports(plan), self.endpoint)

    def commands(self, plan: Plan, program: Sequence[str], options: LaunchOptions) -> str:
        """The commands that `run` would start, as text for a shell; starts nothing and opens no connection."""
        lines = [f"# {plan.world_size} workers, launcher {self.where.started_by}, backend {plan.backend}"]
        options, transports = self._with_variables(options), self.transports(plan)
        commands = agent_commands(plan, program, options, transports, self.endpoint)
        for transport, argv in zip(transports, commands, strict=True):
            lines += [f"# {', '.join(transport.hostnames) or 'this node'}", shlex.join(argv)]
        return "\n".join(lines)

    def _with_variables(self, options: LaunchOptions) -> LaunchOptions:
        """The options with the variables by which workers know `where`."""
        where = self.where
        environ = env.variable(env.CONTAINER, where.container) | env.variable(env.HANG_TIMEOUT, where.hang_timeout_s)
        if where.interface:
            environ |= dict.fromkeys(env.INTERFACE_VARIABLES, where.interface)
        return replace(options, environ=environ | dict(options.environ))


@contextlib.contextmanager
def open_allocation(
    where: Where, run_dir: Path, script: Path | None = None, *, on_paper: bool = False
) -> Iterator[Allocation]:
    """Find the nodes that `where` names, and keep other runs from the folder until the block ends.

    Args:
        run_dir: the run's folder, which containers see besides the working directory.
        script: a file whose folder containers see too.
        on_paper: connect to no node and touch no folder: other nodes are assumed equal to this one.

    Raises:
        LaunchError: another run uses the folder, or nodes that cannot be reached or differ in versions.
    """
    visible = [path.absolute() for path in (run_dir, script and script.parent) if path is not None]
    with contextlib.ExitStack() as held:
        if not on_paper:
            problem = f"The run folder {run_dir} cannot be used"
            with file_problems(problem, LaunchError, "name another one with out = DIR"):
                make_run_folder(run_dir)
                held.enter_context(lock_folder(run_dir))
        yield _allocation(where, visible, on_paper)


def _allocation(where: Where, visible: Sequence[Path], on_paper: bool) -> Allocation:
    here, slots, started_by = detect(), where.named_hosts(), where.started_by
    transport = partial(_transport, where, visible=visible, gpus=started_by == "ssh" or here.device_kind == "cuda")
    if started_by == "local":
        here_alone = transport([], lambda program, environ, **_: with_variables(program, environ))
        return Allocation(where, here, lambda _plan: [here_alone])
    if started_by == "ssh":
        by_name = {address: transport([address], partial(ssh_argv, address)) for address in slots}
        endpoint = f"{next(iter(slots))}:PORT"
        cluster, endpoint = (_like(here, slots), endpoint) if on_paper else _ask(slots, by_name, where.interface)
        return Allocation(where, cluster, lambda plan: [by_name[node.hostname] for node in plan.nodes], endpoint)
    is_slurm = started_by == "slurm"
    slots = slots or (slurm_allocation(os.environ) if is_slurm else ray_nodes())

    def at_once(plan: Plan) -> Sequence[Transport]:
        counts, names = {node.num_workers for node in plan.nodes}, [node.hostname for node in plan.nodes]
        if len(counts) > 1:
            raise LaunchError(f"{started_by} starts as many workers on each node; ask for a multiple.")
        num_gpus = max(counts) if plan.device_kind == "cuda" else 0
        to_all = partial(srun_argv, names) if is_slurm else partial(ray_argv, len(names), num_gpus=num_gpus)
        return [transport(names, to_all)]

    port = 20000 + zlib.crc32((env.text("SLURM_JOB_ID") or "0").encode()) % 12000
    return Allocation(where, _like(here, slots), at_once, f"{next(iter(slots))}:{port}" if is_slurm else FIRST_NODE)


def _transport(
    where: Where, hostnames: Sequence[str], carry: Callable[..., Sequence[str]], visible: Sequence[Path], gpus: bool
) -> Transport:
    """How a program is started by the command that `carry` makes of it, in the container if there is one, which sees
    the folders `visible` and the node's `gpus`."""
    cwd = Path.cwd()

    def argv(program: Sequence[str], environ: Mapping[str, str]) -> Sequence[str]:
        passed = env.variable(env.DEVICE, env.text(env.DEVICE)) | dict(environ)
        if where.container is None:  # in one, folders of this node mean nothing
            passed = env.variable("PYTHONPATH", env.text("PYTHONPATH")) | passed if hostnames else dict(environ)
            return carry(program, cwd=cwd, environ=passed)
        inside = container_argv(program, where.container, cwd=cwd, binds=visible, gpus=gpus, environ=passed)
        return carry(inside, cwd=cwd, environ={})

    return Transport(tuple(hostnames), argv, where.python or ("python3" if where.container else sys.executable))


def over_ssh(address: str) -> Transport:
    """How a program is started on a node, outside of a container."""
    return _transport(HERE, [address], partial(ssh_argv, address), [], gpus=False)


def _like(here: Cluster, slots: Mapping[str, int | None]) -> Cluster:
    """Nodes of so many workers, assumed equal to this one."""
    node, one = here.nodes[0], here.devices[0]
    nodes = []
    for address, num_workers in slots.items():
        count = num_workers or len(node.devices)
        devices = tuple(Device(one.kind, index, one.name, one.memory_bytes) for index in range(count))
        nodes.append(replace(node, hostname=address, is_remote=True, devices=devices, links=()))
    return Cluster(tuple(nodes))


def _ask(slots: Mapping[str, int | None], via: Mapping[str, Transport], interface: str | None) -> tuple[Cluster, str]:
    """The hardware of all nodes, and the address of the first at which agents meet: that of its name if it has it, else
    the interface's, else its first. Raises `LaunchError` or `ClusterError` for a node that cannot be used."""
    from concurrent.futures import ThreadPoolExecutor

    program = (next(iter(via.values())).python, "-m", "paceline.hardware")
    with ThreadPoolExecutor(max_workers=len(slots)) as pool:
        printed = pool.map(lambda address: via[address].output_of(program, DESCRIBE_S), slots)
        told = [json.loads(text.splitlines()[-1]) for text in printed]  # a shell may greet before
    nodes, own = [], versions()
    for (address, num_workers), one in zip(slots.items(), told, strict=True):
        if one["versions"] != own:
            theirs, mine = (", ".join(map(" ".join, each.items())) for each in (one["versions"], own))
            raise LaunchError(f"{address} has {theirs}, and this machine {mine}; install the same there.")
        node = replace(from_mapping(Node, one["node"]), hostname=address, is_remote=True)
        nodes.append(_with_num_workers(node, num_workers or len(node.devices)))
    name, wanted = next(iter(slots)), interface and interface.split(",")
    addresses = [address for one, address in told[0]["addresses"] if not wanted or one in wanted]
    if not addresses:
        raise LaunchError(f"{name} has no network interface {interface or ''} with an address that others could reach.")
    with contextlib.suppress(OSError):
        named = {entry[4][0] for entry in socket.getaddrinfo(name.rpartition("@")[2], None)}
        addresses = [address for address in addresses if address in named] or addresses
    address = f"[{addresses[0]}]" if ":" in addresses[0] else addresses[0]
    return Cluster(tuple(nodes)), f"{address}:{told[0]['port']}"


def _with_num_workers(node: Node, count: int) -> Node:
    """The node with as many devices as it is to have workers, the best connected free ones; CPU workers may outnumber
    cores."""
    if count == len(node.devices):
        return node
    if node.device_kind == "cpu":
        return node.with_cpu_workers(count)
    chosen = pick(node, count, [device.index for device in node.devices if not device.busy]).ring.devices
    return replace(node, devices=tuple(device for device in node.devices if device.index in chosen))
