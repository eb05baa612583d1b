"""What could be gained by updating parameters while the gradients of others are still on their way.

    python -m benchmarks.optimizer_share --data DIR [--rates 200e6 1e9] [--cases gpt resnet18]

Two workers with a thread each: on one node, and on two nodes whose link has each of the rates (network namespaces;
needs root). An update can only be hidden behind communication that computation does not hide, so the smaller one of the
two is the most that can be gained. Medians of a run's steps, and of its rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

CASES = ("lenet", "resnet20", "resnet18", "efficientnet-b0", "gpt", "bert")


def measure(case_name: str, data: Path, num_steps: int) -> dict[str, float]:
    """Seconds of a step, of its exposed communication and of its update, on this worker."""
    import torch
    from peers.trainers import CASES as BY_NAME
    from peers.trainers import build, loss_of, optimizer_of, per_sample

    import paceline
    from paceline.data import load
    from paceline.spec import DataSpec

    torch.set_num_threads(1)
    case = BY_NAME[case_name]
    updates_s: list[float] = []
    began = [0.0]
    with paceline.init(
        global_batch_size=case.global_batch_size, epochs=1000, channels_last=case.is_of_images, max_steps=num_steps
    ) as run:
        model = build(case)
        optimizer = optimizer_of(case, model)
        optimizer.register_step_pre_hook(lambda *_: began.__setitem__(0, time.perf_counter()))
        optimizer.register_step_post_hook(lambda *_: updates_s.append(time.perf_counter() - began[0]))
        model, _ = run.prepare(model, optimizer)
        dataset: Any = per_sample(case, data)
        if case.is_of_images:
            dataset = load(DataSpec(case.data, dir=str(data / case.data)))[0]
        for batch in run.batches(dataset):
            run.step(batch, lambda model, batch: loss_of(model(batch[0]), batch[1]))
        step = run.timer.median()
    return {"step": step.total_s, "exposed": step.exposed_comm_s, "update": statistics.median(updates_s[3:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with mnist/ and cifar10/")
    parser.add_argument("--rates", type=float, nargs="*", default=[200e6], help="bits/s of the link of two nodes")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        seconds = measure(arguments.worker, arguments.data, arguments.steps)
        if os.environ["RANK"] == "0":
            print(json.dumps(seconds))
        return

    from tests.kit.nodes.cluster import Cluster, run_on_nodes, why_not

    if (reason := why_not()) is not None:
        sys.exit(reason)
    print("| case | link | step ms | exposed communication ms | update ms | most that can be gained |")
    print("|---|---|---|---|---|---|")
    program = [
        str(Path(__file__).absolute()),
        "--data",
        str(arguments.data.absolute()),
        "--steps",
        str(arguments.steps),
    ]
    for rate in (None, *arguments.rates):
        with Cluster(num_nodes=2, rate_bits_per_s=rate or 10e9) as cluster:
            for case in arguments.cases:
                nodes = [2] if rate is None else [1, 1]
                rounds = [
                    json.loads(
                        run_on_nodes(cluster, nodes, [*program, "--worker", case], timeout_s=600)[0].splitlines()[-1]
                    )
                    for _ in range(arguments.rounds)
                ]
                step, exposed, update = (
                    statistics.median(one[name] for one in rounds) for name in ("step", "exposed", "update")
                )
                link = "one node" if rate is None else f"{rate / 1e6:g} Mbit/s"
                gain = min(exposed, update) / step
                times = f"{1e3 * step:.1f} | {1e3 * exposed:.1f} | {1e3 * update:.2f}"
                print(f"| {case} | {link} | {times} | {gain:.1%} |", flush=True)


if __name__ == "__main__":
    main()
