"""The GPU page, on a machine where nothing is installed but torch and what Paceline imports:

    PYTHONPATH=src python3 -m benchmarks.gpu --out DIR [--data DIR] [--minutes 9]

Parts come in the order of their worth. Each has a process of its own and a share of the minutes, and page.html and
results.json are written again whenever one has found something. Without a GPU they are tiny: on simulated GPUs where
torch is built for CPUs and there is a compiler (programs that a part starts compute on CPUs even then), else on CPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from .notes import Device, Notes

ROOT = Path(__file__).parents[2]
_PARTS = {  # name: module, function, title, share of the minutes
    "law": ("law", "cases", "The law on silicon", 110),
    "steps": ("steps", "cases", "A step beside a plain loop", 170),
    "epoch": ("commands", "epoch", "An epoch of EfficientNet-B7", 55),
    "accuracy": ("commands", "accuracy", "CIFAR-10 to 94 %", 75),
    "machine": ("commands", "machine", "What the machine says, and forecasts", 70),
    "recovery": ("commands", "recovery", "Checkpoint, restart, a killed worker", 50),
}
_RESERVE_S, _FAREWELL_S = 20.0, 3.0
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
        return "cuda", f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, {memory:.0f} GiB"
    from tests.kit.sim_gpu.build import obstacle

    if (why := obstacle()) is None:
        return "simulated", "no GPU: tiny parts, the first two on simulated GPUs, the others on CPUs. Times say nothing"
    return "cpu", f"no GPU, and none to simulate ({why}): tiny parts on CPUs. Times say nothing"


def follow(part: dict[str, Any], command: list[str], folder: Path, limit_s: float) -> Iterator[None]:
    """Run a part for as long as it may; yields whenever more of what it finds has come into `part`."""
    began, num_seen, lines, log = time.monotonic(), 0, folder / "lines", folder / "log"
    with log.open("w") as output:
        running = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
    try:
        exit_code = None
        while exit_code is None and time.monotonic() - began < limit_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                exit_code = running.wait(0.5)
            found = lines.read_text().splitlines() if lines.exists() else []
            for line in map(json.loads, found[num_seen:]):
                for key, values in line.items():
                    part[key] += values
            num_seen, part["seconds"] = len(found), round(time.monotonic() - began, 1)
            yield
    finally:
        end(running)
    part["status"] = {0: "done", None: "stopped at its limit"}.get(exit_code, f"exit code {exit_code}")
    if left_out := [name for name in part["planned"] if name not in part["done"]]:
        part["failures"].append(f"no time for: {', '.join(left_out)}")
    if exit_code != 0:
        part["failures"].append(f"the end of its output:\n{log.read_text(errors='replace')[-5000:]}")


def end(running: subprocess.Popen[bytes]) -> None:
    """End a part with all that it has started, in whatever session: a moment to say goodbye, then no more."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        started = [*psutil.Process(running.pid).children(recursive=True), psutil.Process(running.pid)]
        for one in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGTERM)
        for one in psutil.wait_procs(started, _FAREWELL_S)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    running.wait()


def write_page(out: Path, data: list[str], minutes: float) -> bool:
    """Run all parts, each for its share of the time that is left, and write the page; whether everything is good."""
    deadline = time.monotonic() + 60 * minutes - _RESERVE_S
    out.mkdir(parents=True, exist_ok=True)
    this = [sys.executable, "-m", "benchmarks.gpu", "--out", str(out), *data]
    device, said = json.loads(subprocess.check_output([*this, "--part", "device"], cwd=ROOT).splitlines()[-1])
    place = f"{platform.node()}, {os.cpu_count()} cores, Python {platform.python_version()}, {said}."
    parts: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="paceline-gpu-page-") as scratch:
        for name, (_, _, title, weight) in _PARTS.items():
            remaining = sum(one[3] for one in list(_PARTS.values())[len(parts) :])
            limit_s = (deadline - time.monotonic()) * weight / remaining - _FAREWELL_S
            part: dict[str, Any] = {"name": name, "title": title, "status": "running", "seconds": 0.0}
            parts.append(part | {key: [] for key in ("rows", "failures", "planned", "done")})
            folder = Path(scratch) / name
            folder.mkdir()
            options = ["--part", name, "--seconds", str(limit_s), "--scratch", str(folder), "--device", device]
            for _ in follow(parts[-1], [*this, *options], folder, limit_s):
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
    summary = [
        {
            "good": part["status"] == "running" or is_good(part),
            "values": {"part": part["title"], "status": part["status"], "seconds": part["seconds"]}
            | {"cases": f"{len(part['done'])} of {len(part['planned'])}", "problems": len(part["failures"])},
        }
        for part in parts
    ]
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="a folder with cifar10/train.parquet and test.parquet")
    parser.add_argument("--minutes", type=float, default=9.0, help="everything has ended by then")
    for option in ("--part", "--seconds", "--scratch", "--device"):
        parser.add_argument(option, help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])  # also in other folders
    out, data = given.out.resolve(), given.data and given.data.resolve()
    if given.part is None:
        is_whole = write_page(out, [] if data is None else ["--data", str(data)], given.minutes)
        print(out / "page.html")
        return 0 if is_whole else 1
    if given.part == "device":
        print(json.dumps(find_device()))
        return 0
    notes = Notes(out, Path(given.scratch), data, given.device, time.monotonic() + float(given.seconds) - _FAREWELL_S)
    module, function, _, _ = _PARTS[given.part]
    notes.run(getattr(importlib.import_module(f"{__package__}.{module}"), function)(notes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
