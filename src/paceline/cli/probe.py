"""`paceline probe`: what links, model, loader and disk of these nodes really do, for plans to be made from."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from paceline.cli.console import print_table
from paceline.cli.options import AsJson, options_of
from paceline.spec import Cluster, JobTiming, Link
from paceline.spec.codec import to_mapping
from paceline.workflows import probe as workflow


@options_of(workflow.probe, budget={"min": 1}, out={"metavar": "FILE"})
def probe(as_json: AsJson = False, **options: Any) -> None:
    """Measure links inside and between nodes, and a job's model, loader and checkpoints; write cluster.json."""
    result = workflow.probe(**options)
    measured, timing = result.measured, result.timing
    links = [(node.hostname, link) for node in measured.nodes for link in node.links if link.source == "measured"]
    if as_json:
        shown = {
            "links": [{"node": hostname, **to_mapping(link)} for hostname, link in links],
            "network": [to_mapping(link) for link in measured.network],
            "timing": None if timing is None else to_mapping(timing),
            "not_measured": list(result.not_measured),
            "cluster": str(options["out"]),
        }
        print(json.dumps(shown))
        return
    if links:
        _print_links(links, has_several_nodes=len(measured.nodes) > 1)
    if measured.network:
        _print_network(measured)
    if timing is not None:
        _print_timing(timing, f" of {measured.nodes[0].hostname}" if len(measured.nodes) > 1 else "")
    for reason in result.not_measured:
        print(f"not measured: {reason}")
    print(options["out"])


def _print_links(links: Iterable[tuple[str, Link]], *, has_several_nodes: bool) -> None:
    first: dict[tuple[str, str], Link] = {}  # a label is measured once on each node, on its first pair
    for hostname, link in links:
        first.setdefault((hostname, link.label), link)
    rows = [
        {
            "link": label,
            "between": " and ".join(link.ends),
            **({"on": hostname} if has_several_nodes else {}),
            "GB/s": "" if link.bytes_per_s is None else f"{link.bytes_per_s / 1e9:.2f}",
            "latency µs": "" if link.latency_s is None else f"{link.latency_s * 1e6:.1f}",
        }
        for (hostname, label), link in first.items()
    ]
    print_table(rows, left=("link", "between", "on"), pipe_columns=100)


def _print_network(measured: Cluster) -> None:
    rows = [
        {
            "network": link.interface,
            "between": " and ".join(link.ends),
            "GB/s": f"{link.bytes_per_s / 1e9:.3g}",
            "GB/s by one stream": ""
            if link.single_stream_bytes_per_s is None
            else f"{link.single_stream_bytes_per_s / 1e9:.3g}",
            "latency µs": f"{link.latency_s * 1e6:.1f}",
        }
        for link in measured.network
    ]
    print_table(rows, left=("network", "between"), pipe_columns=100)


def _print_timing(timing: JobTiming, of_node: str) -> None:
    rows = [
        {
            "micro-batch": str(row.micro_batch_size),
            "ms a pass": f"{row.seconds * 1e3:.2f}",
            "samples/s": f"{row.micro_batch_size / row.seconds:,.0f}",
            **({} if row.peak_memory_bytes is None else {"peak GiB": f"{row.peak_memory_bytes / 2**30:.2f}"}),
        }
        for row in timing.micro_batches
    ]
    print_table(rows, pipe_columns=100)
    print(f"{timing.job}: {timing.num_parameters:,} parameters on {timing.device}{of_node}")
    if timing.largest_micro_batch_size is not None:
        print(f"largest micro-batch that was tried and fits: {timing.largest_micro_batch_size}")
    if timing.workers_together > 1:
        print(
            f"{timing.workers_together} workers at the same time, {timing.workers_together_on_node} on a node: "
            f"a step takes {timing.together_slowdown:.2f} times as long"
        )
    for timed in timing.sums:
        print(f"summing gradients by {timed.algorithm} in {timed.wire}: {timed.waiting_s * 1e3:.1f} ms more")
    if timing.loader_samples_per_s is not None:
        print(f"loader: {timing.loader_samples_per_s:,.0f} samples/s")
    if timing.checkpoint_bytes_per_s is not None:
        print(f"checkpoints: {timing.checkpoint_bytes_per_s / 1e6:,.0f} MB/s")
