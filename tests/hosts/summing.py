"""The program of one worker: sum a vector by some algorithms in turn; rank 0 prints seconds and bytes a call.

python -m tests.hosts.summing '{"num_bytes": 25000000, "calls": [["hierarchical", "float32"]], "rounds": 2}'
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline import env
from paceline.comm import ALGORITHMS, WIRE_FORMATS, Links, open_links
from paceline.spec import Plan
from paceline.train.process_group import join, leave
from tests.hosts.cluster import INTERFACE


def bytes_sent() -> int:
    """Over this node's link so far."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def call(name: str, wire: str, num_bytes: int, links: Links) -> dict[str, Any]:
    """Sum once; the slowest worker's seconds, the most bytes that any node sent, and whether the sum is right."""
    values = torch.full((num_bytes // 4,), float(links.rank + 1))
    dist.barrier(links.group)
    sent, started = bytes_sent(), time.perf_counter()
    ALGORITHMS[name](values, replace(links, wire=WIRE_FORMATS[wire]))
    seconds = time.perf_counter() - started
    dist.barrier(links.group)
    figures = torch.tensor([seconds, float(bytes_sent() - sent)], dtype=torch.float64)
    dist.all_reduce(figures, op=dist.ReduceOp.MAX, group=links.group)
    expected = links.world_size * (links.world_size + 1) / 2
    is_right = bool(((values - expected).abs() <= 0.02 * expected).all())
    return {"seconds": float(figures[0]), "sent_bytes": float(figures[1]), "is_right": is_right}


def main(request: dict[str, Any]) -> None:
    facts = env.worker_facts()
    world = join(facts, Plan(world_size=facts.world_size, timeout_s=60))
    assert world.group is not None
    links = open_links(world.group, torch.device("cpu"), 60)
    if request.get("alternating"):  # a ring that enters and leaves a node at every step
        turns = zip(*links.nodes, strict=True)
        links = replace(links, nodes=(tuple(rank for turn in turns for rank in turn),), shared_memory=None)
    for name, wire in request["calls"]:
        call(name, wire, 1 << 16, links)  # connections are made at the first call
    results: dict[str, list[dict[str, Any]]] = {}
    for _ in range(request["rounds"]):
        for name, wire in request["calls"]:
            results.setdefault(f"{name} {wire}", []).append(call(name, wire, request["num_bytes"], links))
    if facts.rank == 0:
        print(json.dumps({"nodes": links.nodes, "results": results}))
    leave()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
