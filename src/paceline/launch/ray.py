"""Ray: torch's agent on nodes of a Ray cluster, started by Ray Train.

    python -m paceline.launch.ray NODES GPUS FOLDER python -m paceline.launch.agent …

This process is Ray's driver. `TorchTrainer` reserves the nodes in one placement group and runs the command once on each
of them, in a folder. What the launcher asks for goes to the agents by a file in the run folder, which all nodes see.
When the driver ends, in whatever way, Ray ends what it started, and the agents kill their workers. Ray is an extra
(paceline[ray]). Only this process loads it: it takes over signals and standard output.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from paceline import env
from paceline.errors import LaunchError
from paceline.launch.command_lines import output_of, with_variables

LIST_TIMEOUT_S = 120
POLL_S = 0.5
"""How often a node looks for what the launcher asks for."""
FIRST_NODE = "FIRST_NODE"
"""Stands in the agent's arguments for the address of the first node, which Ray chooses."""
AGENT_ENDED = "the agent ended with exit code"
_LIST = "import json, ray; ray.init(address='auto', logging_level='ERROR'); print(json.dumps(ray.nodes()))"


def ray_argv(
    num_nodes: int, program: Sequence[str], *, cwd: Path, environ: Mapping[str, str], num_gpus: int = 0
) -> tuple[str, ...]:
    """The local command that runs `program` once on each of so many nodes, in `cwd`.

    Ray reserves `num_gpus` on each and tells the program which by CUDA_VISIBLE_DEVICES.
    """
    driver = (sys.executable, "-m", "paceline.launch.ray", str(num_nodes), str(num_gpus), str(cwd))
    return (*driver, *with_variables(program, environ))


def ray_nodes() -> dict[str, int | None]:
    """The living nodes of the Ray cluster that RAY_ADDRESS names, or of this machine, by name, and the GPUs of each;
    None: it has none. Raises `LaunchError` where Ray is not installed, or no cluster answers."""
    try:
        printed = output_of([sys.executable, "-c", _LIST], LIST_TIMEOUT_S)
    except LaunchError as problem:
        raise LaunchError(
            f"No Ray cluster answers; it needs paceline[ray], and `ray status` shows it: {problem}"
        ) from None
    nodes = sorted(json.loads(printed.splitlines()[-1]), key=lambda node: node["NodeManagerHostname"])
    return {
        node["NodeManagerHostname"]: int(node["Resources"].get("GPU", 0)) or None for node in nodes if node["Alive"]
    }


def main(num_nodes: int, num_gpus: int, cwd: str, program: Sequence[str]) -> int:
    """Run the program on the nodes; the exit code, 1 where one of them failed."""
    requests = next(Path(word.partition("=")[2]) for word in program if word.startswith(f"{env.RUN_DIR}=")) / "requests"
    requests.touch()
    threading.Thread(target=_obey, args=(requests,), daemon=True).start()
    ray, train, trainers = map(importlib.import_module, ("ray", "ray.train", "ray.train.torch"))
    ray.init(address="auto", log_to_driver=True, logging_level="ERROR")
    trainer = trainers.TorchTrainer(
        _start_agent,
        train_loop_config={"program": list(program), "cwd": cwd, "requests": str(requests)},
        torch_config=trainers.TorchConfig(backend="gloo"),
        scaling_config=train.ScalingConfig(
            num_workers=num_nodes,
            use_gpu=num_gpus > 0,
            resources_per_worker={"CPU": 1, **({"GPU": num_gpus} if num_gpus else {})},
            placement_strategy="STRICT_SPREAD",  # one placement group, a bundle on each node
        ),
    )
    try:
        trainer.fit()
    except Exception as problem:  # Ray wraps what a node raised in several ways
        if AGENT_ENDED not in str(problem):
            told = " ".join(str(problem).split())[-300:]
            print(f"paceline: Ray could not run the workers: {told}", file=sys.stderr)
        return 1
    return 0


def _obey(requests: Path) -> NoReturn:
    """Pass on what the launcher asks for until it is gone; then end, and Ray ends what it started."""
    with requests.open("wb", buffering=0) as file:
        for request in sys.stdin.buffer:
            file.write(request)
    os._exit(128 + 15)


def _start_agent(config: dict[str, Any]) -> None:
    """On a node: run the command, which sees its line to the launcher closed when this process ends."""
    # Ray has set the address, and a port at random; the kernel gives none below 32,000 to anybody.
    endpoint = f"{env.text('MASTER_ADDR')}:{20_000 + int(env.text('MASTER_PORT')) % 12_000}"
    # Ray chooses the node, too: no name that the launcher gives it is right.
    words = [word for word in config["program"] if not word.startswith(f"{env.NODE}=")]
    program = [word.replace(FIRST_NODE, endpoint) for word in words]
    with (
        open(config["requests"], "rb") as requests,
        subprocess.Popen(program, cwd=config["cwd"], stdin=subprocess.PIPE, bufsize=0) as process,
    ):
        assert process.stdin is not None
        while (exit_code := process.poll()) is None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(requests.read())
            time.sleep(POLL_S)
    if exit_code:
        raise RuntimeError(f"{AGENT_ENDED} {exit_code}")


if __name__ == "__main__":
    exit_code = main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
    sys.stderr.flush()
    os._exit(exit_code)  # a thread still waits for input
