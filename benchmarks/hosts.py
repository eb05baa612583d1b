"""Every way to sum over 2 nodes x 2 workers, which are namespaces on this machine with shaped links between them.

    python -m benchmarks.hosts [--rate 200] [--bytes 100000000] [--rounds 3]
    python -m benchmarks.hosts --links 2 --used 1 --only all_reduce,hierarchical,tree_exact

A row for each algorithm and wire format: median seconds of the slowest worker, and the bytes that a node sent, by its
own counters. Every sum is checked. Needs root.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from pathlib import Path

import torch
from tests.kit.nodes.cluster import Cluster, run_on_nodes, why_not

from paceline.comm import ALGORITHMS, WIRE_FORMATS, Links, open_links
from paceline.measure.timing import largest
from paceline.measure.workers import join_workers
from paceline.report.tables import markdown_table

LIMIT_S = 600.0
CASES = (*((name, "float32") for name in ALGORITHMS), ("all_reduce", "bfloat16"), ("hierarchical", "bfloat16"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=200.0, help="of each link, in Mbit/s")
    parser.add_argument("--links", type=int, default=1, help="of each node, each to a switch of its own")
    parser.add_argument("--used", type=int, help="so many of them are named for workers; all, if not given")
    parser.add_argument("--only", default=",".join(ALGORITHMS), help="these algorithms alone")
    parser.add_argument("--bytes", type=int, default=100_000_000, help="of the vector that is summed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--as-worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_worker:
        print_timings(arguments.only.split(","), arguments.bytes, arguments.rounds)
        return
    if reason := why_not():
        parser.error(f"this cannot run here: {reason}")
    program = ["-m", "benchmarks.hosts", "--as-worker", "--only", arguments.only, "--bytes", str(arguments.bytes)]
    with Cluster(2, arguments.rate * 1e6, arguments.links) as cluster:
        used = ",".join(cluster.interfaces[: arguments.used])
        outputs = run_on_nodes(
            cluster,
            (2, 2),
            [*program, "--rounds", str(arguments.rounds)],
            timeout_s=LIMIT_S,
            env={"GLOO_SOCKET_IFNAME": used},
            cwd=Path(__file__).parents[1],
        )
    print(outputs[0])


def print_timings(names: list[str], num_bytes: int, num_rounds: int) -> None:
    """What each worker runs; the first prints the table."""
    world = join_workers("cpu", LIMIT_S)
    assert world.group is not None
    links = open_links(world.group, world.device, LIMIT_S)
    values = torch.empty(num_bytes // 4)
    rows = []
    for name, wire in CASES:
        if name not in names:
            continue
        written = dataclasses.replace(links, wire=WIRE_FORMATS[wire])
        rounds = [time_sum(name, written, values) for _ in range(1 + num_rounds)][1:]  # the first one connects
        seconds, crossed = (statistics.median(column) for column in zip(*rounds, strict=True))
        rows.append([name, wire, f"{seconds:.3g}", f"{crossed / 1e6:.1f}"])
    if world.rank == 0:
        print(markdown_table(["algorithm", "wire", "s", "MB sent by a node"], rows))


def time_sum(name: str, links: Links, values: torch.Tensor) -> tuple[float, float]:
    """(seconds, bytes) of one sum; small whole numbers, whose sum is exact in every format."""
    values.fill_(links.rank + 1)
    largest(0.0, links.group)  # all are ready
    before, began = sent_bytes(), time.perf_counter()
    ALGORITHMS[name](values, links)
    seconds = largest(time.perf_counter() - began, links.group)
    crossed = largest(sent_bytes() - before, links.group)
    expected = links.world_size * (links.world_size + 1) / 2
    assert bool((values == expected).all()), f"{name} sums wrongly"
    return seconds, crossed


def sent_bytes() -> int:
    return sum(int(path.read_text()) for path in Path("/sys/class/net").glob("eth*/statistics/tx_bytes"))


if __name__ == "__main__":
    main()
