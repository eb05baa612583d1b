"""Forecast beside measurement: what `paceline probe` alone lets the planner say, and what runs then do.

    python -m benchmarks.forecast --data DIR [--out DIR] [--only mnist|cifar10|perceptron] [--rates 200e6,1e9]
        [--one-node no] [--steps 25] [--rounds 1]

DIR holds mnist/ and cifar10/. One node with 1 and 2 workers; two nodes of two workers, built from network namespaces
(needs root and sshd), on links of every rate, under each algorithm that Paceline would consider. The planner sees
nothing but the cluster.json that the probe wrote.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.kit.nodes import cluster as namespaces
from tests.kit.nodes.sshd import ssh_between

from paceline.plan.forecast import forecast
from paceline.plan.inputs import ForecastRequest
from paceline.spec import AlgorithmName, Cluster, RunRecord
from paceline.spec.codec import to_mapping
from paceline.workflows.jobs import resolve_job

ON_ONE_NODE: tuple[AlgorithmName, ...] = ("all_reduce", "hierarchical")
BETWEEN_NODES: tuple[AlgorithmName, ...] = ("all_reduce", "hierarchical", "ring")
PROBE_BUDGET_S = 120
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Case:
    """A job, as a recipe with changes."""

    recipe: str
    data: str
    """Folder of its data."""
    settings: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        return [self.recipe, *(word for setting in self.settings for word in ("--set", setting))]


CASES = {
    "mnist": Case(
        "mnist-lenet",
        "mnist",
        ("global_batch_size=256", "virtual_shards=4", "data.train_limit=12800", "data.test_limit=256"),
    ),
    "cifar10": Case(
        "cifar10-resnet18",
        "cifar10",
        ("global_batch_size=64", "virtual_shards=4", "data.train_limit=3200", "data.test_limit=64"),
    ),
    "perceptron": Case(
        "mnist-lenet",
        "mnist",
        (
            "name=perceptron",
            "model=benchmarks.hosts_training:perceptron",
            "global_batch_size=128",
            "virtual_shards=4",
            "data.train_limit=6400",
            "data.test_limit=128",
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
    forecast_parts_s: tuple[float, float, float]
    """Computing, waiting for gradients, and the rest."""
    measured_parts_s: tuple[float, float, float]
    """Computing with the optimizer, waiting for gradients, and data."""
    is_choice: bool
    """Whether the planner would have taken this algorithm."""
    stolen: tuple[float, float]
    """Of the processors' time during the probe and during the run, what other virtual machines took."""

    @property
    def ratio(self) -> float:
        return self.forecast_s / self.measured_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=None, help="folder of the runs; a temporary one")
    parser.add_argument("--only", choices=tuple(CASES), default=None)
    parser.add_argument("--rates", default="200e6,1e9", help="bits/s of the links between nodes; empty: one node alone")
    parser.add_argument("--one-node", choices=("yes", "no"), default="yes", help="also without a network")
    parser.add_argument("--rounds", type=int, default=1, help="of probe and runs; medians count")
    parser.add_argument("--steps", type=int, default=25, help="of every run; the median without the first three counts")
    arguments = parser.parse_args()
    rates = [float(rate) for rate in arguments.rates.split(",") if rate]
    out = (arguments.out or Path(tempfile.mkdtemp(prefix="paceline-forecast-"))).resolve()
    rows = []
    for name in [arguments.only] if arguments.only else CASES:
        for round_number in range(arguments.rounds):
            bench = Bench(CASES[name], arguments.data.resolve(), out / f"{name}-{round_number}", arguments.steps)
            for row in bench.measure(rates, on_one_node=arguments.one_node == "yes"):
                print(_line(row), _parts(row), file=sys.stderr, flush=True)
                rows.append(row)
    print(markdown(rows))


