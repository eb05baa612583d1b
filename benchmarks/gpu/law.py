"""Part 1: the number of workers changes no bit, or only rounding. All of them share one GPU, their messages go over Gloo."""

from __future__ import annotations

import math
import multiprocessing
import os
import socket
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import paceline
from benchmarks.gpu.notes import Device, Notes, use_device
from benchmarks.gpu.staged import join_staged
from benchmarks.gpu.workloads import TINY, Workload, loss_fn

_STEPS, _SHARDS = 4, 4
_NUMERIC, _BESIDE_CPU = 1e-5, 1e-3
"""The largest relative difference of a tensor that is allowed."""


@dataclass(frozen=True)
class Case:
    workload: Workload
    parity: str = "bitwise"
    clip_norm: float | None = None
    has_dropout: bool = False
    """A GPU draws other numbers than a CPU."""

    @property
    def is_beside_cpu(self) -> bool:
        return self.workload.precision == "float32" and not self.has_dropout


def cases_on(device: str) -> dict[str, Case]:
    """All of them on a GPU, in their order of worth; on few cores those that show most."""
    is_gpu = device == "cuda"
    gpt, resnet, lenet = (replace(one, batch=64 if is_gpu else 8, precision="float32") for one in TINY.values())
    if not is_gpu:
        resnet = replace(resnet, sample=(3, 8, 8))
    dropping = replace(gpt, options=gpt.options | {"dropout": 0.1})
    images = {"LeNet": lenet, "ResNet-20": resnet}
    found = {}
    for name, workload in (images | {"GPT": gpt}).items():
        found[f"{name}, numeric"] = Case(replace(workload, optimizer="sgd"), "numeric")
    for precision in ("float32", "bfloat16"):
        for optimizer in ("sgd", "adamw"):
            for name, workload in (images | {"GPT with dropout": dropping}).items():
                if is_gpu or (precision, optimizer) in (("float32", "sgd"), ("bfloat16", "adamw")):
                    chosen = replace(workload, precision=precision, optimizer=optimizer)
                    found[f"{name}, {precision}, {optimizer}"] = Case(chosen, has_dropout=workload is dropping)
    if is_gpu:  # CPUs are slow in float16
        clipped = replace(resnet, precision="float16", optimizer="sgd")
        found["ResNet-20, float16, clipped"] = Case(clipped, clip_norm=1.0)
    return found


def train(case: Case) -> dict[str, Any]:
    """The weights of a short run on whatever workers run this."""
    values: dict[str, Any] = {"virtual_shards": _SHARDS, "parity": case.parity, "tf32": False, "epochs": 1}
    if case.clip_norm is not None:
        values["optim"] = {"clip_norm": case.clip_norm}
    with paceline.init(**values | case.workload.job, progress=False) as run:
        model = case.workload.build()
        optimizer = case.workload.build_optimizer(model, lr=0.01)
        run.prepare(model, optimizer)
        samples = case.workload.samples(_STEPS * case.workload.batch)
        losses = [float(run.step(batch, loss_fn)) for batch in run.batches(samples)]
        weights = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
        return {"sha256": run.weights_sha256(), "weights": weights, "losses": losses, "device": run.device.type}


def work(folder: Path, device: Device, cases: dict[str, Case], environ: dict[str, str], group: str) -> None:
    """One worker: every case in turn, the results of rank 0 in files of their names."""
    os.environ.update(environ)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    use_device(device)
    if group == "nccl" and device == "cuda":
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
        dist.all_reduce(torch.ones(1000, device="cuda"))
    elif group == "staged":
        join_staged(timeout_s=60)
    for name, case in cases.items():
        try:
            found = train(case)
        except Exception:
            found = {"error": f"rank {environ['RANK']}, {name}:\n{traceback.format_exc()[-2500:]}"}
        if environ["RANK"] == "0" or "error" in found:
            part = folder / f"{name}.part{environ['RANK']}"
            torch.save(found, part)
            part.rename(folder / f"{name}.pt")
        if "error" in found and group == "staged":
            os._exit(1)  # the others wait in a collective
    os._exit(0)  # no group is taken down: its workers end at different times


