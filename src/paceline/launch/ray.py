"""Ray: a program on a node of a Ray cluster, by a local process that carries its standard streams both ways.

    python -m paceline.launch.ray --cwd /data -- gpu1 python -m paceline agent

The local process joins the cluster as a driver and starts an actor on the node; the actor runs the program. When the
driver ends, in whatever way, Ray ends the actor, and the program finds its standard input closed. When the program
ends, the driver ends with its exit code.

Ray is an extra (paceline[ray]). Only this process loads it: it takes over signals and standard output.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import queue
import re
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from paceline import env
from paceline.errors import LaunchError
from paceline.launch.node_list import NodeSlots
from paceline.launch.variables import with_variables
from paceline.words import on_one_line

JOIN_TIMEOUT_S = 60
"""Timeout for joining the cluster, and for starting the actor; a cold node needs several seconds."""

ADDRESS_TIMEOUT_S = 10

CHUNK_BYTES = 1 << 16


def ray_argv(
    node: str, program: Sequence[str], *, cwd: Path, environ: Mapping[str, str], num_gpus: int = 0
) -> tuple[str, ...]:
    """The local command whose standard input and output are those of `program`, run in `cwd` on `node`.

    `node` is a host name, an address or a Ray node id. Ray reserves `num_gpus` there and tells the program which
    by CUDA_VISIBLE_DEVICES.

    Raises:
        LaunchError: `node` would be read as an option, or `environ` holds what looks like a secret.
    """
    if not node or node.startswith("-"):
        raise LaunchError(f"{node!r} is not the name of a Ray node.")
    options = ("--cwd", str(cwd), "--num-gpus", str(num_gpus))
    return (sys.executable, "-m", "paceline.launch.ray", *options, "--", node, *with_variables(program, environ))


def ray_nodes() -> tuple[NodeSlots, ...]:
    """The living nodes of the Ray cluster that RAY_ADDRESS names, or of this machine, by name, this one first.

    A node with GPUs has as many workers; one without leaves the number open.

    Raises:
        LaunchError: Ray is not installed, or no cluster answers.
    """
    if importlib.util.find_spec("ray") is None:
        raise LaunchError("Ray is not installed; install paceline[ray].")
    command = [sys.executable, "-m", "paceline.launch.ray", "--list"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=2 * JOIN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise LaunchError("The Ray cluster does not answer; check it with ray status.") from None
    if listing.returncode != 0:
        last = next((line for line in reversed(listing.stderr.splitlines()) if line.strip()), "no reason given")
        raise LaunchError(f"The Ray cluster cannot be asked for its nodes: {last}")
    return tuple(NodeSlots(**node) for node in json.loads(listing.stdout))


def name_nodes(nodes: Sequence[Mapping[str, Any]], own_id: str = "") -> tuple[NodeSlots, ...]:
    """Convert Ray's list of nodes: host names if they are unique, else ids."""
    # Ray lists them in any order; ranks should not depend on it.
    alive = sorted(
        (node for node in nodes if node["Alive"]),
        key=lambda node: (node["NodeID"] != own_id, node["NodeManagerHostname"], node["NodeID"]),
    )
    times = Counter(node["NodeManagerHostname"] for node in alive)
    return tuple(
        NodeSlots(
            node["NodeManagerHostname"] if times[node["NodeManagerHostname"]] == 1 else node["NodeID"],
            int(node["Resources"].get("GPU", 0)) or None,
        )
        for node in alive
    )


def find_node(nodes: Sequence[Mapping[str, Any]], name: str) -> str:
    """The id of the only living node whose id, host name or address is `name`.

    Raises:
        LaunchError: there is none, or there are several.
    """
    found = [
        str(node["NodeID"])
        for node in nodes
        if node["Alive"] and name in (node["NodeID"], node["NodeManagerHostname"], node["NodeManagerAddress"])
    ]
    if len(found) != 1:
        known = ", ".join(node.address for node in name_nodes(nodes)) or "none"
        who = f"{len(found)} nodes of the Ray cluster answer" if found else "No node of the Ray cluster answers"
        raise LaunchError(f"{who} to {name}; there are {known}.")
    return found[0]


