"""The nodes that workers run on: this one, or nodes reached by one of the launchers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline import env
from paceline.errors import LaunchError, file_problems
from paceline.folder_lock import hold_folder
from paceline.hardware import detect
from paceline.launch.containers import contained
from paceline.launch.elastic import run_elastic
from paceline.launch.fleet import Describe, Fleet
from paceline.launch.forking import ForkServer
from paceline.launch.node_list import NodeSlots
from paceline.launch.remote_team import RemoteTeam, open_nodes
from paceline.launch.run_workers import SAVE_S, run_workers
from paceline.launch.team import LaunchOptions, Output
from paceline.launch.worker import run_program
from paceline.measure.values import REQUEST_FILE
from paceline.plan import pick
from paceline.regular_files import make_run_folder
from paceline.spec import Cluster, Device, Node, Plan
from paceline.spec.codec import JsonValue, from_mapping
from paceline.words import number_of
from paceline.workflows.launchers import LAUNCHERS, chosen_launcher, node_access
from paceline.workflows.strategy import PlanFor, check_may_shrink, largest_that_fits
from paceline.workflows.where import Elastic, Where

PRELOAD = ("paceline.train.loop", "torch._dynamo")
"""Slow-loading modules that every training needs; torch loads the last one when it wraps an optimizer."""


@dataclass(frozen=True)
class Allocation:
    """The nodes of a command and the way to run workers on them."""

    where: Where
    cluster: Cluster
    teams: Sequence[RemoteTeam] = ()
    image: str = ""
    """The container and its digest; empty without one."""
    describe: Describe | None = None
    """Describes a lost node that has returned."""
    fork_server: ForkServer | None = None
    """Loads torch once for all runs of the command; None: workers run on nodes whose agents start them."""
    has_more_runs: bool = False
    """Whether the command has several runs, so that even one worker alone is worth a fork server."""

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
        """Run `program` in every worker of `plan`; the rest, and what it raises, is as for `run_workers`.

        Workers of Paceline's own programs are forked. A program of the user gets new processes: it may set variables
        that are read while torch is loaded.
        """
        self._check_size(plan)
        if self.where.launcher == "debug":
            make_run_folder(run_dir)
            run_program(program)
            return
        is_forked = self._saves_loading(plan, program)
        options = self._options(run_dir, output, environ, save_s=save_s, preload=PRELOAD if is_forked else ())
        run_workers(plan, program, options, nodes=self.teams, fork_server=self.fork_server if is_forked else None)

    def measure(
        self, program: str, request: JsonValue, plan: Plan, folder: Path, *, quiet: bool, **environ: str
    ) -> None:
        """Run a program of `paceline.measure` in every worker of `plan`.

        Each reads the request in `folder`, and leaves its results there.
        """
        there = folder.absolute()  # on another node the working directory may be another
        with file_problems(f"The folder {folder} cannot be used"):
            make_run_folder(folder)
            request.save(there / REQUEST_FILE)
        argv = ["-m", f"paceline.measure.{program}", str(there / REQUEST_FILE), str(there)]
        terminal = {} if quiet else env.terminal()
        self.run(plan, [*argv, *(["--quiet"] if quiet else [])], run_dir=folder, environ=terminal | environ)

    def _options(
        self, run_dir: Path, output: Output, environ: Mapping[str, str] | None, **options: Any
    ) -> LaunchOptions:
        return LaunchOptions(
            run_dir,
            interface=self.where.interface,
            output=output,
            hang_timeout_s=self.where.hang_timeout_s,
            environ={**env.note(env.CONTAINER, self.image), **(environ or {})},
            **options,
        )

    def _saves_loading(self, plan: Plan, program: Sequence[str]) -> bool:
        """Whether a node has several workers, at once or one after the other, that can be forked."""
        if program[0] != "-m" or not program[1].startswith("paceline."):
            return False
        most_on_a_node = max((node.num_workers for node in plan.nodes), default=plan.world_size)
        has_loaded = self.fork_server is not None and self.fork_server.has_loaded
        return most_on_a_node > 1 or self.has_more_runs or has_loaded

    def run_job(
        self,
        num_workers: int,
        elastic: Elastic,
        plan_for: PlanFor,
        program_for: Callable[[Plan], Sequence[str]],
        *,
        run_dir: Path,
        output: Output = "rank0",
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Run a program that saves checkpoints on `num_workers` workers; after failures on fewer, if `elastic` allows.

        Raises:
            JobError: there is no plan for so many workers, or for none of the numbers that `elastic` allows.
            LaunchError, WorkerFailed: as for `run_workers`.
        """
        limits = elastic.limits(num_workers)
        plan = self.first_plan(num_workers, elastic, plan_for)
        if limits is None:
            self.run(plan, program_for(plan), run_dir=run_dir, output=output, environ=environ, save_s=SAVE_S)
            return
        # Who never starts again needs nothing that is prepared for that.
        preload = PRELOAD if elastic.standby and limits.max_restarts else ()
        noted = {**env.note(env.MAX_RESTARTS, limits.max_restarts), **(environ or {})}
        options = self._options(run_dir, output, noted, save_s=SAVE_S, preload=preload)
        with contextlib.closing(Fleet(with_room(self.cluster, plan), self.teams, self.describe)) as fleet:
            run_elastic(fleet, limits, largest_that_fits(plan_for, limits.min_workers), program_for, options)

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

    def first_plan(self, num_workers: int, elastic: Elastic, plan_for: PlanFor) -> Plan:
        """The plan that `run_job` begins with; raises what that raises before it starts anything."""
        limits = elastic.limits(num_workers)
        if limits is None:
            plan = plan_for(self.cluster, num_workers)
            self._check_size(plan)
            return plan
        if self.where.launcher == "debug":
            raise LaunchError(
                "launcher = 'debug' runs in this process, which cannot outlive a failure; leave min_workers out."
            )
        plan_within = largest_that_fits(plan_for, limits.min_workers)
        check_may_shrink(plan_within, self.cluster, limits.min_workers, limits.max_workers)
        plan = plan_within(self.cluster, limits.max_workers)
        self._check_size(plan)
        return plan


