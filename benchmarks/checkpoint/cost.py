"""What saving costs: each way in two workers of its own, and Paceline alone beside a copy in memory."""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.kit.workers import run_ranks
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from paceline.models.gpt import GPT
from paceline.train.process.memory import keep_freed_memory

from .ways import WAYS, Paceline, join_workers

WIDTH, HEADS, CONTEXT = 768, 12, 128
TOKENS = 64
"""A step trains on, few enough for several steps to fall into a write."""

SAVES = 3
"""Of each way in a round: the first one has to find memory, the others have it."""


def gpt(num_parameters: float) -> GPT:
    """A GPT with about so many parameters: blocks as wide as GPT-2's, 7.1 million each."""
    width = WIDTH if num_parameters > 1e7 else 96
    num_layers = max(1, round(num_parameters / (12 * width**2)))
    return GPT(vocab_size=256, context=CONTEXT, num_layers=num_layers, num_heads=HEADS, width=width)


def trained(model: nn.Module) -> Optimizer:
    """Adam for `model` after a first step, so that its averages are there."""
    optimizer = AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


def state_tensors(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """All numbers that a checkpoint has to hold."""
    averages = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [*model.state_dict().values(), *averages]


@dataclass(frozen=True)
class Seconds:
    """Of one call."""

    clock_s: float
    processor_s: float
    """Without the time for which others had the processor."""


def seconds_of(act: Callable[[], object]) -> Seconds:
    clock, processor = time.perf_counter(), time.thread_time()
    act()
    return Seconds(time.perf_counter() - clock, time.thread_time() - processor)


@dataclass(frozen=True)
class Cost:
    """Of one save, in seconds from when all workers were ready until all of them were done."""

    stall_s: float
    complete_s: float
    durable_s: float
    """Until it would survive a power cut; those who do not see to it have it done by the benchmark."""
    num_bytes: int


def save_in_turn(way: str, num_parameters: float, folder: str) -> list[Cost]:
    """In each of the workers: save again and again, alone in a fresh folder each time."""
    join_workers()
    keep_freed_memory()  # as a run would
    model = gpt(num_parameters)
    optimizer = trained(model)
    root = Path(folder)
    saver = WAYS[way](root, model, optimizer)
    costs = []
    for step in range(1, SAVES + 1):
        if dist.get_rank() == 0:
            _empty(root)
            os.sync()  # what others wrote must not be waited for here
        dist.barrier()
        began = time.perf_counter()
        saver.save(step)
        dist.barrier()
        stall_s = time.perf_counter() - began
        saver.wait()
        dist.barrier()
        complete_s = time.perf_counter() - began
        num_bytes = 0
        if dist.get_rank() == 0:
            files = [path for path in root.rglob("*") if path.is_file()]
            num_bytes = sum(path.stat().st_size for path in files)
            for path in files:
                _flush(path)
        costs.append(Cost(stall_s, complete_s, time.perf_counter() - began, num_bytes))
    return costs


def _flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def beside_others(ways: Sequence[str], num_parameters: float, rounds: int, scratch: Path) -> dict[str, Any]:
    """Every way once, then every way again: medians, first saves apart."""
    costs: dict[str, list[list[Cost]]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in ways:
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                costs[way].append(run_ranks(save_in_turn, 2, way, num_parameters, folder, timeout_s=600)[0])
            last = costs[way][-1][-1]
            say(f"round {number + 1}/{rounds}  {way}: stall {last.stall_s:.2f} s, complete {last.complete_s:.2f} s")
    table = {}
    for way in ways:
        first = [saves[0] for saves in costs[way]]
        later = [cost for saves in costs[way] for cost in saves[1:]]
        table[way] = {
            "stall_s": _median(later, lambda cost: cost.stall_s),
            "first_stall_s": _median(first, lambda cost: cost.stall_s),
            "complete_s": _median(later, lambda cost: cost.complete_s),
            "durable_s": _median(later, lambda cost: cost.durable_s),
            "num_bytes": later[0].num_bytes,
            "does_fsync": WAYS[way].does_fsync,
            "stalls_s": [round(cost.stall_s, 3) for cost in later],
            "completes_s": [round(cost.complete_s, 3) for cost in later],
        }
    return table


def _median(costs: Sequence[Cost], figure: Callable[[Cost], float]) -> float:
    return round(statistics.median(figure(cost) for cost in costs), 3)


def stalls_in_turn(num_parameters: float, rounds: int, folder: str) -> dict[str, list[Seconds]]:
    """One worker alone: a copy in memory, Paceline's stall and torch.save of the same, in turn."""
    keep_freed_memory()
    model = gpt(num_parameters)
    optimizer = trained(model)
    tensors = state_tensors(model, optimizer)
    warm = [torch.zeros_like(tensor) for tensor in tensors]
    root = Path(folder)
    saver = Paceline(root / "paceline", model, optimizer)

    def copy() -> None:
        for tensor, place in zip(tensors, warm, strict=True):
            place.copy_(tensor)

    def torch_save() -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, root / "whole.pt")

    times: dict[str, list[Seconds]] = {"copy": [], "stall": [], "torch_save": []}
    for step in range(rounds + 1):
        _quiet(root)
        times["copy"].append(seconds_of(copy))
        times["stall"].append(seconds_of(partial(saver.save, step)))
        saver.wait()
        _quiet(root)
        times["torch_save"].append(seconds_of(torch_save))
    return times


def _quiet(root: Path) -> None:
    for path in root.glob("paceline/step-*"):
        shutil.rmtree(path)
    (root / "whole.pt").unlink(missing_ok=True)
    os.sync()


def stall(num_parameters: float, rounds: int, scratch: Path) -> dict[str, Any]:
    """Medians of the rounds' ratios, by the clock and by what the processor did; the first save by itself."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        times = run_ranks(stalls_in_turn, 1, num_parameters, rounds, folder, timeout_s=1800)[0]
    first, stalls = times["stall"][0], times["stall"][1:]
    row: dict[str, Any] = {"first_stall": _rounded(first.clock_s), "first_stall_processor": _rounded(first.processor_s)}
    typical_s = {name: statistics.median(one.clock_s for one in seconds[1:]) for name, seconds in times.items()}
    for name, seconds in times.items():
        row[name] = _rounded(typical_s[name])
        row[f"{name}_processor"] = _rounded(statistics.median(one.processor_s for one in seconds[1:]))
    for name in ("copy", "torch_save"):
        pairs = list(zip(stalls, times[name][1:], strict=True))
        ratios = [mine.clock_s / other.clock_s for mine, other in pairs]
        row[f"over_{name}"] = _rounded(statistics.median(ratios))
        row[f"over_{name}_processor"] = _rounded(
            statistics.median(mine.processor_s / other.processor_s for mine, other in pairs)
        )
        row[f"over_{name}_rounds"] = [_rounded(ratio) for ratio in ratios]
        row[f"first_over_{name}"] = _rounded(first.clock_s / typical_s[name])
    return row


def _rounded(number: float) -> float:
    return round(number, 3)


def steps_in_turn(num_parameters: float, rounds: int, folder: str) -> tuple[list[Seconds], list[Seconds], list[float]]:
    """One worker with one thread: the steps that fall wholly into a write, and as many after it, in turn.

    Returns:
        Those of the first kind, those of the second, and how long each write took.
    """
    torch.manual_seed(0)
    keep_freed_memory()
    model = gpt(num_parameters)
    optimizer = trained(model)
    root = Path(folder)
    saver = Paceline(root / "paceline", model, optimizer)
    tokens = cycle(torch.randint(0, 256, (8, 1, TOKENS + 1)))

    def step() -> None:
        batch = next(tokens)
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    writing: list[Seconds] = []
    quiet: list[Seconds] = []
    writes_s: list[float] = []
    for _ in range(3):
        step()
    for number in range(rounds):
        _quiet(root)
        began = time.perf_counter()
        saver.save(number)
        within: list[Seconds] = []
        while saver.is_writing:
            within.append(seconds_of(step))
        writes_s.append(time.perf_counter() - began)
        writing += within[:-1]  # in the last one it ended
        _quiet(root)
        quiet += [seconds_of(step) for _ in within]
    return writing, quiet, writes_s


def background(num_parameters: float, rounds: int, scratch: Path) -> dict[str, Any]:
    """Step time while a checkpoint is written over that without, by the clock and by what the processor did."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        writing, quiet, writes_s = run_ranks(steps_in_turn, 1, num_parameters, rounds, folder, timeout_s=1800)[0]
    if not writing:
        return {"num_steps": 0}  # each write was over before a step was
    row: dict[str, Any] = {"num_steps": len(writing), "write_s": _rounded(statistics.median(writes_s))}
    for name, figure in (("step", _clock_s), ("step_processor", _processor_s)):
        during, without = ([figure(step) for step in steps] for steps in (writing, quiet))
        row[f"{name}_writing_s"] = _rounded(statistics.mean(during))
        row[f"{name}_quiet_s"] = _rounded(statistics.mean(without))
        row[f"{name}_ratio"] = _rounded(statistics.mean(during) / statistics.mean(without))
        row[f"{name}_ratio_of_medians"] = _rounded(statistics.median(during) / statistics.median(without))
    return row


def _clock_s(seconds: Seconds) -> float:
    return seconds.clock_s


def _processor_s(seconds: Seconds) -> float:
    return seconds.processor_s


def say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
