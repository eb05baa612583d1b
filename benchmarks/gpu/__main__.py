"""The GPU page, on a machine where nothing is installed but torch and what Paceline imports:

    PYTHONPATH=src python3 -m benchmarks.gpu --out DIR [--data DIR] [--minutes 9]

Parts come in the order of their worth. Each has a process of its own and a share of the minutes, and page.html and
results.json are written again whenever one has found something. Without a GPU they are tiny: on simulated GPUs where
torch is built for CPUs and there is a compiler (programs that a part starts compute on CPUs even then), else on CPUs.
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
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from html import escape
from pathlib import Path
from typing import Any

import psutil

from .notes import Device, Notes

_FORK = multiprocessing.get_context("fork")  # of a process that has not loaded torch
_PARTS = {  # title: module, function, share of the minutes
    "The law on silicon": (".law", "law", 110),
    "A step beside a plain loop": (".steps", "steps", 170),
    "An epoch of EfficientNet-B7": (".commands", "epoch", 55),
    "CIFAR-10 to 94 %": (".commands", "accuracy", 75),
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


def follow(part: dict[str, Any], module: str, notes: Notes) -> Iterator[None]:
    """Run a part as long as it may; yields whenever what it finds may have become more in `part`."""
    began, num_seen, lines = time.monotonic(), 0, notes.scratch / "lines"
    others = set(psutil.Process().children(recursive=True))
    running = _FORK.Process(target=run_part, args=(module, part["name"], notes))
    try:
        running.start()
        is_running = True
        while is_running and notes.left_s > -_FAREWELL_S:
            running.join(0.5)
            is_running = running.is_alive()
            found = lines.read_text().splitlines() if lines.exists() else []
            for line in map(json.loads, found[num_seen:]):
                for key, values in line.items():
                    part[key] += values
            num_seen, part["seconds"] = len(found), round(time.monotonic() - began, 1)
            yield
    finally:
        exit_code = running.exitcode
        end(others)
    part["status"] = {0: "done", None: "stopped at its limit"}.get(exit_code, f"exit code {exit_code}")
    if left_out := [name for name in part["planned"] if name not in part["done"]]:
        part["failures"].append(f"no time for: {', '.join(left_out)}")
    if exit_code != 0:
        log = (notes.scratch / "log").read_text(errors="replace")
        part["failures"].append(f"the end of its output:\n{log[-5000:]}")


def end(others: set[psutil.Process]) -> None:
    """End what a part has started, and the part, in whatever session: a moment to say goodbye, then no more."""
    started = set(psutil.Process().children(recursive=True)) - others
    for ending in (psutil.Process.terminate, psutil.Process.kill):
        for one in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                ending(one)
        started = set(psutil.wait_procs(started, _FAREWELL_S)[1])


def write_page(out: Path, data: Path | None, minutes: float) -> bool:
    """Run all parts, each for its share of the time that is left, and write the page; whether everything is good."""
    deadline = time.monotonic() + 60 * minutes - _RESERVE_S
    out.mkdir(parents=True, exist_ok=True)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a part leaves when it dies is a child of this process
    with ProcessPoolExecutor(1, _FORK) as pool:
        device, said = pool.submit(find_device).result()
    place = f"{platform.node()}, {os.cpu_count()} cores, Python {platform.python_version()}, {said}."
    parts: list[dict[str, Any]] = []
    shares = [share for *_, share in _PARTS.values()]
    with tempfile.TemporaryDirectory(prefix="paceline-gpu-page-", ignore_cleanup_errors=True) as scratch:
        for number, (title, (module, function, share)) in enumerate(_PARTS.items()):
            limit_s = (deadline - time.monotonic()) * share / sum(shares[number:]) - 2 * _FAREWELL_S
            parts.append({"name": function, "title": title, "status": "running", "seconds": 0.0})
            parts[-1] |= {key: [] for key in ("rows", "failures", "planned", "done")}
            notes = Notes(out, Path(scratch) / str(number), data, device, time.monotonic() + limit_s)
            notes.scratch.mkdir()
            for _ in follow(parts[-1], module, notes):
                _write(out, place, parts)
            _write(out, place, parts)
            print(f"{title}: {parts[-1]['status']}, {parts[-1]['seconds']:.0f} s of {limit_s:.0f} s", flush=True)
    return all(map(is_good, parts))


def is_good(part: dict[str, Any]) -> bool:
    return part["status"] == "done" and not part["failures"] and all(row["good"] for row in part["rows"])


def _write(out: Path, place: str, parts: list[dict[str, Any]]) -> None:
    (out / "results.json").write_text(json.dumps({"machine": place, "parts": parts}, indent=1), encoding="utf-8")
    (out / "page.html").write_text(page(place, parts), encoding="utf-8")


def page(place: str, parts: list[dict[str, Any]]) -> str:
    """The page of what is known so far."""
    summary = []
    for part in parts:
        values = {"part": part["title"], "status": part["status"], "seconds": part["seconds"]}
        values |= {"cases": f"{len(part['done'])} of {len(part['planned'])}", "problems": len(part["failures"])}
        summary.append({"values": values, "good": part["status"] == "running" or is_good(part)})
    sections = [_table("Parts", summary)]
    for part in parts:
        sections.append(f"<h2>{escape(part['title'])}</h2>")
        for title in dict.fromkeys(row["table"] for row in part["rows"]):
            sections.append(_table(title, [row for row in part["rows"] if row["table"] == title]))
        sections += [f"<pre>{escape(text)}</pre>" for text in part["failures"]]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Paceline on a GPU</title>'
        f"<style>{_STYLE}</style></head><body><h1>Paceline on a GPU</h1><p>{escape(place)}</p>{''.join(sections)}"
        "</body></html>\n"
    )


def _table(title: str, rows: list[dict[str, Any]]) -> str:
    headings = list(dict.fromkeys(heading for row in rows for heading in row["values"]))
    lines = [f"<tr>{''.join(f'<th>{escape(heading)}</th>' for heading in headings)}</tr>"]
    for row in rows:
        cells = [f"<td>{escape(str(row['values'].get(heading, '')))}</td>" for heading in headings]
        lines.append(f"<tr{'' if row['good'] else ' class=bad'}>{''.join(cells)}</tr>")
    return f"<table><caption>{escape(title)}</caption>{''.join(lines)}</table>"


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
