"""Part 1: on one GPU, any number of workers learns the same. NCCL refuses two ranks on one device, and Gloo sends no
messages from a GPU: here Gloo sends them through host memory."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import paceline

from .notes import Device, Notes, use_device
from .workloads import TINY, Workload, loss_fn

_STEPS, _NUMERIC, _BESIDE_CPU = 4, 1e-5, 1e-3
Case = tuple[str, Workload]
"""The parity, and what is trained."""


class StagedGroup(dist.ProcessGroup):
    """Gloo for tensors of any device. As with any asynchronous collective, a result is there after `wait`."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def _through_host(self, name: str, *args: Any, **options: Any) -> dist.Work:
        pairs: list[tuple[Tensor, Tensor]] = []

        def staged(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [staged(one) for one in value]
            if isinstance(value, Tensor) and value.device.type != "cpu":
                pairs.append((value, value.cpu()))
                return pairs[-1][1]
            return value

        work = getattr(self._gloo, name)(*map(staged, args), **options)
        return _Arrival(work, pairs, [] if name == "send" else pairs)


for _name in (
    *("allreduce", "broadcast", "reduce", "barrier", "alltoall", "alltoall_base", "send", "recv", "recv_anysource"),
    *("allgather", "_allgather_base", "gather", "scatter", "reduce_scatter", "_reduce_scatter_base"),
):
    setattr(StagedGroup, _name, partialmethod(StagedGroup._through_host, _name))


class _Arrival(dist.Work):
    """A collective in flight; `pairs` keeps its memory, and `results` belong on the GPU."""

    def __init__(self, work: Any, pairs: list[tuple[Tensor, Tensor]], results: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._work, self._pairs, self._results = work, pairs, results

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002 - torch's signature
        if self._work is not None:
            self._work.wait()
        for there, here in self._results:
            there.copy_(here)
        self._work, self._pairs, self._results = None, [], []
        return True

    def is_completed(self) -> bool:
        return self._work is None or bool(self._work.is_completed())


def all_cases(device: Device) -> dict[str, Case]:
    """The cases by name; the first ones are compared with CPUs, which draw other numbers for dropout."""
    gpt, resnet, lenet = (replace(one, precision="float32", optimizer="sgd") for one in TINY.values())
    if device == "cuda":
        resnet, lenet = replace(resnet, batch=64, sample=(3, 32, 32)), replace(lenet, batch=64)
    known = {"LeNet": lenet, "ResNet-20": resnet, "GPT": gpt}
    found = {f"{name}, numeric": ("numeric", one) for name, one in known.items()}
    known["GPT"] = replace(gpt, options=gpt.options | {"dropout": 0.1})
    for precision in ("float32", "bfloat16"):
        for optimizer in ("sgd", "adamw") if device == "cuda" or precision == "float32" else ("adamw",):
            for name, one in known.items():
                if device == "cuda" or optimizer == "sgd" or name == "GPT":  # fewer where cores are few
                    changed = replace(one, precision=precision, optimizer=optimizer)
                    found[f"{name}, {precision}, {optimizer}"] = "bitwise", changed
    return found


def train(parity: Any, workload: Workload) -> dict[str, Any]:
    """The weights after a short run on whatever workers run this."""
    with paceline.init(**workload.job, virtual_shards=4, parity=parity, tf32=False, progress=False) as run:
        model = workload.build()
        run.prepare(model, workload.build_optimizer(model, lr=0.01))
        losses = [float(run.step(batch, loss_fn)) for batch in run.batches(workload.samples(_STEPS))]
        weights = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
        return {"sha": run.weights_sha256(), "weights": weights, "loss": losses[-1], "device": run.device.type}


def work(folder: Path, device: Device, group: str, cases: dict[str, Case], environ: dict[str, str]) -> None:
    """A worker: every case in turn; rank 0 writes the results."""
    os.environ.update(environ)
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    try:
        use_device(device)
        if group == "nccl":
            dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
            dist.all_reduce(torch.ones(1000, device="cuda"))
        elif group == "staged":
            create: Callable[..., Any] = StagedGroup
            dist.Backend.register_backend("staged", create, devices=["cpu", "cuda"])
            dist.init_process_group("staged")
        for name, case in cases.items():
            found[name] = train(*case)
            if environ["RANK"] == "0":
                torch.save(found, folder / "part")
                (folder / "part").rename(folder / "found.pt")
    except BaseException:
        (folder / f"error{environ['RANK']}").write_text(f"rank {environ['RANK']}: {traceback.format_exc()[-2500:]}")
    os._exit(0)  # no group is taken down: workers end at different times, and after an error others wait


def cases(notes: Notes) -> dict[str, Callable[[], None]]:
    """Runs all worlds of workers, forked before anything asks for a GPU; what is left is to compare them."""
    chosen, device = all_cases(notes.device), notes.device
    if device == "simulated":
        from tests.kit.sim_gpu.build import build

        build()
    worlds: list[tuple[str, Device, str, int]] = [("1 worker", device, "", 1)]
    worlds += [(f"{number} workers", device, "staged", number) for number in (2, 4)]
    worlds += [("1 over NCCL", device, "nccl", 1)] if device == "cuda" else []
    worlds += [("CPU", "cpu", "", 1)] if device != "cpu" else []
    running = []
    for name, kind, group, number in worlds:
        (notes.scratch / name).mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        own = {name: one for name, one in chosen.items() if one[0] == "numeric"} if name == "CPU" else chosen
        for rank in range(number):
            place = {"RANK": str(rank), "WORLD_SIZE": str(number), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(number)}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
            arguments = (notes.scratch / name, kind, group, own, place)
            running.append(multiprocessing.get_context("fork").Process(target=work, args=arguments, daemon=True))
            running[-1].start()
    while any(one.is_alive() for one in running) and notes.left_s > 6:
        time.sleep(0.05)
    for one in running:
        one.kill()
    names = [name for name, *_ in worlds]
    return {name: partial(_compare, notes, name, parity, names) for name, (parity, _) in chosen.items()}


def _compare(notes: Notes, case: str, parity: str, worlds: list[str]) -> None:
    found = {}
    for world in worlds if parity == "numeric" else [name for name in worlds if name != "CPU"]:
        results = notes.scratch / world / "found.pt"
        if not results.exists() or case not in (known := torch.load(results)):
            errors = [file.read_text() for file in (notes.scratch / world).glob("error*")]
            raise RuntimeError(f"{world} ended early, or had no time\n{''.join(errors)}")
        found[world] = known[case]
    first = found.pop("1 worker")
    row, is_good = {"case": case, "device": first["device"], "1 worker": first["sha"][:12]}, first["loss"] < 100
    for world, other in found.items():
        is_equal, distance = other["sha"] == first["sha"], difference(first["weights"], other["weights"])
        row[world] = "equal bits" if is_equal else f"{distance:.1e}"
        is_good &= is_equal or (parity == "numeric" and distance <= (_BESIDE_CPU if world == "CPU" else _NUMERIC))
    notes.row(f"Weights after {_STEPS} steps, largest relative difference to 1 worker", row, good=is_good)


def difference(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest distance of an element, relative to the largest element of its tensor."""
    pairs = [(value.double(), theirs[name].double()) for name, value in mine.items()]
    return max(float((one - other).abs().max() / one.abs().max().clamp(min=1e-30)) for one, other in pairs)
