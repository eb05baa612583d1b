"""The names of the algorithms that sum gradients."""

from __future__ import annotations

from typing import Literal, get_args

AlgorithmName = Literal[
    "auto",
    "all_reduce",
    "all_to_one",
    "parameter_server",
    "parameter_server_two_level",
    "ring",
    "halving_doubling",
    "hierarchical",
    "tree_exact",
]


def algorithm_names() -> tuple[AlgorithmName, ...]:
    """Every algorithm there is; "auto" is a choice among them."""
    return tuple(name for name in get_args(AlgorithmName) if name != "auto")