class _World:
    """Workers that run all cases, forked before anything asked for a GPU, and what they have found so far."""

    def __init__(
        self, notes: Notes, name: str, cases: dict[str, Case], device: Device, group: str = "", num_workers: int = 1
    ) -> None:
        self.name, self.folder = name, notes.scratch / "law" / name
        self.folder.mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environ = {
            **{"WORLD_SIZE": str(num_workers), "LOCAL_WORLD_SIZE": str(num_workers), "LOCAL_RANK": "0"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"},
        }
        self._workers = []
        for rank in range(num_workers):
            arguments = (self.folder, device, cases, environ | {"RANK": str(rank)}, group)
            self._workers.append(multiprocessing.get_context("fork").Process(target=work, args=arguments))
            self._workers[-1].start()

    @property
    def has_ended(self) -> bool:
        return not any(worker.is_alive() for worker in self._workers)

    def stop(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.join()

    def result(self, case: str, deadline: float) -> dict[str, Any]:
        """Of a case, when it is there."""
        file = self.folder / f"{case}.pt"
        while not file.exists():
            has_ended = self.has_ended
            if time.monotonic() > deadline or (has_ended and not file.exists()):
                raise RuntimeError(f"no result from {self.name}\n{(self.folder / 'log').read_text()[-1500:]}")
            time.sleep(0.05)
        found: dict[str, Any] = torch.load(file)
        if "error" in found:
            raise RuntimeError(f"{self.name}: {found['error']}")
        return found


def difference(mine: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The largest distance of an element, relative to the largest element of its tensor."""
    worst = 0.0
    for name, value in mine["weights"].items():
        scale = max(float(value.abs().max()), 1e-30)
        worst = max(worst, float((value.double() - theirs["weights"][name].double()).abs().max()) / scale)
    return worst


def measure(notes: Notes) -> None:
    if notes.device == "simulated":
        from tests.kit.sim_gpu.build import build

        build()
    cases, device = cases_on(notes.device), notes.device
    beside_cpu = {name: case for name, case in cases.items() if case.is_beside_cpu}
    worlds: list[_World] = []
    try:
        worlds.append(_World(notes, "1 worker", cases, device))
        worlds.append(_World(notes, "2 workers", cases, device, "staged", 2))
        worlds.append(_World(notes, "4 workers", cases, device, "staged", 4))
        if device == "cuda":
            worlds.append(_World(notes, "1 worker, NCCL", cases, device, "nccl"))
        worlds.append(_World(notes, "CPU", beside_cpu, "cpu"))
        for name in notes.each(cases):
            with notes.case(name):
                _compare(notes, name, cases[name], *worlds)
    finally:
        for world in worlds:
            world.stop()


def _compare(notes: Notes, name: str, case: Case, one: _World, *worlds: _World) -> None:
    *others, cpu = worlds
    deadline = notes.deadline - 2
    first = one.result(name, deadline)
    found = {world.name: world.result(name, deadline) for world in others}
    distances = {key: difference(first, other) for key, other in found.items()}
    are_equal = {key: other["sha256"] == first["sha256"] for key, other in found.items()}
    beside = difference(first, cpu.result(name, deadline)) if case.is_beside_cpu else None
    is_lawful = all(are_equal.values()) if case.parity == "bitwise" else max(distances.values()) <= _NUMERIC
    notes.row(
        f"Weights after {_STEPS} steps; allowed: equal bits, or {_NUMERIC:.0e} where numeric; {_BESIDE_CPU:.0e} beside CPUs",
        good=is_lawful and all(map(math.isfinite, first["losses"])) and (beside or 0.0) <= _BESIDE_CPU,
        case=name,
        device=first["device"],
        **{one.name: first["sha256"][:12]},
        **{key: "equal bits" if are_equal[key] else f"{distances[key]:.1e}" for key in found},
        **{"beside the CPU": "" if beside is None else f"{beside:.1e}"},
        loss=f"{first['losses'][0]:.4f} … {first['losses'][-1]:.4f}",
    )

