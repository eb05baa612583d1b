"""The nodes that workers run on: this one, or nodes reached by one of the launchers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import socket
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from paceline import env
from paceline.errors import LaunchError, file_problems
from paceline.folder_lock import hold_folder
from paceline.hardware import detect
from paceline.launch.command_lines import container_argv, srun_argv, ssh_argv
from paceline.launch.node_list import NodeSlots
from paceline.launch.ray import FIRST_NODE, ray_argv, ray_nodes
from paceline.launch.run import HERE, LaunchOptions, Output, Reach, agent_commands, run_workers
from paceline.launch.slurm import allocation as slurm_allocation
from paceline.measure.values import REQUEST_FILE
from paceline.plan import pick
from paceline.regular_files import make_run_folder
from paceline.spec import Cluster, Device, Node, Plan
from paceline.spec.codec import JsonValue, from_mapping
from paceline.words import number_of
from paceline.workflows.node import versions
from paceline.workflows.where import LauncherName, Where

DESCRIBE_S = 60.0
"""Timeout for a node's first answer: login, start of a container and an interpreter, hardware detection."""
_HERE_ONLY = ("local", "debug")


@dataclass(frozen=True)
class Allocation:
    """The nodes of a command and the way to run workers on them."""

    where: Where
    cluster: Cluster
    reaches: Callable[[Plan], Sequence[Reach]] = lambda _plan: (HERE,)
    """How the agents of a plan's nodes are started."""
    endpoint: str = "127.0.0.1:0"
    """Address and port on the first node where the agents meet."""

    @property
    def is_elsewhere(self) -> bool:
        return any(node.is_remote for node in self.cluster.nodes)

    def run(
        self,
        plan: Plan,
        program: Sequence[str],
        *,
        run_dir: Path,
        output: Output = "rank0",
        environ: Mapping[str, str] | None = None,
        max_restarts: int = 0,
        torchrun: Sequence[str] = (),
    ) -> None:
        """Run `program` in every worker of `plan`; the rest, and what it raises, is as for `run_workers`."""
        self._check_size(plan)
        if self.where.launcher == "debug":
            make_run_folder(run_dir)
            _run_here(program)
            return
        options = self._options(run_dir, output, environ, max_restarts, torchrun)
        run_workers(plan, program, options, self.reaches(plan), self.endpoint)

    def commands(
        self,
        plan: Plan,
        program: Sequence[str],
        *,
        run_dir: Path,
        environ: Mapping[str, str] | None = None,
        max_restarts: int = 0,
        torchrun: Sequence[str] = (),
    ) -> str:
        """The commands that `run` would start, as text for a shell; starts nothing and opens no connection."""
        self._check_size(plan)
        lines = [f"# {plan.world_size} workers, launcher {self.where.launcher}, backend {plan.backend}"]
        options = self._options(run_dir, "rank0", environ, max_restarts, torchrun)
        for command in agent_commands(plan, program, options, self.reaches(plan), self.endpoint):
            variables = (
                ""
                if command.reach.hostnames
                else " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(command.environ.items()))
            )
            lines += [
                f"# {', '.join(command.reach.hostnames) or 'this node'}",
                f"{variables} {shlex.join(command.argv)}",
            ]
        return "\n".join(line.strip() for line in lines)

    def measure(self, program: str, request: JsonValue, plan: Plan, folder: Path, environ: Mapping[str, str]) -> None:
        """Run a program of `paceline.measure` in every worker of `plan`.

        Each reads the request in `folder`, and leaves its results there.
        """
        there = folder.absolute()  # on another node the working directory may be another
        with file_problems(f"The folder {folder} cannot be used"):
            make_run_folder(folder)
            request.save(there / REQUEST_FILE)
        argv = ["-m", f"paceline.measure.{program}", str(there / REQUEST_FILE), str(there)]
        self.run(plan, argv, run_dir=folder, environ=environ)

    def _options(
        self,
        run_dir: Path,
        output: Output,
        environ: Mapping[str, str] | None,
        max_restarts: int,
        torchrun: Sequence[str],
    ) -> LaunchOptions:
        return LaunchOptions(
            run_dir,
            output=output,
            max_restarts=max_restarts,
            environ={
                **env.note(env.CONTAINER, self.where.container),
                **env.note(env.HANG_TIMEOUT, self.where.hang_timeout_s),
                **(dict.fromkeys(env.INTERFACE_VARIABLES, self.where.interface) if self.where.interface else {}),
                **(environ or {}),
            },
            torchrun=tuple(torchrun),
        )

    def _check_size(self, plan: Plan) -> None:
        counts = [node.num_workers for node in self.where.named_hosts()]
        given = sum(count or 0 for count in counts)
        if counts and None not in counts and plan.world_size > given:
            raise LaunchError(
                f"{number_of(plan.world_size, 'worker')} are more than the {given} of hosts; give a node more of them, "
                "or ask for fewer workers."
            )
        if self.where.launcher == "debug" and plan.world_size != 1:
            raise LaunchError(
                f"launcher = 'debug' runs one worker in this process, not {plan.world_size}; ask for 1 worker."
            )


