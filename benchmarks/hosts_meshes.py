"""Every mesh of four workers on one or more nodes, beside the planner's price; and the bytes that leave a node.

    python -m benchmarks.hosts_meshes --data DIR [--nodes 2] [--workers 4] [--rate 200e6] [--model perceptron|deep]
        [--meshes "dp,pp,tp2 x pp2"] [--rounds 2] [--steps 6] [--cluster FILE] [--out FILE]

The nodes are built from network namespaces (needs root and sshd). The planner sees nothing but the cluster.json that
`paceline probe` writes there. Each mesh trains as the planner would have it, with its micro-batches
and its schedule; the meshes take turns, so that what else this machine does meets them all. DIR holds MNIST's files.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tests.kit.nodes.cluster import Cluster as Nodes
from tests.kit.nodes.cluster import run_on_nodes, why_not
from tests.kit.nodes.sshd import ssh_between
from tests.old.traffic import node_bytes, sent_bytes, sum_bytes
from torch import Tensor, nn

from paceline.errors import JobError
from paceline.parallel.dry_run.dry_run import StageCost, dry_run, on_paper
from paceline.plan.forecast_row import workload_on
from paceline.plan.gradient_sums import cheapest_algorithm, network_in_steps
from paceline.plan.inputs import ForecastRequest, PlanInputs, plan_inputs
from paceline.plan.mesh_selection import choose_mesh
from paceline.plan.search import MeshCandidate, best_of
from paceline.report.tables import markdown_table
from paceline.spec import AlgorithmName, Cluster, Job, Mesh, Plan, parse_mesh
from paceline.workflows.jobs import resolve_job
from paceline.workflows.traced_model import trace_model

MESHES = (
    "dp",
    "zero1",
    "zero2",
    "fsdp",
    "dp2 x zero1:2",
    "dp2 x fsdp2",
    "pp",
    "dp2 x pp2",
    "zero1:2 x pp2",
    "fsdp2 x pp2",
    "dp2 x tp2",
    "fsdp2 x tp2",
    "tp2 x pp2",
    "tp",
)
"""Those that so many workers cannot form are left out."""
MODELS = {"perceptron": "benchmarks.hosts_meshes:perceptron", "deep": "benchmarks.hosts_meshes:deep_perceptron"}
WARMUP_STEPS = 2
"""The first step finds out whether the model draws random numbers; the shards of the others go through it together."""
PROBE_BUDGET_S, TIMEOUT_S = 30, 600.0
LONG_S, FEW_STEPS = 3.0, 2
"""Steps that are forecast to take longer are mostly a link at work, which varies little: so few of them are enough."""
MARGIN = 1.05
"""Meshes within 5 % of each other are equally fast: runs of the same mesh differ by as much."""


def perceptron() -> nn.Module:
    """784 -> 3300 -> 3300 -> 3300 -> 10: 24.4 million parameters."""
    return _linear_layers(784, 3300, 3300, 3300, 10)


def deep_perceptron() -> nn.Module:
    """784 -> 1536 ten times over -> 10: 22.5 million parameters in layers that make even stages."""
    return _linear_layers(784, *[1536] * 10, 10)


def _linear_layers(*widths: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for one, other in pairwise(widths):
        layers += [nn.Linear(one, other), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def bytes_sent() -> int:
    """Over this node's link, by its own counter."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


@dataclass
class Row:
    """One mesh."""

    mesh: Mesh
    forecast: MeshCandidate
    algorithm: AlgorithmName
    """What sums gradients: for plain replicas the one that the planner prices."""
    formula_mb: float
    """Sent by the node that sends more in a step."""
    steps_s: list[list[float]]
    """Of each round, on the first worker."""
    sent_mb: float = float("nan")
    cpu_s: float = float("inf")
    """All workers' processor time for a step, in the least disturbed round."""

    @property
    def measured_s(self) -> float:
        """The median of the rounds' medians."""
        return statistics.median(map(statistics.median, self.steps_s)) if self.steps_s else float("nan")

    @property
    def quickest_s(self) -> float:
        """The step that was least disturbed."""
        return min(map(min, self.steps_s), default=float("nan"))


# --- a worker ---


