"""What this machine's GPUs do with Paceline, on one page: tests, every way to train, steps, recipes; `make gpu`.

    python -m benchmarks.gpu --out runs/gpu [--data DIR] [--minutes 10]

Where torch finds no GPU, tests, ways to train and recipes run on simulated ones: their results count, and nothing is
timed. On real ones, a way to train counts as right within 1e-3 of CPUs, or five times what simulated ones are allowed:
they add in another order. No real GPU has confirmed these limits yet. What would begin after the minutes are over is
left out, and the page says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from tests.kit.sim_gpu.build import build, obstacle
from tests.kit.sim_gpu.workers import run_on_gpus
from tests.kit.workers import run_ranks
from tests.old.operations import CASES, our_steps, plain_step
from tests.old.ranks.training import images, largest_difference, train
from tests.old.sim_gpu.cells import Cell, cells, run_cells

from paceline.workflows.jobs import resolve_job

ROOT = Path(__file__).parents[1]
RECIPES = {"cifar10-fast": None, "cifar10-one-gpu": None, "cifar10-efficientnet-b7": 200}
"""Those for GPUs, and after how many steps each ends; None: as the recipe says."""
_SIMULATED_STEPS, _SIMULATED_BATCH = 2, 8
_TIMED = ("lenet", "resnet20", "resnet18", "gpt")
_FIRST_STEPS, _TIMED_STEPS = 20, 100
_MOST_WORDS = 300
"""So many characters of the reason for a failure are shown."""
_LEAST_S = 20.0
"""What is left of the minutes for a part to begin."""
_FAREWELL_S = 10.0
"""What a command has to say what it knows, once its time is over."""


@dataclass(frozen=True)
class Part:
    """One part of the page: a table."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    is_good: bool = True


def run_suite(folder: str, out: Path, spread: str, left_s: float) -> Part:
    """All tests of a folder, by pytest."""
    result, began = out / f"{Path(folder).name}.xml", time.monotonic()
    command = [sys.executable, "-m", "pytest", spread, folder, f"--junitxml={result}"]
    result.unlink(missing_ok=True)
    exit_code = None
    with (out / f"{Path(folder).name}.log").open("w") as log, contextlib.suppress(subprocess.TimeoutExpired):
        exit_code = run_within(command, left_s, stdout=log, stderr=log, end_by=signal.SIGINT).returncode
    headings, title = ("test", "result", "why"), f"{folder} ({time.monotonic() - began:.0f} s)"
    if not result.exists():
        return Part(title, headings, [["all tests", f"not done within {left_s:.0f} s", ""]], is_good=False)
    bad: list[Sequence[str]] = []
    good: list[Sequence[str]] = []
    for case in ElementTree.parse(result).iter("testcase"):
        found = {child.tag: child.get("message", "") for child in case}
        is_bad = bool(found.keys() & {"failure", "error"})
        ended = "failed" if is_bad else "skipped" if "skipped" in found else "passed"
        why = " ".join(found.get("failure", found.get("error", found.get("skipped", ""))).split())[:_MOST_WORDS]
        (bad if is_bad else good).append([str(case.get("name")), ended, why])
    if exit_code is None:
        bad.append(["the others", f"not done within {left_s:.0f} s", ""])
    return Part(title, headings, [*bad, *good], is_good=exit_code == 0 and bool(good))