@dataclass(frozen=True)
class Bench:
    """One job, its data, and where its runs go."""

    case: Case
    data: Path
    out: Path
    num_steps: int

    def measure(self, rates: Sequence[float], *, on_one_node: bool) -> Iterator[Row]:
        """Probe, forecast and train: on one node, then on two nodes at each rate."""
        with (
            namespaces.Cluster(num_nodes=2, rate_bits_per_s=1e9) as nodes,
            tempfile.TemporaryDirectory() as keys,
            ssh_between(nodes.nodes, Path(keys)),
        ):
            if on_one_node:
                yield from self._at(nodes, "one node", [], {1: ("all_reduce",), 2: ON_ONE_NODE})
            for rate in rates:
                nodes.set_rate(rate)
                place = f"2x2, {rate / 1e6:.0f} Mbit/s"
                yield from self._at(nodes, place, ["--hosts", "node0:2,node1:2"], {4: BETWEEN_NODES})

    def _at(
        self,
        nodes: namespaces.Cluster,
        place: str,
        hosts: Sequence[str],
        algorithms: Mapping[int, Sequence[AlgorithmName]],
    ) -> Iterator[Row]:
        """Rows of one place, for each count of workers and each algorithm."""
        out = self.out / place.replace(" ", "").replace(",", "-").replace("/", "")
        out.mkdir(parents=True)
        job = resolve_job(self.case.recipe, list(self.case.settings), None)
        words = [*self.case.words, "--data", str(self.data / self.case.data), *hosts]
        probe = ["probe", *words, "--out", str(out / "cluster.json"), "--budget", str(PROBE_BUDGET_S)]
        stolen_from_probe = _paceline(nodes, probe)
        found = forecast(job, Cluster.load(out / "cluster.json"), sorted({1, *algorithms}), ForecastRequest())
        (out / "forecast.json").write_text(json.dumps(to_mapping(found), indent=1) + "\n", encoding="utf-8")
        for row in (row for row in found.rows if row.devices in algorithms):
            for algorithm in algorithms[row.devices]:
                run_dir = out / f"{row.devices}-{algorithm}"
                run = ["train", *words, "-n", str(row.devices), "--threads", "1", "--algorithm", algorithm, "--quiet"]
                limits = ["--max-steps", str(self.num_steps), "--out", str(run_dir), "--cluster", str(out / "none")]
                stolen_from_run = _paceline(nodes, [*run, *limits])
                measured = RunRecord.load(run_dir / "record.json").step_time
                yield Row(
                    job.name,
                    place if hosts else f"{place}, {row.devices} worker{'s' * (row.devices > 1)}",
                    algorithm,
                    row.step_s,
                    measured.total_s,
                    (row.compute_s, row.exposed_s, row.step_s - row.compute_s - row.exposed_s),
                    (measured.compute_s, measured.exposed_comm_s, measured.data_s),
                    row.devices == 1 or row.algorithm == algorithm,
                    (stolen_from_probe, stolen_from_run),
                )


def _paceline(nodes: namespaces.Cluster, words: Sequence[str]) -> float:
    """Run a command on the first node; returns the part of the processors' time that was stolen meanwhile."""
    stolen, total = _processor_ticks()
    process = nodes.nodes[0].exec([sys.executable, "-m", "paceline", *words], env={"PACELINE_DEVICE": "cpu"})
    if process.wait(TIMEOUT_S) != 0:
        raise SystemExit(f"paceline {' '.join(words)} failed:\n{process.output}")
    stolen_since, total_since = _processor_ticks()
    return (stolen_since - stolen) / (total_since - total)


def _processor_ticks() -> tuple[int, int]:
    """Ticks of all processors that other virtual machines took, and all ticks (proc(5), /proc/stat)."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return ticks[7], sum(ticks)


def markdown(rows: Sequence[Row]) -> str:
    """A table of medians over rounds, then all rows as a line of JSON."""
    head = "| job | place | algorithm | forecast, ms | measured, ms | ratio | ratios | planner's choice | fastest |\n"
    of_rounds: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        of_rounds.setdefault((row.case, row.place, row.algorithm), []).append(row)
    measured_s = {key: median(row.measured_s for row in found) for key, found in of_rounds.items()}
    lines = []
    for key, found in of_rounds.items():
        best_s = min(seconds for other, seconds in measured_s.items() if other[:2] == key[:2])
        forecast_ms = f"{1e3 * median(row.forecast_s for row in found):.1f}"
        ratios = sorted(row.ratio for row in found)
        chosen = f"{sum(row.is_choice for row in found)} of {len(found)}"
        fastest = "yes" if measured_s[key] == best_s else f"{measured_s[key] / best_s:.2f}x"
        cells = [*key, forecast_ms, f"{1e3 * measured_s[key]:.1f}", f"{median(ratios):.2f}"]
        cells += [", ".join(f"{ratio:.2f}" for ratio in ratios), chosen, fastest]
        lines.append(f"| {' | '.join(cells)} |\n")
    return head + "|---|---|---|---|---|---|---|---|---|\n" + "".join(lines) + json.dumps([vars(row) for row in rows])


def _line(row: Row) -> str:
    times = f"{1e3 * row.forecast_s:.1f}", f"{1e3 * row.measured_s:.1f}", f"{row.ratio:.2f}"
    return "  ".join([row.case, row.place, row.algorithm, *times])


def _parts(row: Row) -> str:
    forecast, measured = (
        ", ".join(
            f"{name} {1e3 * seconds:.1f}" for name, seconds in zip(("compute", "wait", "rest"), parts, strict=True)
        )
        for parts in (row.forecast_parts_s, row.measured_parts_s)
    )
    stolen = " and ".join(f"{share:.0%}" for share in row.stolen)
    return f"(forecast {forecast}; measured {measured}; stolen {stolen})"


if __name__ == "__main__":
    main()
