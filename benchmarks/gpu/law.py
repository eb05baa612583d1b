"""Part 1: on one GPU, any number of workers learns the same. NCCL refuses two ranks on one device, and Gloo sends no
messages from a GPU: here Gloo sends them through host memory."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial, partialmethod
from typing import Any

import torch
import torch.distributed as dist
from tests.kit.workers import run_ranks
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


def train_all(device: Device, group: str, cases: dict[str, Case]) -> dict[str, Any]:
    """In a worker: every case in turn, up to the first that fails, whose traceback is the "error"."""
    os.environ["LOCAL_RANK"] = "0"  # all workers on one device
    found: dict[str, Any] = {}
    try:
        use_device(device)
        create: Callable[..., Any] = StagedGroup
        dist.Backend.register_backend("staged", create, devices=["cpu", "cuda"])
        if group:
            dist.init_process_group(group, init_method="env://")
        if group == "nccl":
            dist.all_reduce(torch.ones(1000, device="cuda"))
        for name, case in cases.items():
            found[name] = train(*case)
    except Exception:
        found["error"] = traceback.format_exc()[-2500:]
    return found


def law(notes: Notes) -> Cases:
    """Runs all worlds of workers beside each other; what is left is to compare them."""
    chosen, device = all_cases(notes.device), notes.device
    if device == "simulated":
        from tests.kit.sim_gpu.build import build

        build()
    beside = {name: one for name, one in chosen.items() if one[0] == "numeric"}
    worlds: dict[str, tuple[Device, str, dict[str, Case], int]] = {"1 worker": (device, "", chosen, 1)}
    worlds |= {f"{number} workers": (device, "staged", chosen, number) for number in (2, 4)}
    worlds |= {"1 over NCCL": (device, "nccl", chosen, 1)} if notes.is_gpu else {}
    worlds |= {"CPU": ("cpu", "", beside, 1)} if device != "cpu" else {}

    def result(kind: Device, group: str, own: dict[str, Case], world_size: int) -> dict[str, Any]:
        try:
            found: dict[str, Any] = run_ranks(train_all, world_size, kind, group, own, timeout_s=notes.left_s - 10)[0]
        except (AssertionError, TimeoutError) as problem:
            return {"error": str(problem)}
        return found

    with ThreadPoolExecutor(len(worlds)) as pool:
        found = dict(zip(worlds, pool.map(lambda one: result(*one), worlds.values()), strict=True))
    return {
        name: partial(
            _compare, notes, name, parity, {world: found[world] for world in worlds if name in worlds[world][2]}
        )
        for name, (parity, _) in chosen.items()
    }


def _compare(notes: Notes, case: str, parity: str, found: dict[str, Any]) -> None:
    for world, known in found.items():
        if case not in known:
            raise RuntimeError(f"{world} ended early, or had no time\n{known.get('error', '')}")
    first = found["1 worker"][case]
    row, is_good = {"case": case, "device": first["device"], "1 worker": first["sha"][:12]}, first["loss"] < 100
    for world, known in list(found.items())[1:]:
        other = known[case]
        is_equal, distance = other["sha"] == first["sha"], difference(first["weights"], other["weights"])
        row[world] = "equal bits" if is_equal else f"{distance:.1e}"
        is_good &= is_equal or (parity == "numeric" and distance <= (_BESIDE_CPU if world == "CPU" else _NUMERIC))
    allowed = f"allowed are {_NUMERIC:.0e} where numeric, {_BESIDE_CPU:.0e} beside the CPU"
    notes.row(f"Weights after {_STEPS} steps, largest relative difference to 1 worker; {allowed}", row, good=is_good)


def difference(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest distance of an element, relative to the largest element of its tensor, or to a thousandth of the
    model's largest where that is more: a bias of attention's keys, whose gradient is zero, is rounding alone."""
    least = 1e-3 * max(float(value.abs().max()) for value in mine.values())
    pairs = [(value.double(), theirs[name].double()) for name, value in mine.items()]
    return max(float((one - other).abs().max() / one.abs().max().clamp(min=least)) for one, other in pairs)