def train(request: dict[str, Any]) -> None:
    """One run; every worker prints what it took, and what left its node meanwhile."""
    import paceline
    from paceline.data import load
    from paceline.models import build

    torch.manual_seed(0)
    job, plan = Job.from_mapping(request["job"]), Plan.from_mapping(request["plan"])
    train_set, _ = load(job.data)
    marks: list[tuple[float, float, int]] = []
    with paceline.init(job, plan=plan, max_steps=WARMUP_STEPS + request["steps"]) as run:
        model = build(job.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        run.prepare(model, optimizer, example=torch.randn(job.global_batch_size // job.virtual_shards, 1, 28, 28))
        for batch in run.batches(train_set):
            run.step(batch, loss_fn)
            marks.append((time.perf_counter(), time.process_time(), bytes_sent()))
    marks = marks[WARMUP_STEPS - 1 :]
    steps_s = [after[0] - before[0] for before, after in pairwise(marks)]
    cpu_s, sent_bytes = ((marks[-1][place] - marks[0][place]) / len(steps_s) for place in (1, 2))
    print(json.dumps({"steps_s": steps_s, "cpu_s": cpu_s, "sent_mb": sent_bytes / 1e6}))


# --- the planner ---


def planned_rows(job: Job, known: PlanInputs, names: Sequence[str], num_workers: int, on_a_node: int) -> list[Row]:
    """Meshes with their prices, without measurements; those of another number of workers are left out."""
    workload = replace(workload_on(known, num_workers), memory_bytes=float("inf"))
    layout = known.layout(num_workers)
    network, cheapest = network_in_steps(known, layout), cheapest_algorithm(known, job, layout)[0]
    rows = []
    for name in names:
        try:
            mesh = parse_mesh(name, num_workers, num_workers // on_a_node)
        except JobError:
            continue
        found = best_of(workload, mesh, on_a_node, network)
        assert isinstance(found, MeshCandidate)
        algorithm: AlgorithmName = cheapest if mesh.is_plain else "all_reduce"
        rows.append(Row(mesh, found, algorithm, formula_bytes(job, found, algorithm, on_a_node) / 1e6, []))
    return rows


def formula_bytes(job: Job, candidate: MeshCandidate, algorithm: AlgorithmName, on_a_node: int) -> float:
    """What the node that sends more sends in a step, by `tests/old/traffic.py`."""
    from paceline.models import build

    def tried(one: Mesh) -> tuple[StageCost, ...]:
        model, arguments = on_paper(lambda: build(job.model), torch.zeros(1, 28, 28), candidate.micro_batch_size)
        return dry_run(model, arguments, one, num_passes).stages

    mesh, num_passes = candidate.mesh, candidate.num_micro_batches
    stages = tried(mesh)
    if algorithm == "hierarchical":  # a sum between nodes
        return sum_bytes(stages[0].parameter_bytes, mesh.num_workers // on_a_node)
    sent = [
        sent_bytes(mesh, stage.whole_parameter_bytes, 0.0, 0.0, num_passes, "gloo")
        | {"tp": num_passes * stage.sent_bytes.get("tp", 0.0)}
        for stage in stages
    ]
    messages = _message_bytes(tried(Mesh(pp=mesh.pp * candidate.pipeline.stages_per_worker)))
    return node_bytes(mesh, sent, [num_passes * size for size in messages], on_a_node)


def _message_bytes(stages: Sequence[StageCost]) -> list[float]:
    """Of one micro-batch, over each boundary; a stage sends what leaves it, and back the gradient of what arrived."""
    found: list[float] = []
    for stage in stages[:-1]:
        found.append(stage.sent_bytes["pp"] - (found[-1] if found else 0.0))
    return found


def plan_of(row: Row) -> Plan:
    """As the planner would run it."""
    return Plan(
        world_size=row.mesh.num_workers,
        algorithm=row.algorithm,
        timeout_s=120,
        mesh=row.mesh,
        pipeline=row.forecast.pipeline,
    )


# --- both ---


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="MNIST's files")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--workers", type=int, default=4, help="on all nodes together")
    parser.add_argument("--rate", type=float, default=200e6, help="bits/s of every link")
    parser.add_argument("--model", choices=tuple(MODELS), default="perceptron")
    parser.add_argument("--meshes", default=",".join(MESHES))
    parser.add_argument("--batch", type=int, default=64, help="samples in a global batch")
    parser.add_argument("--shards", type=int, default=8, help="virtual shards")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="timed, after two that are not; fewer long ones")
    parser.add_argument("--cluster", type=Path, help="what an earlier probe wrote; the probe is left out")
    parser.add_argument("--out", type=Path, help="folder for cluster.json and rows.json; a temporary one")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker is not None:
        train(asked.worker)
        return
    if asked.data is None:
        parser.error("--data DIR: where are MNIST's files?")
    if (reason := why_not()) is not None:
        sys.exit(reason)
    out = (asked.out or Path(tempfile.mkdtemp(prefix="paceline-meshes-"))).resolve()
    out.mkdir(parents=True, exist_ok=True)
    on_a_node, rest = divmod(asked.workers, asked.nodes)
    if rest:
        parser.error(f"--workers {asked.workers} do not lie evenly on {asked.nodes} nodes")
    words = [
        f"name={asked.model}",
        f"model={MODELS[asked.model]}",
        f"global_batch_size={asked.batch}",
        f"virtual_shards={asked.shards}",
        f"data.train_limit={100 * asked.batch}",
    ]
    job = resolve_job("mnist-lenet", words, str(asked.data))
    with (
        Nodes(num_nodes=asked.nodes, rate_bits_per_s=asked.rate) as nodes,
        tempfile.TemporaryDirectory() as keys,
        ssh_between(nodes.nodes, Path(keys)),
    ):
        cluster = Cluster.load(asked.cluster or _probe(nodes, on_a_node, words, asked.data, out / "cluster.json"))
        known = plan_inputs(job, cluster, ForecastRequest(), asked.workers, facts := trace_model(job))
        names = [name.strip() for name in asked.meshes.split(",")]
        rows = planned_rows(job, known, names, asked.workers, on_a_node)
        choice = choose_mesh(job, facts, cluster, asked.workers)
        for _ in range(asked.rounds):
            for row in rows:
                _measure(nodes, job, row, asked.steps)
                print(_line(row), file=sys.stderr, flush=True)
                (out / "rows.json").write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    print(markdown(rows, choice.mesh, choice.reason))


def _probe(nodes: Nodes, on_a_node: int, words: Sequence[str], data: Path, path: Path) -> Path:
    settings = [part for word in words for part in ("--set", word)]
    hosts = ",".join(f"{node.hostname}:{on_a_node}" for node in nodes.nodes)
    argv = ["probe", "mnist-lenet", *settings, "--data", str(data.resolve()), "--hosts", hosts]
    process = nodes.nodes[0].exec(
        [sys.executable, "-m", "paceline", *argv, "--out", str(path), "--budget", str(PROBE_BUDGET_S)],
        env={"PACELINE_DEVICE": "cpu"},
    )
    if process.wait(TIMEOUT_S) != 0:
        sys.exit(f"paceline {' '.join(argv)} failed:\n{process.output}")
    return path


def _measure(nodes: Nodes, job: Job, row: Row, num_steps: int) -> None:
    num_steps = num_steps if row.forecast.step_s < LONG_S else min(num_steps, FEW_STEPS)
    request = {"job": job.to_mapping(), "plan": plan_of(row).to_mapping(), "steps": num_steps}
    program = ["-m", "benchmarks.hosts_meshes", "--worker", json.dumps(request)]
    on_a_node = row.mesh.num_workers // len(nodes.nodes)
    outputs = run_on_nodes(nodes, [on_a_node] * len(nodes.nodes), program, timeout_s=TIMEOUT_S)
    found = [json.loads(text.splitlines()[-1]) for text in outputs]
    row.steps_s.append(found[0]["steps_s"])
    row.sent_mb = max(one["sent_mb"] for one in found)
    row.cpu_s = min(row.cpu_s, sum(one["cpu_s"] for one in found))


def markdown(rows: Sequence[Row], chosen: Mesh, reason: str) -> str:
    fastest_s = min(row.measured_s for row in rows)
    lines = []
    for row in sorted(rows, key=lambda row: row.measured_s):
        plan = row.forecast
        name = f"**{row.mesh}**" if row.mesh == chosen else str(row.mesh)
        batches = f"{plan.num_micro_batches} x {plan.micro_batch_size}" + " interleaved" * (
            plan.pipeline.stages_per_worker > 1
        )
        lines.append(
            [
                name,
                batches,
                f"{plan.step_s:.3f}",
                f"{row.measured_s:.3f}",
                f"{plan.step_s / row.measured_s:.2f}",
                f"{row.measured_s / fastest_s:.2f}",
                f"{row.quickest_s:.3f}",
                f"{row.cpu_s:.2f}",
                f"{row.sent_mb:.1f}",
                f"{row.formula_mb:.1f}",
            ]
        )
    best = min((row for row in rows if row.mesh == chosen), key=lambda row: row.measured_s, default=None)
    if best is None:
        verdict = "was not measured"
    elif best.measured_s <= MARGIN * fastest_s:
        verdict = "is the fastest measured"
    else:
        verdict = f"takes {best.measured_s / fastest_s:.2f} times as long as the fastest measured"
    head = ["mesh", "micro-batches", "forecast, s", "measured, s", "forecast / measured", "x fastest"]
    table = markdown_table([*head, "quickest step, s", "CPU s", "MB left a node", "by formula"], lines)
    return f"{table}\n\nThe planner's choice, {reason} It {verdict}."


def _line(row: Row) -> str:
    plan = row.forecast
    parts = ", ".join(
        f"{name} {1e3 * seconds:.0f}"
        for name, seconds in (
            ("compute", plan.compute_s),
            ("bubble", plan.bubble_s),
            ("inside", plan.tensor_s),
            ("exposed", plan.exposed_s),
            ("optimizer", plan.optimizer_s),
        )
    )
    measured = " / ".join(", ".join(f"{1e3 * seconds:.0f}" for seconds in steps) for steps in row.steps_s)
    return (
        f"{row.mesh!s:15} forecast {1e3 * plan.step_s:6.0f} ms ({parts}); measured {measured} ms; "
        f"{row.cpu_s:.2f} s of processors; {row.sent_mb:.1f} MB left a node, {row.formula_mb:.1f} by formula"
    )


if __name__ == "__main__":
    main()