@contextlib.contextmanager
def open_allocation(where: Where, run_dir: Path, script: Path | None = None) -> Iterator[Allocation]:
    """Find the nodes that `where` names, and keep other runs from the folder until the block ends.

    Args:
        run_dir: the run's folder, which containers see besides the working directory.
        script: a file whose folder containers see too.

    Raises:
        LaunchError: another run uses the folder, options that contradict each other, or nodes that cannot be reached
            or differ in versions.
    """
    slots, where = _chosen(where)
    shown = [path.absolute() for path in (run_dir, script and script.parent) if path is not None]
    with contextlib.ExitStack() as held:
        with file_problems(f"The run folder {run_dir} cannot be used", LaunchError, "name another one with out = DIR"):
            make_run_folder(run_dir)
            held.enter_context(hold_folder(run_dir))
        yield _found(where, slots, shown, on_paper=False)


def allocation_on_paper(where: Where, run_dir: Path) -> Allocation:
    """The allocation without a connection to any node: other nodes are assumed equal to this one.

    Raises:
        LaunchError: options that contradict each other, or Slurm has allocated nothing to this command.
    """
    slots, where = _chosen(where)
    return _found(where, slots, [run_dir.absolute()], on_paper=True)


def _chosen(where: Where) -> tuple[tuple[NodeSlots, ...], Where]:
    """The nodes that are named, and the launcher that is meant; options that it would ignore are refused."""
    slots, launcher = where.named_hosts(), where.launcher
    if launcher not in get_args(LauncherName):
        raise LaunchError(f"There is no launcher {launcher!r}; use one of {', '.join(get_args(LauncherName))}.")
    if launcher == "auto":
        launcher = "ssh" if slots else "local"
    if launcher in _HERE_ONLY and slots:
        raise LaunchError(f"launcher = {launcher!r} runs on this node alone; leave hosts out.")
    if launcher == "ssh" and not slots:
        raise LaunchError("launcher = 'ssh' needs nodes: hosts = 'a:8,b:8', or a hosts_file.")
    if launcher in _HERE_ONLY:
        inside = where.container is not None and launcher == "local"
        for name, value, is_used in (("interface", where.interface, False), ("python", where.python, inside)):
            if value is not None and not is_used:
                raise LaunchError(
                    f"{name} = {value!r} is for workers on other nodes, and all of these run on this one; leave it out."
                )
    return slots, replace(where, launcher=launcher)


def _found(where: Where, slots: Sequence[NodeSlots], shown: Sequence[Path], *, on_paper: bool) -> Allocation:
    cwd, here = Path.cwd(), detect()
    python = where.python or (sys.executable if where.container is None else "python3")
    has_gpus = here.device_kind == "cuda"

    def inside(
        program: Sequence[str], environ: Mapping[str, str], gpus: bool = True
    ) -> tuple[Sequence[str], dict[str, str]]:
        """The program, in the container if there is one, and the variables that it needs around it."""
        if where.container is None:
            return program, env.passed_on() | dict(environ)
        passed = {name: value for name, value in env.passed_on().items() if name != "PYTHONPATH"} | dict(environ)
        return container_argv(program, where.container, cwd=cwd, binds=shown, gpus=gpus, environ=passed), {}

    match where.launcher:
        case "ssh":
            return _over_ssh(where, slots, here, python, inside, on_paper=on_paper)
        case "slurm" | "ray":
            listed = slurm_allocation(env.everything()) if where.launcher == "slurm" else ray_nodes()
            slots = slots or listed
            cluster = Cluster(tuple(_on_paper(here.nodes[0], one) for one in slots))

            def reaches(plan: Plan) -> Sequence[Reach]:
                counts, names = {share.num_workers for share in plan.nodes}, [share.hostname for share in plan.nodes]
                if len(counts) > 1:
                    raise LaunchError(f"{where.launcher} starts as many workers on each node; ask for a multiple.")

                def argv(program: Sequence[str], environ: Mapping[str, str]) -> Sequence[str]:
                    words, variables = inside(program, environ, has_gpus)
                    if where.launcher == "slurm":
                        return srun_argv(names, words, cwd=cwd, environ=variables)
                    gpus = max(counts) if cluster.device_kind == "cuda" else 0
                    return ray_argv(len(names), words, cwd=cwd, environ=variables, num_gpus=gpus)

                return [Reach(tuple(names), argv, python=python)]

            job = env.text("SLURM_JOB_ID") or "0"
            port = 20000 + zlib.crc32(job.encode()) % 12000
            endpoint = FIRST_NODE if where.launcher == "ray" else f"{slots[0].address}:{port}"
            return Allocation(where, cluster, reaches, endpoint)
        case "local" if where.container is not None:
            reach = Reach((), lambda program, environ: inside(program, environ, has_gpus)[0], python=python)
            return Allocation(where, here, lambda _plan: [reach])
    return Allocation(where, here)


