"""Forecast beside measurement: what `paceline probe` alone lets the planner say, and what runs then do.

    python -m benchmarks.forecast --data DIR [--out DIR] [--only mnist|cifar10|perceptron] [--rates 200e6,1e9]

DIR holds mnist/ and cifar10/. One node with 1 and 2 workers; two nodes of two workers, built from network namespaces
(needs root and sshd), on links of every rate, under each algorithm that Paceline would consider. The planner sees
nothing but the cluster.json that the probe wrote.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.hosts import cluster as namespaces
from tests.hosts.sshd import ssh_between

from paceline.cli.options import resolve_job
from paceline.plan.forecast import Question, forecast
from paceline.spec import Cluster, Job, RunRecord

BETWEEN_NODES = ("all_reduce", "ring", "hierarchical")
STEPS = 25
PROBE_BUDGET_S = 40
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Case:
    """A job, as a recipe with changes."""

    recipe: str
    settings: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        return [self.recipe, *(word for setting in self.settings for word in ("--set", setting))]


CASES = {
    "mnist": Case("mnist-lenet", ("global_batch_size=256", "virtual_shards=4", "data.train_limit=12800")),
    "cifar10": Case("cifar10-resnet18", ("global_batch_size=64", "virtual_shards=4", "data.train_limit=3200")),
    "perceptron": Case(
        "mnist-lenet",
        (
            "name=perceptron",
            "model=benchmarks.hosts_training:perceptron",
            "global_batch_size=128",
            "virtual_shards=4",
            "data.train_limit=6400",
            "optim.lr=0.02",
        ),
    ),
}


@dataclass(frozen=True)
class Row:
    """One run beside its forecast."""

    case: str
    place: str
    algorithm: str
    forecast_s: float
    measured_s: float
    is_choice: bool
    """Whether the planner would have taken this algorithm."""

    @property
    def ratio(self) -> float:
        return self.forecast_s / self.measured_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=None, help="folder of the runs; a temporary one")
    parser.add_argument("--only", choices=tuple(CASES), default=None)
    parser.add_argument("--rates", default="200e6,1e9", help="bits/s of the links between nodes; empty: one node alone")
    arguments = parser.parse_args()
    rates = [float(rate) for rate in arguments.rates.split(",") if rate]
    out = (arguments.out or Path(tempfile.mkdtemp(prefix="paceline-forecast-"))).resolve()
    rows = []
    for name in [arguments.only] if arguments.only else CASES:
        for row in measure(name, arguments.data.resolve(), out / name, rates):
            print(f"{row.case} {row.place} {row.algorithm}: {row.ratio:.2f}", file=sys.stderr, flush=True)
            rows.append(row)
    print(markdown(rows))


def measure(name: str, data: Path, out: Path, rates: Sequence[float]) -> Iterator[Row]:
    """Probe, forecast and train: on one node, then on two nodes at each rate."""
    case = CASES[name]
    words = [*case.words, "--data", str(data / ("cifar10" if name == "cifar10" else "mnist"))]
    job = resolve_job(case.recipe, list(case.settings), None)
    with (
        namespaces.Cluster(num_nodes=2, rate_bits_per_s=1e9) as nodes,
        tempfile.TemporaryDirectory() as keys,
        ssh_between(nodes.nodes, Path(keys)),
    ):
        yield from _at(nodes, job, name, words, out / "one", "one node", [], [1, 2], ["all_reduce"])
        for rate in rates:
            nodes.set_rate(rate)
            hosts = ["--hosts", "node0:2,node1:2"]
            place = f"2x2, {rate / 1e6:.0f} Mbit/s"
            yield from _at(nodes, job, name, words, out / f"{rate:.0e}", place, hosts, [4], BETWEEN_NODES)


def _at(
    nodes: namespaces.Cluster,
    job: Job,
    case: str,
    words: Sequence[str],
    out: Path,
    place: str,
    hosts: Sequence[str],
    counts: Sequence[int],
    algorithms: Sequence[str],
) -> Iterator[Row]:
    out.mkdir(parents=True)
    _paceline(nodes, ["probe", *words, *hosts, "--out", str(out / "cluster.json"), "--budget", str(PROBE_BUDGET_S)])
    found = forecast(job, Cluster.load(out / "cluster.json"), sorted({1, *counts}), Question())
    expected = {row.devices: row for row in found.rows}
    for count in counts:
        for algorithm in algorithms if count > 1 else ["all_reduce"]:
            run_dir = out / f"{count}-{algorithm}"
            threads = ["--threads", "1"]
            run = ["train", *words, *hosts, "-n", str(count), *threads, "--algorithm", algorithm, "--quiet"]
            _paceline(nodes, [*run, "--max-steps", str(STEPS), "--out", str(run_dir), "--cluster", str(out / "none")])
            record = RunRecord.load(run_dir / "record.json")
            row = expected[count]
            yield Row(
                case,
                f"{place}, {count} workers" if count != 4 else place,
                algorithm,
                row.step_s,
                record.step_time.total_s,
                count == 1 or row.algorithm == algorithm,
            )


def _paceline(nodes: namespaces.Cluster, words: Sequence[str]) -> None:
    process = nodes.nodes[0].exec([sys.executable, "-m", "paceline", *words], env={"PACELINE_DEVICE": "cpu"})
    if process.wait(TIMEOUT_S) != 0:
        raise SystemExit(f"paceline {' '.join(words)} failed:\n{process.output}")


def markdown(rows: Sequence[Row]) -> str:
    head = "| job | place | algorithm | forecast of the best, ms | measured, ms | ratio | the planner's choice |\n"
    lines = (
        f"| {row.case} | {row.place} | {row.algorithm} | {1e3 * row.forecast_s:.1f} | {1e3 * row.measured_s:.1f} "
        f"| {row.ratio:.2f} | {'yes' if row.is_choice else ''} |"
        for row in rows
    )
    return head + "|---|---|---|---|---|---|---|\n" + "\n".join(lines) + "\n" + json.dumps([vars(row) for row in rows])


if __name__ == "__main__":
    main()
