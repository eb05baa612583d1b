"""Every way to sum over 2 nodes x 2 workers, which are namespaces on this machine with shaped links between them.

    python -m benchmarks.hosts --out DIR [--rate 200] [--size 100MB]
    python -m benchmarks.hosts --out DIR --links 2 [--used 1] --only all_reduce,hierarchical,tree_exact

Seconds, bytes over each link by the nodes' own counters, and the physical minimum, for one size; and all sizes from
64 KiB to it. Prints the table of that size as JSON and as Markdown, and leaves it with a page in DIR. Needs root.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.kit.nodes.cluster import Cluster, run_on_nodes, why_not

from paceline.cli.options import parse_size
from paceline.errors import PacelineError
from paceline.measure.values import REQUEST_FILE
from paceline.report.comm_bench import PAGE_FILE, comm_mapping, left_out_sentences, place_text, sizes
from paceline.report.comm_page import load_timings, write_comm_bench
from paceline.report.comm_table import comm_markdown_at
from paceline.report.formats import rate_text, size_text
from paceline.spec.algorithm import algorithm_names
from paceline.spec.comm_timing import CommCase, CommRequest, message_sizes

WORKERS_PER_NODE = (2, 2)
SMALLEST_BYTES = 64 << 10
START_S = 60
"""For the workers to load torch and to connect, and for the calls that the budget does not foresee."""

CASES = (
    *(CommCase(name) for name in algorithm_names()),
    CommCase("ring", order="alternating"),
    *(CommCase(name, wire) for wire in ("bfloat16",) for name in ("all_reduce", "hierarchical")),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hosts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for timings.json, comm.html and comm.md")
    parser.add_argument("--rate", type=float, default=200.0, help="of each link, in Mbit/s")
    parser.add_argument("--links", type=int, default=1, help="of each node, each to a switch of its own")
    parser.add_argument("--used", type=int, help="so many of them are named for workers; all, if not given")
    parser.add_argument("--only", default="", help="these algorithms alone, in float32")
    parser.add_argument("--size", default="100MB", help="largest message, the one of the table")
    parser.add_argument("--rounds", type=int, default=3, help="most rounds of a size")
    parser.add_argument("--budget", type=float, default=420.0, help="seconds for all timings")
    arguments = parser.parse_args()
    if reason := why_not():
        raise PacelineError(f"This benchmark cannot run here: {reason}.")
    rate_bits_per_s = arguments.rate * 1e6
    size_bytes = parse_size(arguments.size, "--size")
    used = arguments.used or arguments.links
    cluster = Cluster(len(WORKERS_PER_NODE), rate_bits_per_s, arguments.links)
    named = tuple(CommCase(name) for name in algorithm_names() if name in arguments.only.split(","))
    request = CommRequest(
        cases=named or CASES,
        sizes_bytes=(size_bytes,) if named else message_sizes(SMALLEST_BYTES, size_bytes),
        device_kind="cpu",
        num_rounds=arguments.rounds,
        budget_s=arguments.budget,
        timeout_s=arguments.budget,
        link_rate_bytes_per_s=used * rate_bits_per_s / 8,
        interface=",".join(cluster.interfaces[:used]),
    )
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    request.save(out / REQUEST_FILE)
    program = ["-m", "paceline.measure.collective_bench", str(out / REQUEST_FILE), str(out)]
    print(f"at most {arguments.budget + START_S:.0f} s …", file=sys.stderr)
    with cluster:
        run_on_nodes(
            cluster,
            WORKERS_PER_NODE,
            program,
            timeout_s=arguments.budget + START_S,
            env={"GLOO_SOCKET_IFNAME": request.interface or ""},
        )
    timings = load_timings(out)
    write_comm_bench(timings, out)
    print(json.dumps(comm_mapping(timings)))
    size = sizes(timings)[-1]
    print(
        f"\n{size_text(size)} over {place_text(timings)}, {used} of {arguments.links} links of "
        f"{rate_text(rate_bits_per_s / 8)} a node\n"
    )
    print(comm_markdown_at(timings, size))
    print("\n".join(left_out_sentences(timings)))
    print(out / PAGE_FILE)


if __name__ == "__main__":
    try:
        main()
    except PacelineError as error:
        print(f"hosts: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