def _over_ssh(
    where: Where, slots: Sequence[NodeSlots], here: Cluster, python: str, inside: Callable[..., Any], *, on_paper: bool
) -> Allocation:
    def reach_to(slot: NodeSlots) -> Reach:
        def argv(program: Sequence[str], environ: Mapping[str, str]) -> Sequence[str]:
            words, variables = inside(program, environ)
            return ssh_argv(slot.address, words, cwd=Path.cwd(), environ=variables)

        return Reach((slot.address,), argv, python)

    by_name = {slot.address: reach_to(slot) for slot in slots}
    if on_paper:
        cluster, endpoint = Cluster(tuple(_on_paper(here.nodes[0], slot) for slot in slots)), f"{slots[0].address}:PORT"
    else:
        command = (python, "-m", "paceline.workflows.node")
        with ThreadPoolExecutor(max_workers=len(slots)) as pool:
            told = list(pool.map(lambda reach: json.loads(reach.output_of(command, DESCRIBE_S)), by_name.values()))
        _check_versions({slot.address: one["versions"] for slot, one in zip(slots, told, strict=True)})
        described = (
            replace(from_mapping(Node, one["node"]), hostname=slot.address, is_remote=True)
            for slot, one in zip(slots, told, strict=True)
        )
        cluster = Cluster(tuple(with_num_workers(node, slot) for node, slot in zip(described, slots, strict=True)))
        endpoint = _endpoint(slots[0].address, told[0], where.interface)
    return Allocation(where, cluster, lambda plan: [by_name[share.hostname] for share in plan.nodes], endpoint)


def _check_versions(by_node: Mapping[str, Mapping[str, str]]) -> None:
    """Raise `LaunchError` where a node has other versions than this one."""
    own = versions()
    for node, theirs in by_node.items():
        for package, version in own.items():
            if theirs.get(package) != version:
                raise LaunchError(
                    f"{node} has {package} {theirs.get(package)}, but this machine {version}; install the same there."
                )


def _endpoint(name: str, told: Mapping[str, Any], interface: str | None) -> str:
    """Where the agents meet on the first node: at the address of its name, else of the interface or the first one."""
    with_address = [address for one, address in told["addresses"] if interface in (None, one)]
    if not with_address:
        raise LaunchError(f"{name} has no network interface {interface or ''} with an address that others could reach.")
    with contextlib.suppress(OSError):
        named = {entry[4][0] for entry in socket.getaddrinfo(name.rpartition("@")[2], None)}
        with_address = [address for address in with_address if address in named] or with_address
    address = with_address[0]
    return f"[{address}]:{told['port']}" if ":" in address else f"{address}:{told['port']}"


def with_num_workers(node: Node, slots: NodeSlots) -> Node:
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
        return replace(node, devices=tuple(device for device in node.devices if device.index in chosen))
    return node.with_cpu_workers(count)


def _on_paper(here: Node, slots: NodeSlots) -> Node:
    count = slots.num_workers or len(here.devices)
    one = here.devices[0]
    devices = tuple(Device(one.kind, index, one.name, one.memory_bytes) for index in range(count))
    return dataclasses.replace(here, hostname=slots.address, is_remote=True, devices=devices, links=())


def _run_here(program: Sequence[str]) -> None:
    """Run a script path or `-m module` in this process, as `python` would."""
    import runpy

    module = program[1] if program[0] == "-m" else None
    sys.argv = [*program[1:]] if module else [*program]
    if module:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(program[0]).resolve().parent))
        runpy.run_path(program[0], run_name="__main__")
