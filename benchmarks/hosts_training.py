"""A training step between nodes: plain DistributedDataParallel beside Paceline, on real (shaped) links.

    python benchmarks/hosts_training.py --data DIR [--rate 200e6] [--out FILE]

Two nodes of two workers each are built from network namespaces (needs root). A perceptron of 24 million parameters
trains on MNIST. Times are taken on links of the given rate. The loss after some number of
samples is taken on the same nodes over fast links, because rounding and meeting times decide it, not the links.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN = 3300
LR = 0.05

VARIANTS: dict[str, dict[str, Any]] = {
    "plain DDP": {},
    "all_reduce": {"algorithm": "all_reduce"},
    "hierarchical": {"algorithm": "hierarchical"},
    "hierarchical, bfloat16": {"algorithm": "hierarchical", "wire": "bfloat16"},
    "no communication": {"algorithm": "hierarchical", "method": "local_sgd", "sync_every": 1000},
    "local_sgd, H=16": {"algorithm": "hierarchical", "method": "local_sgd"},
    "diloco, H=16": {"algorithm": "hierarchical", "method": "diloco"},
    "diloco, H=16, 2 groups": {"algorithm": "hierarchical", "method": "diloco", "groups": 2},
    "diloco, H=16, bfloat16": {"algorithm": "hierarchical", "method": "diloco", "wire": "bfloat16"},
    "diloco, H=16, 8 late": {"algorithm": "hierarchical", "method": "diloco", "overlap_steps": 8},
}


def perceptron() -> nn.Module:
    """784 -> 3300 -> 3300 -> 3300 -> 10: 24.4 million parameters."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, 10),
    )


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def measure(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    inputs, targets = batch
    logits = model(inputs)
    return {
        "loss": F.cross_entropy(logits, targets, reduction="none"),
        "accuracy": (logits.argmax(1) == targets).double(),
    }


class StopWatch:
    """Seconds and bytes a step, from the end of one step to the end of a later one."""

    def __init__(self, warmup_steps: int, steps: int) -> None:
        self._first, self._last = warmup_steps, warmup_steps + steps
        self._since = 0.0
        self._sent = 0
        self.result: dict[str, float] = {}

    def step_ended(self, number: int) -> None:
        if number == self._first:
            self._since, self._sent = time.perf_counter(), bytes_sent()
        if number == self._last:
            steps = self._last - self._first
            self.result = {
                "step_s": (time.perf_counter() - self._since) / steps,
                "sent_mb": (bytes_sent() - self._sent) / 1e6 / steps,
            }


def train_with_paceline(data: Path, request: dict[str, Any], watch: StopWatch) -> dict[str, float]:
    import paceline
    from paceline.data import load
    from paceline.env import worker_facts
    from paceline.spec import DataSpec, Job, Plan

    variant = request["variant"]
    aggregation = {key: value for key, value in variant.items() if key != "algorithm"}
    job = Job.from_mapping(
        {"global_batch_size": request["batch"], "epochs": 100, "virtual_shards": 4, "aggregation": aggregation}
    )
    plan = Plan(world_size=worker_facts().world_size, algorithm=variant["algorithm"], timeout_s=120)
    train_set, test_set = load(DataSpec(name="mnist", dir=str(data)))
    with paceline.init(job, plan=plan, max_steps=request["warmup_steps"] + request["steps"]) as run:
        model = perceptron()
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9))
        for batch in run.batches(train_set):
            run.step(batch, loss_fn)
            watch.step_ended(run.steps)
        return run.evaluate(test_set, measure) if request["evaluate"] else {}


