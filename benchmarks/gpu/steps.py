"""Part 2: a step beside that of a plain loop, in one process and in turns, under the settings of the run."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import paceline

from .notes import Cases, Notes, use_device
from .workloads import ALL, FULL, TINY, loss_fn, plain_loop

Step = Callable[[], Any]
_WARM_STEPS, _ROUND_S = 4, 0.4
_WAYS: dict[str, dict[str, Any]] = {
    "numeric, 8 shards": {"virtual_shards": 8},
    "numeric, 1 shard": {"virtual_shards": 1},
    "bitwise, 8 shards": {"virtual_shards": 8, "parity": "bitwise"},
    "bitwise, 1 shard": {"virtual_shards": 1, "parity": "bitwise"},
    "compiled, 1 shard": {"virtual_shards": 1, "compile": True},
    "compiled, 8 shards": {"virtual_shards": 8, "compile": True},
}


def steps(notes: Notes) -> Cases:
    """The first way of every workload, then the next; on few cores fewer, and nothing is compiled."""
    use_device(notes.device)
    if not notes.is_gpu:
        torch.set_num_threads(1)
    known, ways = (FULL, list(_WAYS)) if notes.is_gpu else (TINY, list(_WAYS)[:3])
    return {f"{name}, {way}": partial(_compare, notes, name, way) for way in ways for name in known}


def _compare(notes: Notes, name: str, way: str) -> None:
    workload, is_gpu = ALL[name], notes.is_gpu
    num_rounds, most_steps = (5, 8) if is_gpu else (3, 2)
    samples = workload.samples(_WARM_STEPS + 4 + num_rounds * most_steps)
    with paceline.init(**workload.job, **_WAYS[way], progress=False) as run:
        model = workload.build()
        model, _ = run.prepare(model, workload.build_optimizer(model))
        batches = iter(run.batches(samples))
        plain = plain_loop(workload, samples, run.device, compiled="compile" in _WAYS[way])
        pair: list[Step] = [lambda: run.step(next(batches), loss_fn), plain]
        kept = []  # what each of the two has on the GPU between its steps
        for step in pair:
            before = torch.cuda.memory_allocated() if is_gpu else 0
            _timed(step, _WARM_STEPS, is_gpu)
            kept.append((torch.cuda.memory_allocated() if is_gpu else 0) - before)
        num_steps = max(1, min(most_steps, int(_ROUND_S / max(_timed(step, 1, is_gpu)[0] for step in pair))))
        rounds = [[_timed(step, num_steps, is_gpu) for step in pair] for _ in range(num_rounds)]
        ours, other = ([times[number][0] for times in rounds] for number in (0, 1))
        ours_s, plain_s = statistics.median(ours), statistics.median(other)
        row = {"workload": name, "way": way, "ms a step": _ms(ours_s), "plain loop, ms": _ms(plain_s)}
        row |= {"ratio": round(ours_s / plain_s, 2), "samples/s": round(workload.batch / ours_s)}
        row |= {"rounds": f"{num_rounds} x {num_steps}", "ms from … to": f"{_ms(min(ours))} … {_ms(max(ours))}"}
        if is_gpu:
            peaks = [max(times[number][1] for times in rounds) - kept[1 - number] for number in (0, 1)]
            waits = [_host_waits(step) for step in pair]
            kernels = [_num_kernels(step) for step in pair]
            for heading, values in (("MiB", [round(peak / 2**20) for peak in peaks]), ("kernels", kernels)):
                row |= {heading: values[0], f"plain {heading}": values[1]}
            row |= {"host waits": len(waits[0]), "plain host waits": len(waits[1])}
            row |= {"lines that wait": ", ".join(sorted(set(waits[0])))}
    notes.row("Steps, medians of rounds in turns with a plain loop under the same settings (TF32, determinism)", row)


def _ms(seconds: float) -> float:
    return float(f"{1e3 * seconds:.3g}")


def _timed(step: Step, num_steps: int, is_gpu: bool) -> tuple[float, int]:
    """Seconds of a step, and the most bytes of the GPU meanwhile."""
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(num_steps):
        step()
    if is_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / num_steps, torch.cuda.max_memory_allocated() if is_gpu else 0


def _host_waits(step: Step) -> list[str]:
    """The lines at which one step waits for the GPU, as far as torch warns of them."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [one for one in seen if "synchroniz" in str(one.message)]
    return [f"{'/'.join(one.filename.split('/')[-3:])}:{one.lineno}" for one in found]


def _num_kernels(step: Step) -> int:
    """Kernels, copies and fills that one step starts on the GPU."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    return sum(str(one.device_type).endswith("CUDA") for one in seen.events() or [])
