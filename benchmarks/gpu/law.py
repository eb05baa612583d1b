"""Part 1: on one GPU, any number of workers learns the same. NCCL refuses two ranks on one device, and Gloo sends no
messages from a GPU: here Gloo sends them through host memory."""

from __future__ import annotations

import multiprocessing
import os
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

from .notes import Cases, Device, Notes, use_device
from .workloads import TINY, Workload, loss_fn

_STEPS, _NUMERIC, _BESIDE_CPU = 4, 1e-5, 1e-3
Case = tuple[str, Workload]
"""The parity, and what is trained."""


class StagedGroup(dist.ProcessGroup):
    """Gloo for tensors of any device. As with any asynchronous collective, a result is there after `wait`."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg] # the stub knows another constructor only
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
        return _Arrival(work, pairs, is_sent=name == "send")


for _name in (
    *("allreduce", "broadcast", "reduce", "barrier", "alltoall", "alltoall_base", "send", "recv", "recv_anysource"),
    *("allgather", "_allgather_base", "gather", "scatter", "reduce_scatter", "_reduce_scatter_base"),
):
    setattr(StagedGroup, _name, partialmethod(StagedGroup._through_host, _name))


class _Arrival(dist.Work):
    """A collective in flight: tensors, and what Gloo reads and writes in their place."""

    def __init__(self, work: Any, pairs: list[tuple[Tensor, Tensor]], *, is_sent: bool) -> None:
        super().__init__()
        self._work, self._pairs, self._is_sent = work, pairs, is_sent

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002 - torch's signature
        if self._work is not None:
            self._work.wait()
            for there, here in () if self._is_sent else self._pairs:
                there.copy_(here)
        self._work, self._pairs = None, []
        return True

    def is_completed(self) -> bool:
        return self._work is None or bool(self._work.is_completed())


def all_cases(device: Device) -> dict[str, Case]:
    """The cases by name. Numeric ones are compared with CPUs too, which draw other numbers for dropout."""
    gpt, resnet, lenet = (replace(one, precision="float32", optimizer="sgd") for one in TINY.values())
    if device == "cuda":
        resnet, lenet = replace(resnet, batch=64, sample=(3, 32, 32)), replace(lenet, batch=64)
    found = {f"{one.model}, numeric": ("numeric", one) for one in (lenet, resnet, gpt)}
    dropping = replace(gpt, options=gpt.options | {"dropout": 0.1})
    for precision, optimizer in [(one, two) for one in ("float32", "bfloat16") for two in ("sgd", "adamw")]:
        for one in (lenet, resnet, dropping):
            changed = replace(one, precision=precision, optimizer=optimizer)
            found[f"{one.model}, bitwise, {precision}, {optimizer}"] = "bitwise", changed
    if device == "cuda":
        return found
    few = ("lenet, numeric", "gpt, numeric", "resnet20, bitwise, float32, sgd", "gpt, bitwise, bfloat16, adamw")
    return {name: found[name] for name in few}


def train(parity: Any, workload: Workload) -> dict[str, Any]:
    """The weights after a short run on whatever workers run this."""
    with paceline.init(**workload.job, virtual_shards=4, parity=parity, tf32=False, progress=False) as run:
        model = workload.build()
        run.prepare(model, workload.build_optimizer(model, lr=0.01))
        losses = [float(run.step(batch, loss_fn)) for batch in run.batches(workload.samples(_STEPS))]
        weights = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
        return {"sha": run.weights_sha256(), "weights": weights, "loss": losses[-1], "device": run.device.type}


def work(folder: Path, device: Device, group: str, cases: dict[str, Case], rank: int, world_size: int) -> None:
    """A worker: every case in turn; rank 0 writes the results."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    try:
        use_device(device)
        create: Callable[..., Any] = StagedGroup
        dist.Backend.register_backend("staged", create, devices=["cpu", "cuda"])
        if group:
            meeting = f"file://{folder}/store"
            dist.init_process_group(group, init_method=meeting, rank=rank, world_size=world_size)
        if group == "nccl":
            dist.all_reduce(torch.ones(1000, device="cuda"))
        for name, case in cases.items():
            try:
                found[name] = train(*case)
            except Exception:
                (folder / f"error of {name}").write_text(traceback.format_exc()[-2500:])
                if world_size > 1:  # the others wait
                    raise
            if rank == 0:
                torch.save(found, folder / "part")
                (folder / "part").rename(folder / "found.pt")
    except BaseException:
        (folder / f"error of rank {rank}").write_text(f"rank {rank}: {traceback.format_exc()[-2500:]}")
    os._exit(0)  # no group is taken down: workers end at different times, and after an error others wait


def law(notes: Notes) -> Cases:
    """Runs all worlds of workers, forked before anything asks for a GPU; what is left is to compare them."""
    chosen, device = all_cases(notes.device), notes.device
    if device == "simulated":
        from tests.kit.sim_gpu.build import build

        build()
    beside = {name: one for name, one in chosen.items() if one[0] == "numeric"}
    worlds = {"1 worker": (device, "", chosen, 1)}
    worlds |= {f"{number} workers": (device, "staged", chosen, number) for number in (2, 4)}
    worlds |= {"1 over NCCL": (device, "nccl", chosen, 1)} if notes.is_gpu else {}
    worlds |= {"CPU": ("cpu", "", beside, 1)} if device != "cpu" else {}
    running = []
    for name, (kind, group, own, world_size) in worlds.items():
        (notes.scratch / name).mkdir()
        for rank in range(world_size):
            arguments = (notes.scratch / name, kind, group, own, rank, world_size)
            running.append(multiprocessing.get_context("fork").Process(target=work, args=arguments, daemon=True))
            running[-1].start()
    while any(one.is_alive() for one in running) and notes.left_s > 10:
        time.sleep(0.05)
    for one in running:
        one.kill()
    return {
        name: partial(_compare, notes, name, parity, [world for world in worlds if name in worlds[world][2]])
        for name, (parity, _) in chosen.items()
    }


def _compare(notes: Notes, case: str, parity: str, worlds: list[str]) -> None:
    found = {}
    for world in worlds:
        results = notes.scratch / world / "found.pt"
        if not results.exists() or case not in (known := torch.load(results)):
            errors = [file.read_text() for file in (notes.scratch / world).glob("error of *")]
            raise RuntimeError(f"{world} ended early, or had no time\n{''.join(errors)}")
        found[world] = known[case]
    first = found.pop("1 worker")
    row, is_good = {"case": case, "device": first["device"], "1 worker": first["sha"][:12]}, first["loss"] < 100
    for world, other in found.items():
        is_equal, distance = other["sha"] == first["sha"], difference(first["weights"], other["weights"])
        row[world] = "equal bits" if is_equal else f"{distance:.1e}"
        is_good &= is_equal or (parity == "numeric" and distance <= (_BESIDE_CPU if world == "CPU" else _NUMERIC))
    allowed = f"allowed are {_NUMERIC:.0e} where numeric, {_BESIDE_CPU:.0e} beside the CPU"
    notes.row(f"Weights after {_STEPS} steps, largest relative difference to 1 worker; {allowed}", row, good=is_good)


def difference(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest distance of an element, relative to the largest element of its tensor."""
    pairs = [(value.double(), theirs[name].double()) for name, value in mine.items()]
    return max(float((one - other).abs().max() / one.abs().max().clamp(min=1e-30)) for one, other in pairs)
