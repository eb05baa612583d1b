"""The program of one worker: sum a vector by some algorithms in turn; rank 0 prints seconds and bytes a call.

Bytes are those of each network interface that workers use, on the node that sent the most over it.

python -m tests.old.hosts.summing '{"num_bytes": 25000000, "calls": [["hierarchical", "float32"]], "rounds": 2}'
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline import env
from paceline.comm import ALGORITHMS, WIRE_FORMATS, Links, open_links
from paceline.spec import Plan
from paceline.train.process.process_group import join, leave


def bytes_sent() -> Tensor:
    """Over each of this node's links so far."""
    files = [Path(f"/sys/class/net/{name}/statistics/tx_bytes") for name in env.gloo_interfaces()]
    return torch.tensor([float(file.read_text()) for file in files], dtype=torch.float64)


def call(name: str, wire: str, num_bytes: int, links: Links) -> dict[str, Any]:
    """Sum once; the slowest worker's seconds, the most bytes that any node sent, the sum's hash, and whether it is
    right."""
    pattern = torch.linspace(1, 2, num_bytes // 4)
    values = pattern * ((links.rank + 1) / 3)
    dist.barrier(links.group)
    sent, started = bytes_sent(), time.perf_counter()
    ALGORITHMS[name](values, replace(links, wire=WIRE_FORMATS[wire]))
    seconds = time.perf_counter() - started
    dist.barrier(links.group)
    figures = torch.tensor([seconds, *(bytes_sent() - sent)], dtype=torch.float64)
    dist.all_reduce(figures, op=dist.ReduceOp.MAX, group=links.group)
    expected = pattern * (links.world_size * (links.world_size + 1) / 6)
    is_right = bool(((values - expected).abs() <= 0.02 * expected).all())
    bits = hashlib.sha256(values.numpy().tobytes()).hexdigest()
    seconds, *over_each = figures.tolist()
    return {
        "seconds": seconds,
        "sent_bytes": sum(over_each),
        "over_each": over_each,
        "bits": bits,
        "is_right": is_right,
    }


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
    over_one = {"over one": replace(links, num_interfaces=1)} if links.num_interfaces > 1 else {}
    for _ in range(request["rounds"]):
        for name, wire in request["calls"]:
            for suffix, chosen in {"": links, **over_one}.items():
                found = call(name, wire, request["num_bytes"], chosen)
                results.setdefault(f"{name} {wire} {suffix}".strip(), []).append(found)
    if facts.rank == 0:
        print(json.dumps({"nodes": links.nodes, "results": results}))
    leave()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
