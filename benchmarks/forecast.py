"""Forecast beside measurement: what `paceline probe` alone lets the planner say, and what runs then do.

    python -m benchmarks.forecast --data DIR [--out DIR] [--only mnist|cifar10|perceptron] [--rates 200e6,1e9]
        [--one-node no] [--steps 25]

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

from tests.hosts import cluster as namespaces
from tests.hosts.sshd import ssh_between

from paceline.cli.options import resolve_job
from paceline.plan.forecast import Question, forecast
from paceline.spec import AlgorithmName, Cluster, RunRecord
from paceline.spec.codec import to_mapping

ON_ONE_NODE: tuple[AlgorithmName, ...] = ("all_reduce", "hierarchical")
BETWEEN_NODES: tuple[AlgorithmName, ...] = ("all_reduce", "hierarchical", "halving_doubling", "ring")
PROBE_BUDGET_S = 60
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
    "mnist": Case("mnist-lenet", "mnist", ("global_batch_size=256", "virtual_shards=4", "data.train_limit=12800")),
    "cifar10": Case(
        "cifar10-resnet18", "cifar10", ("global_batch_size=64", "virtual_shards=4", "data.train_limit=3200")
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
    parser.add_argument("--steps", type=int, default=25, help="of every run; the median without the first three counts")
    arguments = parser.parse_args()
    rates = [float(rate) for rate in arguments.rates.split(",") if rate]
    out = (arguments.out or Path(tempfile.mkdtemp(prefix="paceline-forecast-"))).resolve()
    rows = []
    for name in [arguments.only] if arguments.only else CASES:
        bench = Bench(CASES[name], arguments.data.resolve(), out / name, arguments.steps)
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
        _paceline(nodes, ["probe", *words, "--out", str(out / "cluster.json"), "--budget", str(PROBE_BUDGET_S)])
        found = forecast(job, Cluster.load(out / "cluster.json"), sorted({1, *algorithms}), Question())
        (out / "forecast.json").write_text(json.dumps(to_mapping(found), indent=1) + "\n", encoding="utf-8")
        for row in (row for row in found.rows if row.devices in algorithms):
            for algorithm in algorithms[row.devices]:
                run_dir = out / f"{row.devices}-{algorithm}"
                run = ["train", *words, "-n", str(row.devices), "--threads", "1", "--algorithm", algorithm, "--quiet"]
                limits = ["--max-steps", str(self.num_steps), "--out", str(run_dir), "--cluster", str(out / "none")]
                _paceline(nodes, [*run, *limits])
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
                )


def _paceline(nodes: namespaces.Cluster, words: Sequence[str]) -> None:
    process = nodes.nodes[0].exec([sys.executable, "-m", "paceline", *words], env={"PACELINE_DEVICE": "cpu"})
    if process.wait(TIMEOUT_S) != 0:
        raise SystemExit(f"paceline {' '.join(words)} failed:\n{process.output}")


def markdown(rows: Sequence[Row]) -> str:
    """A table, then the rows as a line of JSON."""
    head = "| job | place | algorithm | forecast, ms | measured, ms | ratio | planner's choice | fastest |\n"
    lines = []
    for row in rows:
        rivals = [other.measured_s for other in rows if (other.case, other.place) == (row.case, row.place)]
        chosen = "yes" if row.is_choice else ""
        fastest = "yes" if row.measured_s == min(rivals) else f"{row.measured_s / min(rivals):.2f}x"
        lines.append(f"| {_line(row, ' | ')} | {chosen} | {fastest} |\n")
    return head + "|---|---|---|---|---|---|---|---|\n" + "".join(lines) + json.dumps([vars(row) for row in rows])


def _line(row: Row, between: str = "  ") -> str:
    times = f"{1e3 * row.forecast_s:.1f}", f"{1e3 * row.measured_s:.1f}", f"{row.ratio:.2f}"
    return between.join([row.case, row.place, row.algorithm, *times])


def _parts(row: Row) -> str:
    forecast, measured = (
        ", ".join(
            f"{name} {1e3 * seconds:.1f}" for name, seconds in zip(("compute", "wait", "rest"), parts, strict=True)
        )
        for parts in (row.forecast_parts_s, row.measured_parts_s)
    )
    return f"(forecast {forecast}; measured {measured})"


if __name__ == "__main__":
    main()
