"""Seconds from a fresh clone to the demo, to README's script, to a model of one's own, and to tests that are set up.

    python benchmarks/first_minutes.py [--python python3.11] [--no-tests]

Clones the commit that is checked out here into a temporary folder and runs there what a new user would, line by line,
with an empty home directory but for pip's configuration and cache: run it twice for a warm package cache. Every line is
printed with its wall time, its processor time, all processes together, and the load average beside it; processor time
depends little on how busy the machine is.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lines_changed import ROOT, scripts_in

STEPS = (
    ("install, without tests", "make .venv/.package"),
    ("the demo, installed", "make demo"),
    ("README's script, 1 worker", "python train.py"),
    ("README's script, 2 workers", "paceline launch -n 2 train.py"),
    ("a model of one's own: starter", "paceline new tensors own.npz --out own.py"),
    ("a model of one's own: 2 workers", "paceline launch -n 2 own.py"),
    ("tests, set-up", "make .venv/.ready"),
)
OWN_DATA = """
import numpy
draws = numpy.random.default_rng(0)
inputs = draws.standard_normal((1000, 16), dtype=numpy.float32)
numpy.savez("own.npz", inputs=inputs, targets=(inputs[:, 0] > 0).astype(numpy.int64))
"""
"""Arrays for `paceline new tensors`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the new environment")
    parser.add_argument("--no-tests", action="store_true", help="leave out what the tests need")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="first-minutes-") as folder:
        clone, home = Path(folder, "paceline"), Path(folder, "home")
        home.mkdir()
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        (clone / "train.py").write_text(scripts_in(ROOT / "README.md")["train.py"], encoding="utf-8")
        subprocess.run([options.python, "-c", "import venv"], check=True)
        environment = {
            **os.environ,
            **pip_settings(),
            "HOME": str(home),
            "PATH": f"{clone}/.venv/bin:{os.environ['PATH']}",
            "PYTHON": options.python,
        }
        lines = []
        for name, command in STEPS[: -1 if options.no_tests else None]:
            if "own.npz" in command and not (clone / "own.npz").exists():
                subprocess.run([f"{clone}/.venv/bin/python", "-c", OWN_DATA], cwd=clone, check=True)
            print(f"\n$ {command}", flush=True)
            wall_s, cpu_s = timed(command, clone, environment)
            load = os.getloadavg()[0]
            print(f"# {wall_s:.1f} s, {cpu_s:.1f} processor seconds, load average {load:.1f}", flush=True)
            lines.append(f"| {name} | `{command}` | {wall_s:.1f} | {cpu_s:.1f} | {load:.1f} |")
    print("\n| | command | s | processor s | load |\n|---|---|---|---|---|", *lines, sep="\n")


def pip_settings() -> dict[str, str]:
    """Where pip finds its configuration and its cache although the home directory is another."""
    cache = subprocess.run([sys.executable, "-m", "pip", "cache", "dir"], check=True, capture_output=True, text=True)
    configuration = Path(os.environ.get("XDG_CONFIG_HOME", Path.home() / ".config"), "pip", "pip.conf")
    found = {"PIP_CONFIG_FILE": str(configuration)} if configuration.exists() else {}
    return {"PIP_CACHE_DIR": cache.stdout.strip(), **found}


def timed(command: str, folder: Path, environment: dict[str, str]) -> tuple[float, float]:
    """Wall and processor seconds of a command line and all processes that it waited for."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(["bash", "-ec", command], cwd=folder, env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic() - started, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
