"""Part 2: a step beside the same step of a plain loop, in one process and in turns, under the settings of the run."""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import paceline
from benchmarks.gpu.notes import ROOT, Notes, use_device
from benchmarks.gpu.workloads import Workload, loss_fn, plain_loop, workloads

Step = Callable[[], Any]
_WARM_STEPS, _ROUNDS, _MOST_STEPS, _ROUND_S = 4, 5, 8, 0.4
_WAYS: dict[str, dict[str, Any]] = {
    "numeric, 8 shards": {"virtual_shards": 8},
    "numeric, 1 shard": {"virtual_shards": 1},
    "bitwise, 8 shards": {"virtual_shards": 8, "parity": "bitwise"},
    "bitwise, 1 shard": {"virtual_shards": 1, "parity": "bitwise"},
    "compiled, 1 shard": {"virtual_shards": 1, "compile": True},
    "compiled, 8 shards": {"virtual_shards": 8, "compile": True},
}
_TITLE = "Steps beside a plain loop: medians of rounds in turns; the loop has the settings of the run (TF32, determinism)"


def measure(notes: Notes) -> None:
    use_device(notes.device)
    known, ways = workloads(notes.device), list(_WAYS)
    # The first way of every workload, then the next; what compiles comes last. On a CPU nothing compiles in time.
    cases = {f"{name}: {way}": (name, way) for way in ways[: 6 if notes.device == "cuda" else 3] for name in known}
    for case in notes.each(cases, least_s=8.0 if notes.device == "cuda" else 4.0):
        with notes.case(case):
            name, way = cases[case]
            _compare(notes, name, known[name], way)
        gc.collect()
        if notes.device == "cuda":
            torch.cuda.empty_cache()


def _compare(notes: Notes, name: str, workload: Workload, way: str) -> None:
    values = {**workload.job, **_WAYS[way], "epochs": 1}
    samples = workload.samples(workload.batch * (_WARM_STEPS + 4 + _ROUNDS * _MOST_STEPS))
    with paceline.init(**values, progress=False) as run:
        device = run.device
        model = workload.build()
        model, optimizer = run.prepare(model, workload.build_optimizer(model))
        batches = iter(run.batches(samples))
        pair: dict[str, Step] = {
            "ours": lambda: run.step(next(batches), loss_fn),
            "plain": plain_loop(workload, samples, device, compiled="compile" in values),
        }
        kept_bytes = {}
        for key, step in pair.items():
            before = _allocated(device)
            for _ in range(_WARM_STEPS):
                step()
            kept_bytes[key] = _allocated(device) - before
        once = {key: _timed(step, 1, device) for key, step in pair.items()}
        num_steps = max(1, min(_MOST_STEPS, int(_ROUND_S / max(once.values()))))
        times: dict[str, list[float]] = {key: [] for key in pair}
        peaks = {}
        for _ in range(_ROUNDS):
            for key, step in pair.items():
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                times[key].append(_timed(step, num_steps, device))
                if device.type == "cuda":
                    peaks[key] = torch.cuda.max_memory_allocated()
        step_s = {key: statistics.median(found) for key, found in times.items()}
        kernels: dict[str, Any] = {key: "" for key in pair}
        waits: dict[str, list[str]] = {key: [] for key in pair}
        if notes.device == "cuda":
            waits = {key: _host_waits(step) for key, step in pair.items()}
            kernels = {key: _kernels(step) for key, step in pair.items()}
        batches.close()  # type: ignore[attr-defined]
    other = {"ours": "plain", "plain": "ours"}
    # What the other of the two keeps between its steps is not part of a peak.
    mib = {key: round((peak - kept_bytes[other[key]]) / 2**20) for key, peak in peaks.items()}
    notes.row(
        _TITLE,
        workload=name,
        way=way,
        **{"ms a step": _ms(step_s["ours"]), "plain loop": _ms(step_s["plain"])},
        ratio=round(step_s["ours"] / step_s["plain"], 2),
        **{"samples/s": round(workload.batch / step_s["ours"]), "rounds": f"{_ROUNDS} x {num_steps}"},
        **{"MiB": mib.get("ours", ""), "plain MiB": mib.get("plain", "")},
        **{"kernels": kernels["ours"], "plain kernels": kernels["plain"]},
        **{"host waits": len(waits["ours"]), "plain host waits": len(waits["plain"])},
    )
    for line, number in Counter(waits["ours"]).items():
        notes.row("Host waits: lines that wait for the GPU", workload=name, way=way, line=line, times=number)


def _ms(seconds: float) -> float:
    return float(f"{1e3 * seconds:.3g}")


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def _timed(step: Step, num_steps: int, device: torch.device) -> float:
    """Seconds of a step."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(num_steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / num_steps


def _host_waits(step: Step) -> list[str]:
    """The lines at which one step waits for the GPU, as torch warns of them."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [
        f"{_short(one.filename)}:{one.lineno}" for one in seen if "synchroniz" in str(one.message) and one.filename
    ]


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else "/".join(path.parts[-3:])


def _kernels(step: Step) -> int:
    """Kernels, copies and fills that one step starts on the GPU."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    return sum(one.device_type == torch.autograd.DeviceType.CUDA for one in seen.events() or [])
