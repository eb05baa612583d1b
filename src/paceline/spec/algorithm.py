"""The algorithms that sum gradients and the wire formats: names, and what the parts that do not load torch need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

AlgorithmName = Literal[
    "auto",
    "all_reduce",
    "all_to_one",
    "parameter_server",
    "parameter_server_two_level",
    "ring",
    "hierarchical",
    "tree_exact",
]
"""How gradients are summed; "tree_exact" sends values unchanged in any wire format, and its sums do not depend on the
number of workers; "auto" is a choice among the others."""

WireName = Literal["float32", "bfloat16", "float16"]
"""The wire format of gradients; "float32" sends values unchanged."""

BUCKET_BYTES = 25 << 20
"""The size of a bucket, as in DistributedDataParallel (Li et al. 2020, "PyTorch Distributed", section 4.2)."""
MIN_BLOCK_BYTES = 1 << 20
"""Smaller neighbours in a sharded model are gathered together: below, a message costs more than what it carries."""
MIN_CHUNK_BYTES = 256 << 10
"""The smallest chunk of a vector that is summed in nodes and between them: a smaller one costs more than it hides."""
NUM_CHUNKS = 16
"""How many chunks fill the pipeline of the two levels; fewer where they would be too small."""


def automatic_algorithm(workers_per_node: Sequence[int], *, is_gloo: bool, wire: str = "float32") -> AlgorithmName:
    """What "auto" is: torch's own sum; between nodes of several workers "hierarchical", over Gloo, which knows nothing
    of nodes, and in a lossy wire format, which torch's sum cannot have."""
    has_levels = len(workers_per_node) > 1 and max(workers_per_node) > 1
    return "hierarchical" if has_levels and (is_gloo or wire != "float32") else "all_reduce"
