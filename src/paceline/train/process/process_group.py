"""Joining the other workers of a run, and leaving them."""

from __future__ import annotations

import atexit
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from paceline import env
from paceline.errors import LaunchError
from paceline.heartbeat import RENDEZVOUS, Heartbeat
from paceline.spec import Plan
from paceline.train.process.memory import give_back_freed_memory, keep_freed_memory
from paceline.train.process.watch import begin_watch, end_watch

GLOO_THREAD = "pt_gloo_runloop"
_REST_S = 2.0
"""The maximum wait for Gloo's threads at the end of a process."""


@dataclass(frozen=True)
class World:
    """This worker among the others: its facts, its device, and the group of all (None in a world of one)."""

    facts: env.WorkerFacts
    device: torch.device
    group: dist.ProcessGroup | None

    @property
    def rank(self) -> int:
        return self.facts.rank

    @property
    def world_size(self) -> int:
        return self.facts.world_size


def join(facts: env.WorkerFacts, plan: Plan) -> World:
    """Pick this worker's device and join the process group of all workers.

    The group lasts as long as the process: there is one rendezvous, the next run in the process uses the group again,
    and code of a script after its run works on many workers as on one.

    Raises:
        LaunchError: more workers than GPUs on this node, or an existing process group that was set up differently.
    """
    device = _device(facts, plan)
    if device.type == "cpu":
        if plan.mesh is None or plan.mesh.is_plain:
            keep_freed_memory()
        else:
            give_back_freed_memory()
    if dist.is_initialized():  # a run before this one, or the user's script, was first
        if (dist.get_rank(), dist.get_world_size()) != (facts.rank, facts.world_size):
            raise LaunchError(
                f"A process group with this process as rank {dist.get_rank()} of {dist.get_world_size()} is already "
                f"there, but the environment says rank {facts.rank} of {facts.world_size}; call paceline.init before "
                "init_process_group, or start both alike."
            )
        return World(facts, device, dist.group.WORLD if facts.world_size > 1 else None)
    if facts.world_size == 1:
        return World(facts, device, None)
    timeout = timedelta(seconds=plan.timeout_s)
    heartbeat = Heartbeat(env.path(env.HEARTBEAT))
    heartbeat.enter("paceline", RENDEZVOUS)
    dist.init_process_group(
        plan.backend,
        init_method=facts.init_method,
        rank=facts.rank,
        world_size=facts.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    heartbeat.leave("paceline")
    begin_watch(facts, plan.timeout_s)
    atexit.register(leave)
    return World(facts, device, dist.group.WORLD)


def leave() -> None:
    """Take the process group down, if it is still there; the end of the process does it too."""
    end_watch()
    if dist.is_initialized():
        dist.destroy_process_group()
        await_rest()


def await_rest() -> None:
    """Wait until no thread of Gloo has work left.

    When a collective is over for everybody else, such a thread still lets go of its tensors, for which it needs
    Python; if the interpreter is being taken down by then, the whole process aborts (pytorch/pytorch#190489). As long
    as a run's groups are held somewhere, destroying them ends no thread.
    """
    deadline = time.monotonic() + _REST_S
    num_looks = 0
    while num_looks < 2 and time.monotonic() < deadline:
        time.sleep(0.001)  # meanwhile one that waits for Python gets it
        num_looks = 0 if _gloo_works() else num_looks + 1


def _gloo_works() -> bool:
    """Whether some thread of Gloo's in this process computes or would if it had a core; no where /proc is missing."""
    for thread in Path("/proc/self/task").glob("*"):
        try:
            name, _, figures = (thread / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # it has ended
        if name == GLOO_THREAD and figures.split()[0] == "R":
            return True
    return False


def abandon() -> None:
    """After an error: exit without a shutdown of the group, which could block on peers that wait in a collective."""
    atexit.unregister(leave)


def _device(facts: env.WorkerFacts, plan: Plan) -> torch.device:
    if plan.device_kind == "cpu":
        return torch.device("cpu")
    env.prepare_nccl()
    if not torch.cuda.is_available():
        raise LaunchError(
            "The plan asks for GPUs, but torch finds none it can use; install a torch built for CUDA, or set "
            "PACELINE_DEVICE=cpu."
        )
    if facts.local_rank >= torch.cuda.device_count():
        raise LaunchError(
            f"Worker {facts.rank} wants GPU {facts.local_rank} of this node, but it has {torch.cuda.device_count()}; "
            "start as many workers as there are GPUs."
        )
    device = torch.device("cuda", facts.local_rank)
    torch.cuda.set_device(device)
    return device