def train_plainly(data: Path, request: dict[str, Any], watch: StopWatch) -> dict[str, float]:
    """As a user would write it, with the data ready in memory: nothing but the step is timed."""
    from paceline.data import ArraySet, load
    from paceline.spec import DataSpec

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, _ = load(DataSpec(name="mnist", dir=str(data)))
    assert isinstance(train_set, ArraySet)
    inputs = (torch.from_numpy(train_set.inputs).float() / 255 - 0.1307) / 0.3081
    targets = torch.from_numpy(train_set.targets).long()
    model = nn.parallel.DistributedDataParallel(perceptron(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    size = request["batch"] // world_size
    for step in range(request["warmup_steps"] + request["steps"]):
        start = (step * world_size + rank) * size
        loss = loss_fn(model, (inputs[start : start + size], targets[start : start + size]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.step_ended(step + 1)
    dist.destroy_process_group()
    return {}


def worker(data: Path, request: dict[str, Any]) -> None:
    watch = StopWatch(request["warmup_steps"], request["steps"])
    train = train_with_paceline if request["variant"] else train_plainly
    metrics = train(data, request, watch)
    if os.environ["RANK"] == "0":
        print(json.dumps(watch.result | metrics))


def bytes_sent() -> int:
    """Over this node's link, by its own counter."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="MNIST's files")
    parser.add_argument("--rate", type=float, default=200e6, help="bits/s of every link")
    parser.add_argument("--batch", type=int, default=128, help="samples in a global batch")
    parser.add_argument("--only", help="variants with one of these, divided by |, in their name")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--loss-steps", type=int, default=192)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        worker(arguments.data, arguments.worker)
        return

    from tests.kit.nodes.cluster import Cluster, run_on_nodes, why_not

    if (reason := why_not()) is not None:
        sys.exit(reason)
    chosen = {
        name: variant
        for name, variant in VARIANTS.items()
        if arguments.only is None or any(part in name for part in arguments.only.split("|"))
    }

    def run(cluster: Any, variant: dict[str, Any], warmup_steps: int, steps: int, evaluate: bool) -> dict[str, float]:
        request = {"variant": variant, "batch": arguments.batch, "evaluate": evaluate}
        request |= {"warmup_steps": warmup_steps, "steps": steps}
        program = [str(Path(__file__).absolute()), "--data", str(arguments.data.absolute())]
        outputs = run_on_nodes(cluster, [2, 2], [*program, "--worker", json.dumps(request)], timeout_s=900)
        result: dict[str, float] = json.loads(outputs[0].strip().splitlines()[-1])
        return result

    rows: dict[str, dict[str, Any]] = {name: {"times_s": []} for name in chosen}
    with Cluster(num_nodes=2, rate_bits_per_s=arguments.rate) as cluster:
        for _ in range(arguments.rounds):
            for name, variant in chosen.items():
                is_infrequent = "method" in variant
                # Of the infrequent ones whole periods are timed, from one meeting to a later one.
                warmup, steps = (16, 32) if is_infrequent else (2, 6)
                result = run(cluster, variant, warmup, steps, evaluate=False)
                rows[name]["times_s"].append(result["step_s"])
                rows[name]["sent_mb"] = result["sent_mb"]
                print(name, result, file=sys.stderr)
        cluster.set_rate(10e9)
        for name, variant in chosen.items():
            if variant and arguments.loss_steps:
                result = run(cluster, variant, 0, arguments.loss_steps, evaluate=True)
                rows[name] |= {"loss": result["loss"], "accuracy": result["accuracy"]}
                print(name, rows[name], file=sys.stderr)
    report(rows, arguments)


def report(rows: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> None:
    nothing = float("nan")
    plain_s = min(rows["plain DDP"]["times_s"], default=nothing) if "plain DDP" in rows else nothing
    samples = arguments.loss_steps * arguments.batch
    lines = [
        f"2 nodes x 2 workers, links at {arguments.rate / 1e6:g} Mbit/s, 24.4 M parameters, batch {arguments.batch}",
        "",
        f"After {samples:,} samples:",
        "",
        "| gradients | s/step | x plain DDP | MB sent a node and step | test loss | accuracy |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        best = min(row["times_s"], default=nothing)
        quality = f"{row['loss']:.4f} | {row['accuracy']:.2%}" if "loss" in row else "- | -"
        lines.append(f"| {name} | {best:.2f} | {best / plain_s:.2f} | {row.get('sent_mb', nothing):.1f} | {quality} |")
    print("\n".join(lines))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
