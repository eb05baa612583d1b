"""Ray: torch's agent on nodes of a Ray cluster, started by Ray Train.

    python -m paceline.launch.ray --nodes 2 --gpus 8 --cwd /data -- python -m paceline.launch.agent …

This process is Ray's driver. `TorchTrainer` reserves the nodes in one placement group and runs the command once on each
of them; when the driver ends, in whatever way, Ray ends what it started, and the agents kill their workers. Ray is an
extra (paceline[ray]). Only this process loads it: it takes over signals and standard output.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from paceline import env
from paceline.errors import LaunchError
from paceline.launch.node_list import NodeSlots
from paceline.launch.variables import with_variables
from paceline.words import on_one_line

JOIN_TIMEOUT_S = 60
ADDRESS_TIMEOUT_S = 10
FIRST_NODE = "FIRST_NODE"
"""Stands in the agent's arguments for the address of the first node, which Ray chooses."""


def ray_argv(
    num_nodes: int, program: Sequence[str], *, cwd: Path, environ: Mapping[str, str], num_gpus: int = 0
) -> tuple[str, ...]:
    """The local command that runs `program` once on each of so many nodes, in `cwd`.

    Ray reserves `num_gpus` on each and tells the program which by CUDA_VISIBLE_DEVICES.

    Raises:
        LaunchError: `environ` holds what looks like a secret.
    """
    options = ("--nodes", str(num_nodes), "--gpus", str(num_gpus), "--cwd", str(cwd))
    return (sys.executable, "-m", "paceline.launch.ray", *options, "--", *with_variables(program, environ))


def ray_nodes() -> tuple[NodeSlots, ...]:
    """The living nodes of the Ray cluster that RAY_ADDRESS names, or of this machine, by name.

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
    nodes = (node for node in json.loads(listing.stdout) if node["Alive"])
    return tuple(
        NodeSlots(node["NodeManagerHostname"], int(node["Resources"].get("GPU", 0)) or None)
        for node in sorted(nodes, key=lambda node: (node["NodeManagerHostname"], node["NodeID"]))
    )


def main(arguments: Sequence[str]) -> NoReturn:
    parser = argparse.ArgumentParser(prog="python -m paceline.launch.ray", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the nodes as JSON instead")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--cwd", default=".")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    output = os.dup(1)
    if options.list:
        os.dup2(2, 1)  # what Ray prints goes to standard error
    else:
        threading.Thread(target=_end_with_launcher, daemon=True).start()
    try:
        exit_code = _run(options, output)
    except LaunchError as error:
        print(f"paceline: {error}", file=sys.stderr)
        exit_code = error.exit_code
    sys.stderr.flush()
    os._exit(exit_code)  # a thread still waits for input


def _end_with_launcher() -> None:
    """End this process when the launcher asks for the end, or is gone; Ray then ends what it started."""
    for request in sys.stdin.buffer:
        if request.strip() == b"TERM":
            break
    os._exit(128 + 15)


def _run(options: argparse.Namespace, output: int) -> int:
    ray: Any = importlib.import_module("ray")
    _check_address(env.text(env.RAY_ADDRESS))
    try:
        ray.init(address="auto", log_to_driver=True, logging_level="ERROR")
    except (RuntimeError, ValueError, OSError) as problem:
        raise LaunchError(f"No Ray cluster answers: {on_one_line(str(problem))}") from None
    if options.list:
        os.write(output, json.dumps(ray.nodes()).encode())
        return 0
    train: Any = importlib.import_module("ray.train")
    trainers: Any = importlib.import_module("ray.train.torch")
    trainer = trainers.TorchTrainer(
        _start_agent,
        train_loop_config={"program": options.program[options.program[0] == "--" :], "cwd": options.cwd},
        torch_config=trainers.TorchConfig(backend="gloo"),
        scaling_config=train.ScalingConfig(
            num_workers=options.nodes,
            use_gpu=options.gpus > 0,
            resources_per_worker={"CPU": 1, **({"GPU": options.gpus} if options.gpus else {})},
            placement_strategy="STRICT_SPREAD",  # one placement group, a bundle on each node
        ),
    )
    try:
        trainer.fit()
    except Exception as problem:  # Ray wraps what a node raised in several ways
        told = re.findall(r"ended with exit code (\d+)", str(problem))
        if told:
            return int(told[-1])
        raise LaunchError(f"Ray could not run the workers: {on_one_line(str(problem))[-300:]}") from None
    return 0


def _start_agent(config: dict[str, Any]) -> None:
    """On a node: run the command, which sees its line to the launcher closed when this process ends."""
    torch: Any = importlib.import_module("torch")
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = torch.tensor([probe.getsockname()[1]])
    torch.distributed.broadcast(port, 0)  # one that is free on the first node
    endpoint = f"{env.text('MASTER_ADDR')}:{int(port)}"  # Ray has set the address
    program = [word.replace(FIRST_NODE, endpoint) for word in config["program"]]
    with subprocess.Popen(program, cwd=config["cwd"], stdin=subprocess.PIPE) as process:
        exit_code = process.wait()
    if exit_code:
        raise RuntimeError(f"the agent ended with exit code {exit_code if exit_code > 0 else 128 - exit_code}")


def _check_address(address: str) -> None:
    """Try to connect to the cluster, as Ray itself would retry for minutes."""
    if found := re.fullmatch(r"([^/]+):([0-9]+)", address):
        try:
            socket.create_connection((found[1].strip("[]"), int(found[2])), timeout=ADDRESS_TIMEOUT_S).close()
        except OSError as problem:
            raise LaunchError(f"No Ray cluster answers at {address}: {problem.strerror or problem}.") from None


if __name__ == "__main__":
    main(sys.argv[1:])