@contextlib.contextmanager
def open_allocation(where: Where, run_dir: Path, script: Path | None = None) -> Iterator[Allocation]:
    """Open the nodes that `where` names; agents on other nodes run until the block ends.

    Args:
        run_dir: the run's folder, which no other run may use meanwhile, and which containers see besides the working
            directory.
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
        yield held.enter_context(_opened(where, slots, shown))


def _chosen(where: Where) -> tuple[tuple[NodeSlots, ...], Where]:
    """The nodes that are named, and the launcher that is meant; options that it would ignore are refused."""
    slots = where.named_hosts()
    chosen = replace(where, launcher=chosen_launcher(where.launcher, slots))
    if chosen.launcher in ("local", "debug"):
        inside = where.container is not None and chosen.launcher == "local"
        for name, value, is_used in (("interface", where.interface, False), ("python", where.python, inside)):
            if value is not None and not is_used:
                raise LaunchError(
                    f"{name} = {value!r} is for workers on other nodes, and all of these run on this one; leave it out."
                )
    return slots, chosen


@contextlib.contextmanager
def _opened(where: Where, slots: Sequence[NodeSlots], shown: Sequence[Path]) -> Iterator[Allocation]:
    if where.launcher == "debug" or (where.launcher == "local" and where.container is None):
        with contextlib.closing(ForkServer(PRELOAD)) as fork_server:
            yield Allocation(where, detect(), fork_server=fork_server)
        return
    launcher = LAUNCHERS[where.launcher]
    listed = launcher.nodes()
    # The launcher lists the GPUs of a node; a node without an entry has none.
    gpus = {node.address: node.num_workers or 0 for node in listed} if launcher.reserves_gpus else {}
    slots = slots or listed
    accesses = [node_access(where, node.address, gpus.get(node.address, 0)) for node in slots]
    image = ""
    if where.container is not None:
        python = where.python or "python3"
        accesses, digest = contained(accesses, where.container, cwd=Path.cwd(), binds=shown, python=python)
        image = f"{where.container} {digest}"
    by_name = {node.address: node for node in slots}

    def describe(team: RemoteTeam) -> Node:
        node = replace(from_mapping(Node, team.hello.node), hostname=team.hostname, is_remote=True)
        return with_num_workers(node, by_name[team.hostname])

    with open_nodes(accesses) as teams:
        yield Allocation(where, Cluster(tuple(map(describe, teams))), teams, image, describe)


def allocation_on_paper(where: Where) -> Allocation:
    """The allocation without a connection to any node: other nodes are assumed equal to this one.

    Raises:
        LaunchError: options that contradict each other, or Slurm has allocated nothing to this command.
    """
    slots, where = _chosen(where)
    if where.launcher == "slurm":
        slots = slots or LAUNCHERS["slurm"].nodes()
    here = detect()
    return Allocation(where, Cluster(tuple(_on_paper(here.nodes[0], host) for host in slots)) if slots else here)


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


def with_room(cluster: Cluster, plan: Plan) -> Cluster:
    """The cluster with a device for every worker of the plan: on CPU they may outnumber cores."""
    counts = {placement.hostname: placement.num_workers for placement in plan.placements}
    nodes = []
    for node in cluster.nodes:
        count = counts.get(node.hostname if node.is_remote else "", 0)
        is_full = node.device_kind == "cpu" and count > len(node.devices)
        nodes.append(node.with_cpu_workers(count) if is_full else node)
    return replace(cluster, nodes=tuple(nodes))


def _on_paper(here: Node, slots: NodeSlots) -> Node:
    count = slots.num_workers or len(here.devices)
    one = here.devices[0]
    devices = tuple(Device(one.kind, index, one.name, one.memory_bytes) for index in range(count))
    return replace(here, hostname=slots.address, is_remote=True, devices=devices, links=())
