"""What this machine's GPUs do with Paceline, on one page: tests, every way to train, throughput; `make gpu`.

    python -m benchmarks.gpu --out runs/gpu [--data DIR]

Where torch finds no GPU, tests and ways to train run on simulated ones, and nothing is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import torch
from tests.ranks.harness import run_ranks
from tests.ranks.training import largest_difference
from tests.sim_gpu.cells import cells, run_cells

ROOT = Path(__file__).parents[1]
_SUITE_S = 1800


@dataclass(frozen=True)
class Suite:
    """How a part of the tests ended."""

    folder: str
    cases: dict[str, str]
    """passed, failed or skipped, by name."""
    seconds: float


def run_suite(folder: str, out: Path) -> Suite:
    """All tests of a folder, by pytest."""
    result = out / f"{Path(folder).name}.xml"
    began = time.monotonic()
    with (out / f"{Path(folder).name}.log").open("w") as log:
        command = [sys.executable, "-m", "pytest", folder, f"--junitxml={result}"]
        subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, timeout=_SUITE_S)
    cases = {}
    for case in ElementTree.parse(result).iter("testcase"):
        kinds = {child.tag for child in case}
        ended = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        cases[str(case.get("name"))] = ended
    return Suite(folder, cases, time.monotonic() - began)


def run_matrix(num_gpus: int) -> list[tuple[str, float, float]]:
    """Every way to train on so many real GPUs: its name, the largest relative difference to CPUs, what is allowed."""
    on_gpus = run_ranks(run_cells_on_gpus, num_gpus, num_gpus, timeout_s=600)[0]
    on_cpus = run_ranks(run_cells, num_gpus, "cpu", num_gpus, timeout_s=600)[0]
    return [
        (cell.name, largest_difference(on_gpus[cell.name], on_cpus[cell.name]), cell.tolerance)
        for cell in cells(num_gpus)
        if cell.name in on_gpus
    ]


def run_cells_on_gpus(num_gpus: int) -> object:
    """`run_cells` where the harness of the tests has chosen CPUs."""
    os.environ["PACELINE_DEVICE"] = "cuda"
    return run_cells("cuda", num_gpus)


def throughput(data: Path) -> str:
    """What `benchmarks/throughput.py` prints for both data sets in `data`."""
    printed = []
    for name in ("mnist", "cifar10"):
        command = [sys.executable, "benchmarks/throughput.py", name, "--data", str(data / name)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_SUITE_S)
        printed.append(done.stdout or done.stderr[-2000:])
    return "\n".join(printed)


def write_page(out: Path, data: Path | None) -> bool:
    """Runs everything and writes page.md; whether nothing failed."""
    out.mkdir(parents=True, exist_ok=True)
    num_gpus = torch.cuda.device_count()
    devices = [torch.cuda.get_device_name(index) for index in range(num_gpus)]
    lines = [
        "# Paceline on GPUs",
        "",
        f"{platform.node()}, torch {torch.__version__}, {', '.join(devices) or 'no GPU'}",
    ]
    suites = [run_suite("tests/gpu" if num_gpus else "tests/sim_gpu", out)]
    for suite in suites:
        lines += ["", f"## {suite.folder} ({suite.seconds:.0f} s)", "", "| test | result |", "|---|---|"]
        lines += [f"| {name} | {ended} |" for name, ended in suite.cases.items()]
    is_good = all(ended != "failed" for suite in suites for ended in suite.cases.values())
    for number in [count for count in (1, 2, 4) if count <= num_gpus]:
        lines += ["", f"## Every way to train, {number} GPUs", "", "| way | beside CPUs | allowed |", "|---|---|---|"]
        with contextlib.suppress(AssertionError, TimeoutError):
            lines += [f"| {name} | {found:.1e} | {allowed:.0e} |" for name, found, allowed in run_matrix(number)]
            continue
        lines.append("| failed | | |")
        is_good = False
    if data is not None and num_gpus:
        lines += ["", "## Throughput", "", "```", throughput(data), "```"]
    if not num_gpus:
        lines += ["", "These GPUs were simulated: results count, times and memory do not."]
    (out / "page.md").write_text("\n".join(lines) + "\n")
    return is_good


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=None, help="with mnist/ and cifar10/ in it")
    arguments = parser.parse_args()
    succeeded = write_page(arguments.out, arguments.data)
    print(arguments.out / "page.md")
    sys.exit(0 if succeeded else 1)
