"""How much of their time the workers of a pipeline spend waiting, schedule beside schedule, alternately in one run.

    python -m benchmarks.pipeline --rounds 5

The layers are waits of known length, forward, backward for what arrived and backward for the weight, so that nothing
but the schedule and the messages is measured. Prints, for each schedule, the efficiency (time of the work over time of
the step, median of the rounds) beside that of the simulator and, for GPipe and 1F1B, the formula m / (m + p - 1).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.old.unit.parallel.pipeline.simulation import simulate
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from paceline.parallel.pipeline import MicroBatch, ModelCall, Pipeline
from paceline.parallel.pipeline.schedules import Action, make_schedule
from paceline.spec import PipelineSpec

TIMEOUT_S = 60.0
PLACES = 2
"""Stages of a worker where the schedule allows several; also the layers of a worker."""
SPECS = {
    "gpipe": PipelineSpec("gpipe"),
    "1f1b": PipelineSpec("1f1b"),
    "interleaved": PipelineSpec("interleaved", stages_per_worker=PLACES),
    "zero_bubble": PipelineSpec("zero_bubble"),
    "zero_bubble, interleaved": PipelineSpec("zero_bubble", stages_per_worker=PLACES),
}


class Wait(nn.Module):
    """The identity, which takes its time: `wait_s` forward and twice that backward, half of it for its weight."""

    def __init__(self, wait_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.wait_s = wait_s

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.wait_s)
        slow: Tensor = _SlowBackward.apply(x, self.wait_s)  # type: ignore[no-untyped-call]
        weight: Tensor = _SlowBackward.apply(self.weight, self.wait_s)  # type: ignore[no-untyped-call]
        return slow * weight


class _SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wait_s: float) -> Tensor:
        ctx.wait_s = wait_s
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.wait_s)
        return gradient, None


def simulated_efficiency(spec: PipelineSpec, num_workers: int, num_micro_batches: int) -> float:
    """The part of all workers' time in which they work, if messages took no time."""
    units = {"forward": 1.0, "backward": 2.0, "input": 1.0, "weight": 1.0}

    def seconds(action: Action) -> float:
        return units[action.kind] / spec.stages_per_worker

    schedule = make_schedule(spec.schedule, num_workers, num_micro_batches, spec.stages_per_worker)
    return 1 - simulate(schedule, seconds).bubble


def worker(
    rank: int, num_workers: int, store: str, rounds: int, num_micro_batches: int, wait_s: float, answer: str
) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_workers, timeout=timeout)
    group = dist.group.WORLD
    assert group is not None
    samples = torch.ones(1, 64, requires_grad=True)
    micro_batches = [MicroBatch(lambda model: model(samples).sum())] * num_micro_batches
    num_layers = num_workers * PLACES
    pipelines = {}
    for name, spec in SPECS.items():
        model = nn.Sequential(*[Wait(wait_s) for _ in range(num_layers)])
        # All layers alike: cut by number, not by times that a busy machine has disturbed.
        length = num_layers // (num_workers * spec.stages_per_worker)
        cuts = tuple(str(start) for start in range(length, num_layers, length))
        spec = PipelineSpec(spec.schedule, spec.stages_per_worker, cuts)
        pipelines[name] = Pipeline(model, group, spec, ModelCall((samples,)), torch.device("cpu"))
    work_s = 3 * wait_s * PLACES * num_micro_batches
    efficiencies: dict[str, list[float]] = {name: [] for name in pipelines}
    for _ in range(rounds + 1):
        for name, pipeline in pipelines.items():
            dist.barrier()
            began = time.perf_counter()
            pipeline.train_step(micro_batches)
            dist.barrier()
            efficiencies[name].append(work_s / (time.perf_counter() - began))
    if rank == 0:
        # Without the first round, in which connections are made and messages described.
        measured = {name: statistics.median(found[1:]) for name, found in efficiencies.items()}
        Path(answer).write_text(json.dumps(measured))
    dist.destroy_process_group()


def measure(num_workers: int, num_micro_batches: int, rounds: int, wait_s: float) -> dict[str, float]:
    """The efficiency of every schedule, measured on this machine."""
    # Set for the workers, which inherit it: nothing of this leaves the machine.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        arguments = (num_workers, f"{folder}/store", rounds, num_micro_batches, wait_s, str(answer))
        spawn(worker, arguments, nprocs=num_workers)
        measured: dict[str, float] = json.loads(answer.read_text())
        return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--wait-ms", type=float, default=20.0)
    arguments = parser.parse_args()
    num_workers, num_micro_batches = arguments.workers, arguments.micro_batches
    measured = measure(num_workers, num_micro_batches, arguments.rounds, arguments.wait_ms / 1e3)
    for name, efficiency in measured.items():
        row = {
            "schedule": name,
            "efficiency": round(efficiency, 3),
            "simulated": round(simulated_efficiency(SPECS[name], num_workers, num_micro_batches), 3),
        }
        if SPECS[name].stages_per_worker == 1 and name != "zero_bubble":
            row["formula"] = round(num_micro_batches / (num_micro_batches + num_workers - 1), 3)
        print(json.dumps(row))


if __name__ == "__main__":
    main()
