"""The algorithms that sum gradients: their names, and what the parts that do not load torch need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

BUCKET_BYTES = 25 << 20
"""The size of a bucket, as in DistributedDataParallel (Li et al. 2020, "PyTorch Distributed", section 4.2)."""
MIN_BLOCK_BYTES = 1 << 20
"""Smaller neighbours in a sharded model are gathered together: below, a message costs more than what it carries."""
MAX_CHUNK_BYTES = 2 << 20
MIN_CHUNK_BYTES = 256 << 10
"""A vector is cut into chunks where nodes are one of two levels; below this a chunk costs more than it hides."""
NUM_CHUNKS = 16
"""How many chunks fill the pipeline of the two levels; fewer where they would be too small."""
CHOICE_MARGIN = 0.1
"""The part by which "auto" wants another algorithm to be faster than the backend's own: a smaller gain may be noise."""


@dataclass(frozen=True)
class AlphaBeta:
    """The alpha-beta model (Hockney 1994) of a link or a sum: n bytes take alpha_s + n * beta_s_per_byte one way."""

    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, num_bytes: float) -> float:
        return self.alpha_s + num_bytes * self.beta_s_per_byte


@dataclass(frozen=True)
class AlgorithmFacts:
    """How an algorithm differs from the others, besides its formula."""

    has_levels: bool = False
    """Whether it sums inside nodes first, where values are sent unchanged in any wire format."""
    ignores_wire: bool = False
    """Whether values are sent unchanged in any wire format, between nodes too."""
    is_candidate: bool = False
    """Whether "auto" may choose it between nodes; one that has levels, only where a node has several workers."""


ALGORITHM_FACTS: dict[AlgorithmName, AlgorithmFacts] = {
    "all_reduce": AlgorithmFacts(is_candidate=True),
    "all_to_one": AlgorithmFacts(),
    "parameter_server": AlgorithmFacts(),
    "parameter_server_two_level": AlgorithmFacts(has_levels=True),
    "ring": AlgorithmFacts(is_candidate=True),
    "hierarchical": AlgorithmFacts(has_levels=True, is_candidate=True),
    "tree_exact": AlgorithmFacts(ignores_wire=True),
}


SERVER_ALGORITHMS: tuple[AlgorithmName, ...] = ("parameter_server", "parameter_server_two_level")
"""Those in which some of the workers serve."""


def algorithm_names() -> tuple[AlgorithmName, ...]:
    """Every algorithm there is; "auto" is a choice among them."""
    return tuple(ALGORITHM_FACTS)


def automatic_candidates(workers_per_node: Sequence[int], *, shares_memory: bool) -> list[AlgorithmName]:
    """The algorithms among which "auto" chooses: the backend's own first, then those that know of nodes.

    Args:
        workers_per_node: of each node.
        shares_memory: whether the workers of a node add up in memory that they share. Where they do not, nothing is
            faster inside a node than the backend, which knows the links there best.
    """
    if len(workers_per_node) == 1:
        return ["all_reduce", "hierarchical"] if shares_memory else ["all_reduce"]
    names = [
        name
        for name, facts in ALGORITHM_FACTS.items()
        if facts.is_candidate and (not facts.has_levels or max(workers_per_node) > 1)
    ]
    return sorted(names, key=lambda name: (name != "all_reduce", not ALGORITHM_FACTS[name].has_levels))
