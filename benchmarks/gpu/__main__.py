"""The GPU page, on a machine where nothing is installed but torch and what Paceline imports:

    PYTHONPATH=src python3 -m benchmarks.gpu --out DIR [--data DIR] [--minutes 9]

Parts come in the order of their worth. Each has a process of its own and a share of the minutes; results.jsonl has a
line for everything that is found, at once, and page.html is written after each part. Without a GPU they are tiny: on
simulated GPUs where torch is built for CPUs and there is a compiler (programs that a part starts compute on CPUs even
then), else on CPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import platform
import signal
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from html import escape
from pathlib import Path
from typing import Any

import psutil

from .notes import RESULTS, Device, Notes

_FORK = multiprocessing.get_context("fork")  # of a process that has not loaded torch
_PARTS = {  # title: module, function, share of the minutes
    "The law on silicon": (".law", "law", 110),
    "A step beside a plain loop": (".steps", "steps", 170),
    "CIFAR-10: an epoch of EfficientNet-B7, and 94 %": (".commands", "cifar10", 130),
    "What the machine says, and forecasts": (".commands", "machine", 70),
    "Checkpoint, restart, a killed worker": (".commands", "recovery", 50),
}
_RESERVE_S, _FAREWELL_S = 20.0, 3.0
_PR_SET_CHILD_SUBREAPER = 36
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 84rem; padding: 0 1rem; color: #16202c }
table { border-collapse: collapse; margin: .5rem 0 1.2rem; font-variant-numeric: tabular-nums; font-size: 13.5px }
th, td { text-align: left; padding: .25rem .7rem; border-bottom: 1px solid #d9dfe6; vertical-align: top }
caption { text-align: left; font-weight: 600; padding: .4rem 0 }
tr.bad td, pre { background: #fdeeee } pre { padding: .7rem; white-space: pre-wrap }
"""
Line = dict[str, Any]


def find_device() -> tuple[Device, str]:
    """What the parts run on, and what the page says of it."""
    import torch

    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        gpu = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, {memory:.0f} GiB"
        return "cuda", f"torch {torch.__version__}, {gpu}"
    from tests.kit.sim_gpu.build import obstacle

    said = f"torch {torch.__version__}, no GPU: the parts are tiny, and their times say nothing"
    if (why := obstacle()) is None:
        return "simulated", f"{said}. The first two are on simulated GPUs, the others on CPUs"
    return "cpu", f"{said}. They are on CPUs: {why}"


def run_part(module: str, function: str, notes: Notes) -> None:
    """The process of a part."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with (notes.scratch / "log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    notes.run(getattr(importlib.import_module(module, __package__), function)(notes))


def follow(module: str, function: str, notes: Notes) -> None:
    """Run a part as long as it may; then whatever it has started ends, in whatever session."""
    began, others = time.monotonic(), set(psutil.Process().children(recursive=True))
    running = _FORK.Process(target=run_part, args=(module, function, notes))
    try:
        running.start()
        running.join(notes.left_s + _FAREWELL_S)
        exit_code = running.exitcode
    finally:
        started = set(psutil.Process().children(recursive=True)) - others
        for ending in (psutil.Process.terminate, psutil.Process.kill):  # a moment to say goodbye, then no more
            for one in started:
                with contextlib.suppress(psutil.NoSuchProcess):
                    ending(one)
            started = set(psutil.wait_procs(started, _FAREWELL_S)[1])
    if exit_code != 0:
        log = (notes.scratch / "log").read_text(errors="replace")
        notes.write(failure=f"the end of its output:\n{log[-5000:]}")
    status = {0: "done", None: "stopped at its limit"}.get(exit_code, f"exit code {exit_code}")
    notes.write(status=status, seconds=round(time.monotonic() - began, 1))


def write_page(out: Path, data: Path | None, minutes: float) -> bool:
    """Run all parts, each for its share of the time that is left, and write the page; whether everything is good."""
    deadline = time.monotonic() + 60 * minutes - _RESERVE_S
    out.mkdir(parents=True, exist_ok=True)
    (out / RESULTS).write_text("")
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a part leaves when it dies is a child of this process
    with ProcessPoolExecutor(1, _FORK) as pool:
        device, said = pool.submit(find_device).result()
    place = f"{platform.node()}, {os.cpu_count()} cores, Python {platform.python_version()}, {said}."
    shares = [share for *_, share in _PARTS.values()]
    lines: list[Line] = []
    with tempfile.TemporaryDirectory(prefix="paceline-gpu-page-", ignore_cleanup_errors=True) as scratch:
        for number, (title, (module, function, share)) in enumerate(_PARTS.items()):
            limit_s = (deadline - time.monotonic()) * share / sum(shares[number:]) - 2 * _FAREWELL_S
            notes = Notes(title, out, Path(scratch) / str(number), data, device, time.monotonic() + limit_s)
            notes.scratch.mkdir()
            follow(module, function, notes)
            lines = [json.loads(line) for line in (out / RESULTS).read_text().splitlines()]
            (out / "page.html").write_text(page(place, lines), encoding="utf-8")
            print(f"{title}: {lines[-1]['status']}, {lines[-1]['seconds']} s of {limit_s:.0f} s", flush=True)
    return all(map(is_good, lines))


def is_good(line: Line) -> bool:
    return bool(line.get("good", True)) and "failure" not in line and line.get("status", "done") == "done"


def page(place: str, lines: list[Line]) -> str:
    """The page of what is known so far."""
    ends = [line for line in lines if "status" in line]
    sections = [_table("Parts", [{"values": line, "good": is_good(line)} for line in ends])]
    for part in dict.fromkeys(line["part"] for line in lines):
        own = [line for line in lines if line["part"] == part]
        sections.append(f"<h2>{escape(part)}</h2>")
        for title in dict.fromkeys(line["table"] for line in own if "table" in line):
            sections.append(_table(title, [line for line in own if line.get("table") == title]))
        sections += [f"<pre>{escape(line['failure'])}</pre>" for line in own if "failure" in line]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Paceline on a GPU</title>'
        f"<style>{_STYLE}</style></head><body><h1>Paceline on a GPU</h1><p>{escape(place)}</p>{''.join(sections)}"
        "</body></html>\n"
    )


def _table(title: str, rows: list[Line]) -> str:
    headings = list(dict.fromkeys(heading for row in rows for heading in row["values"]))
    found = [f"<tr>{''.join(f'<th>{escape(heading)}</th>' for heading in headings)}</tr>"]
    for row in rows:
        cells = [f"<td>{escape(str(row['values'].get(heading, '')))}</td>" for heading in headings]
        found.append(f"<tr{'' if row['good'] else ' class=bad'}>{''.join(cells)}</tr>")
    return f"<table><caption>{escape(title)}</caption>{''.join(found)}</table>"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="a folder with cifar10/train.parquet and test.parquet")
    parser.add_argument("--minutes", type=float, default=9.0, help="everything has ended by then")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what runs is ended, too
    root = Path(__file__).parents[2]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root / "src"), str(root)])  # also in other folders
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # who asks CUDA itself whether it is there cannot fork any more
    is_whole = write_page(given.out.resolve(), given.data and given.data.resolve(), given.minutes)
    print(given.out / "page.html")
    sys.exit(0 if is_whole else 1)
