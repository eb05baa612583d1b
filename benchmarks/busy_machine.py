"""Recommendations from probes of a quiet machine and of one with a neighbour that keeps a core busy.

    python -m benchmarks.busy_machine [--job digits-lenet] [--times 10] [--budget 8] [--workers 2]

Probes with and without the neighbour take turns. Printed is, for each, what the load meter saw, the recommendation for
1 … WORKERS devices, the forecast speed-up with its 90 % interval, and whether the recommendation is marked as not
reliable. At the end: how often a recommendation was that of most unmarked quiet probes, how often it was marked, and
how often it was another one and not marked, which must never happen.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import paceline

NEIGHBOUR = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"


@dataclass(frozen=True)
class Outcome:
    """One probe, and the plan from it."""

    has_neighbour: bool
    foreign_share: float
    devices: int
    speedup: float
    low: float
    high: float
    """Of the speed-up: the time of one device over both ends of the interval."""
    is_marked: bool


@contextmanager
def neighbour() -> Iterator[None]:
    """Another process that computes all the time, until this one ends at the latest."""
    process = subprocess.Popen([sys.executable, "-c", NEIGHBOUR])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def outcome(job: str, workers: int, budget_s: float, has_neighbour: bool) -> Outcome:
    with tempfile.TemporaryDirectory() as name, neighbour() if has_neighbour else nullcontext():
        folder = Path(name)
        measured = paceline.probe(job, workers=workers, out=folder / "cluster.json", folder=folder, budget=budget_s)
    forecast = paceline.plan(job, cluster=measured.measured, devices=f"1..{workers}").forecast
    load = measured.timing.load if measured.timing else None
    one, last = forecast.rows[0], forecast.rows[-1]
    return Outcome(
        has_neighbour,
        float("nan") if load is None else load.foreign_share,
        forecast.recommended_devices,
        last.speedup,
        one.step_s / last.high_s,
        one.step_s / last.low_s,
        load is not None and load.is_disturbing,
    )


def summary(outcomes: list[Outcome]) -> str:
    quiet = Counter(one.devices for one in outcomes if not one.has_neighbour and not one.is_marked)
    if not quiet:
        marked = sum(one.is_marked for one in outcomes)
        return f"No probe was undisturbed: {marked} of {len(outcomes)} recommendations are marked as not reliable."
    right = quiet.most_common(1)[0][0]
    lines = [
        f"Undisturbed probes recommend {right}.",
        "",
        "| probes | same | marked | other, unmarked |",
        "|---|---|---|---|",
    ]
    for has_neighbour in (False, True):
        own = [one for one in outcomes if one.has_neighbour == has_neighbour]
        marked = sum(one.is_marked for one in own)
        same = sum(one.devices == right and not one.is_marked for one in own)
        name = "with a neighbour" if has_neighbour else "without"
        lines.append(f"| {name} | {same} | {marked} | {len(own) - same - marked} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default="digits-lenet")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--budget", type=float, default=8.0, help="seconds for a job's timings")
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    print("| neighbour | others' share of the cores | recommended | speed-up (90 %) | marked |\n|---|---|---|---|---|")
    outcomes = []
    for _ in range(asked.times):
        for has_neighbour in (False, True):
            one = outcome(asked.job, asked.workers, asked.budget, has_neighbour)
            outcomes.append(one)
            print(
                f"| {'yes' if has_neighbour else 'no'} | {one.foreign_share:.0%} | {one.devices} "
                f"| {one.speedup:.2f} ({one.low:.2f} to {one.high:.2f}) | {'yes' if one.is_marked else 'no'} |",
                flush=True,
            )
    print(f"\n{summary(outcomes)}")


if __name__ == "__main__":
    main()