class Relay:
    """The actor: a program and its streams. Two threads of Ray carry input and output."""

    def __init__(self, program: Sequence[str], cwd: str) -> None:
        self._process = subprocess.Popen(
            program, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        # Bounded, so that a program that writes more than the network carries has to wait.
        self._chunks: queue.Queue[tuple[int, bytes]] = queue.Queue(maxsize=16)
        self._num_open = 2
        for number, stream in ((1, self._process.stdout), (2, self._process.stderr)):
            assert stream is not None
            threading.Thread(target=self._collect, args=(number, stream.fileno()), daemon=True).start()

    def started(self) -> None:
        """Return once the program runs."""

    def write(self, data: bytes) -> None:
        """Write `data` to the program; empty data closes its input."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended; `read` says how
            if data:
                self._process.stdin.write(data)
                self._process.stdin.flush()
            else:
                self._process.stdin.close()

    def read(self) -> tuple[int, bytes] | int:
        """The program's next output as (1 or 2, bytes); its exit code after the last."""
        while self._num_open:
            number, data = self._chunks.get()
            if data:
                return number, data
            self._num_open -= 1
        return self._process.wait()

    def _collect(self, number: int, descriptor: int) -> None:
        while data := os.read(descriptor, CHUNK_BYTES):
            self._chunks.put((number, data))
        self._chunks.put((number, b""))


def relay(node: str, program: Sequence[str], *, cwd: str, num_gpus: int, output: int) -> int:
    """Run `program` on `node` with this process's standard input, its output to the descriptor `output`; its exit code.

    Raises:
        LaunchError: no such node, nothing to reserve there, or the program cannot be started.
    """
    ray = _ray()
    strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
    node_id = find_node(ray.nodes(), node)
    actor_class = ray.remote(
        num_cpus=0,
        num_gpus=num_gpus,
        max_restarts=0,
        concurrency_groups={"input": 1, "output": 1},
        scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node_id, soft=False),
    )(Relay)
    actor = actor_class.remote(list(program), cwd)
    try:
        ray.get(actor.started.remote(), timeout=JOIN_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError:
        raise LaunchError(
            f"Ray has not started a program with {num_gpus} GPUs on {node} within {JOIN_TIMEOUT_S} s; "
            "see ray status for what is taken."
        ) from None
    except ray.exceptions.RayError as problem:
        reason = next(line for line in reversed(str(problem).splitlines()) if line.strip())
        raise LaunchError(f"Ray cannot start {program[0]} on {node}: {reason.strip()}") from None

    def carry_input() -> None:
        data = b"."
        while data:
            data = os.read(0, CHUNK_BYTES)
            ray.get(actor.write.options(concurrency_group="input").remote(data))

    threading.Thread(target=carry_input, daemon=True).start()
    targets = {1: os.fdopen(output, "wb"), 2: sys.stderr.buffer}
    while True:
        try:
            news = ray.get(actor.read.options(concurrency_group="output").remote())
        except ray.exceptions.RayError:
            raise LaunchError(f"The Ray node {node} was lost, or Ray ended the program there.") from None
        if isinstance(news, int):
            return news if news >= 0 else 128 - news
        number, data = news
        targets[number].write(data)
        targets[number].flush()


def main(arguments: Sequence[str]) -> NoReturn:
    parser = argparse.ArgumentParser(
        prog="python -m paceline.launch.ray", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--list", action="store_true", help="print the nodes as JSON instead")
    parser.add_argument("--cwd", default=".")
    parser.add_argument("--num-gpus", type=int, default=0)
    parser.add_argument("node", nargs="?")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    # What Ray prints goes to standard error: standard output belongs to the program.
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        exit_code = _run(options, output)
    except LaunchError as error:
        print(f"paceline: {error}", file=sys.stderr)
        exit_code = error.exit_code
    sys.stderr.flush()
    # Not through the interpreter's shutdown: a thread still waits for input.
    os._exit(exit_code)


def _ray() -> Any:
    """Import Ray untyped: its annotations are incomplete."""
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise LaunchError("Ray is not installed; install paceline[ray].") from None


def _check_address(address: str) -> None:
    """Try to connect to the cluster, as Ray itself would retry for minutes. Raises `OSError` if nothing listens."""
    if found := re.fullmatch(r"([^/]+):([0-9]+)", address):
        socket.create_connection((found.group(1).strip("[]"), int(found.group(2))), timeout=ADDRESS_TIMEOUT_S).close()


def _run(options: argparse.Namespace, output: int) -> int:
    ray = _ray()
    try:
        _check_address(env.text(env.RAY_ADDRESS))
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as problem:
        raise LaunchError(f"No Ray cluster answers: {on_one_line(str(problem))}") from None
    try:
        if options.list:
            found = name_nodes(ray.nodes(), ray.get_runtime_context().get_node_id())
            os.write(output, json.dumps([vars(node) for node in found]).encode())
            return 0
        return relay(options.node, options.program, cwd=options.cwd, num_gpus=options.num_gpus, output=output)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