def run_within(
    command: Sequence[str], left_s: float, end_by: signal.Signals = signal.SIGKILL, **streams: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command; when the time is over, it is ended, and all that it has started.

    Args:
        end_by: the signal that ends it, a moment before everything is killed.

    Raises:
        subprocess.TimeoutExpired: the time was over.
    """
    running = subprocess.Popen(command, cwd=ROOT, text=True, start_new_session=True, **streams)
    try:
        written = running.communicate(timeout=left_s - _FAREWELL_S)
        return subprocess.CompletedProcess(command, running.returncode, *written)
    except subprocess.TimeoutExpired:
        running.send_signal(end_by)
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(_FAREWELL_S)
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):  # workers that outlive it
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def run_matrix(num_gpus: int, left_s: float) -> Part:
    """Every way to train on so many real GPUs: the largest relative difference to CPUs, and what is allowed."""
    deadline = time.monotonic() + left_s
    chosen = cells(num_gpus)
    on_gpus = run_ranks(run_cells_on_gpus, num_gpus, chosen, timeout_s=left_s)[0]
    on_cpus = run_ranks(run_cells, num_gpus, "cpu", chosen, timeout_s=max(1.0, deadline - time.monotonic()))[0]
    found = [
        (cell.name, largest_difference(on_gpus[cell.name], on_cpus[cell.name]), max(1e-3, 5 * cell.tolerance))
        for cell in chosen
        if cell.name in on_gpus
    ]
    rows = [[name, f"{difference:.1e}", f"{allowed:.0e}"] for name, difference, allowed in found]
    is_good = bool(found) and all(difference <= allowed for _, difference, allowed in found)
    return Part(f"Every way to train, {_gpus(num_gpus)}", ("way", "beside CPUs", "allowed"), rows, is_good)


def run_cells_on_gpus(chosen: Sequence[Cell]) -> object:
    """`run_cells` where the harness of the tests has chosen CPUs."""
    os.environ["PACELINE_DEVICE"] = "cuda"
    return run_cells("cuda", chosen)


def run_recipe(name: str, num_gpus: int, data: Path | None, out: Path, left_s: float) -> Part:
    """A recipe on so many real GPUs."""
    if data is None:
        return Part(f"{name}, {_gpus(num_gpus)}", ("result",), [["left out: give --data"]], is_good=False)
    folder = out / f"{name}-{num_gpus}"
    command = [sys.executable, "-m", "paceline", "train", name, "-n", str(num_gpus), "--data", str(data / "cifar10")]
    command += ["--quiet", "--out", str(folder), "--set", "checkpoint.every_epoch=false"]
    if RECIPES[name] is not None:
        command += ["--max-steps", str(RECIPES[name])]
    done = run_within(command, left_s, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if done.returncode:
        return Part(f"{name}, {_gpus(num_gpus)}", ("value", ""), [["failed", done.stderr[-2000:]]], is_good=False)
    record = json.loads((folder / "record.json").read_text())
    asked = ("steps", "train_s", "samples_per_s", "accuracy", "notes")
    rows = [[key, json.dumps(record[key])] for key in asked]
    return Part(f"{name}, {_gpus(num_gpus)}", ("value", ""), rows)


def simulate_recipe(name: str, left_s: float) -> Part:
    """The first steps of a recipe on a simulated GPU, with small batches of random images."""
    (found,) = run_on_gpus(build(), _simulated_steps, 1, name, timeout_s=left_s)
    losses = [f"{loss:.3f}" for loss in found["losses"]]
    title = f"{name}: {len(losses)} steps of {_SIMULATED_BATCH} random images, 1 simulated GPU"
    rows = [["precision", found["precision"]], ["losses", ", ".join(losses)]]
    return Part(title, ("value", ""), rows, is_good=all(map(math.isfinite, found["losses"])))


def _simulated_steps(_native: Any, name: str) -> dict[str, Any]:
    job = resolve_job(name).with_values(global_batch_size=_SIMULATED_BATCH, virtual_shards=2)
    seen = images(_SIMULATED_STEPS * _SIMULATED_BATCH, (3, 32, 32))
    outcome = train(job, seen, max_steps=_SIMULATED_STEPS, device_kind="cuda")
    return {"precision": outcome.precision, "losses": outcome.losses}


def time_steps(name: str, left_s: float) -> Part:
    """Steps of a small model on one real GPU, beside a plain loop over the same layers."""
    (found,) = run_ranks(measure_steps, 1, name, timeout_s=left_s)
    rows = [[way, f"{1e3 * step_s:.2f}", f"{peak_bytes / 2**20:.0f}"] for way, (step_s, peak_bytes) in found.items()]
    return Part(f"Steps of {name}, 8 virtual shards, 1 GPU", ("way", "ms a step", "MiB at most"), rows)


def measure_steps(
    name: str, num_first: int = _FIRST_STEPS, num_timed: int = _TIMED_STEPS
) -> dict[str, tuple[float, int]]:
    """Seconds of a step after the first ones, and the most bytes of the GPU, by way; data comes from host memory."""
    os.environ["PACELINE_DEVICE"] = "cuda"
    case, num_steps = CASES[name], num_first + num_timed
    ways: dict[str, Callable[[], Iterable[Callable[[], object]]]] = {
        "a plain loop, its batch on the GPU": lambda: [plain_step(case, "cuda")] * num_steps,
        "numeric": lambda: our_steps(case, "numeric", num_steps, "cuda"),
        "bitwise": lambda: our_steps(case, "bitwise", num_steps, "cuda"),
    }
    found = {}
    for way, begin in ways.items():
        torch.cuda.reset_peak_memory_stats()
        for number, step in enumerate(begin()):
            if number == num_first:
                torch.cuda.synchronize()
                began = time.perf_counter()
            step()
            if number + 1 == num_steps:
                torch.cuda.synchronize()
                found[way] = (time.perf_counter() - began) / num_timed, torch.cuda.max_memory_allocated()
    return found


def parts(out: Path, data: Path | None, num_gpus: int) -> Iterator[tuple[str, Callable[[float], Part]]]:
    """What the page consists of, by name: each is given the seconds that are left."""
    if not num_gpus:
        for name in RECIPES:
            yield name, partial(simulate_recipe, name)
        yield "tests", partial(run_suite, "tests/old/sim_gpu", out, "-n2")
        return
    yield "tests", partial(run_suite, "tests/old/gpu", out, "-n0")
    counts = [count for count in (1, 2, 4, 8) if count <= num_gpus]
    for count in counts[:3]:
        yield f"matrix of {count}", partial(run_matrix, count)
    for name in _TIMED:
        yield f"steps of {name}", partial(time_steps, name)
    for name, num_steps in RECIPES.items():
        for count in counts if num_steps else counts[:1]:
            yield f"{name} on {count}", partial(run_recipe, name, count, data, out)


def write_page(out: Path, data: Path | None, minutes: float) -> bool:
    """Runs everything and writes page.html; whether nothing failed."""
    out.mkdir(parents=True, exist_ok=True)
    deadline, num_gpus = time.monotonic() + 60 * minutes, torch.cuda.device_count()
    if not num_gpus and (why := obstacle()):
        sys.exit(f"There is no GPU, and none can be simulated: {why}.")
    done: list[Part] = []
    for name, run in parts(out, data, num_gpus):
        left_s = deadline - time.monotonic()
        if left_s < _LEAST_S:
            left_out = [[f"left out: the {minutes:g} minutes were over"]]
            done.append(Part(name, ("result",), left_out, is_good=False))
            continue
        try:
            done.append(run(math.floor(left_s)))
        except (AssertionError, TimeoutError, subprocess.TimeoutExpired) as problem:
            done.append(Part(name, ("failed",), [[str(problem)[-2000:]]], is_good=False))
        _write(out, done, num_gpus)
    _write(out, done, num_gpus)
    return all(part.is_good for part in done)


def _write(out: Path, done: Sequence[Part], num_gpus: int) -> None:
    (out / "page.html").write_text(_page(done, num_gpus), encoding="utf-8")


def _page(done: Sequence[Part], num_gpus: int) -> str:
    devices = Counter(torch.cuda.get_device_name(index) for index in range(num_gpus))
    named = ", ".join(f"{number} {name}" for name, number in devices.items()) or "no GPU"
    place = f"{platform.node()}, torch {torch.__version__}, {named}"
    said = place if num_gpus else f"{place}: these GPUs are simulated. Results count, times and memory do not."
    style = resources.files("paceline.report").joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Paceline on GPUs</title>'
        f"<style>{style}</style></head><body><header><h1>Paceline on GPUs</h1><p>{escape(said)}</p></header>"
        f"<main>{_summary(done)}{''.join(map(_section, done))}</main></body></html>\n"
    )


def _summary(done: Sequence[Part]) -> str:
    bad = [part.title for part in done if not part.is_good]
    said = f"{len(done) - len(bad)} of {len(done)} parts are good"
    return f"<p>{escape(': not so '.join([said, '; '.join(bad)]) if bad else said)}.</p>"


def _section(part: Part) -> str:
    heading = "".join(f"<th>{escape(one)}</th>" for one in part.headings)
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
        for name, *cells in part.rows
    )
    failed = "" if part.is_good else ": failed"
    return (
        f"<section><h2>{escape(part.title)}{failed}</h2>"
        f'<table class="values"><thead><tr>{heading}</tr></thead><tbody>{rows}</tbody></table></section>'
    )


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=None, help="with mnist/ and cifar10/ in it")
    parser.add_argument("--minutes", type=float, default=10.0, help="nothing begins after them, nothing goes on")
    arguments = parser.parse_args()
    succeeded = write_page(arguments.out, arguments.data, arguments.minutes)
    print(arguments.out / "page.html")
    sys.exit(0 if succeeded else 1)
