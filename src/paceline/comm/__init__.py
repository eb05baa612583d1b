"""Gradient aggregation: every algorithm sums a vector over all workers in place, behind one signature.

    algorithm(values: Tensor, links: Links) -> None

Wire formats say in which dtype its messages are. `Aggregator` puts them together.
"""

from __future__ import annotations

from paceline.comm.aggregator import Aggregator as Aggregator
from paceline.comm.aggregator import Algorithm, all_reduce
from paceline.comm.hierarchical import hierarchical
from paceline.comm.links import WIRE_DTYPES as WIRE_DTYPES
from paceline.comm.links import open_links as open_links
from paceline.comm.parameter_server import all_to_one, parameter_server, parameter_server_two_level
from paceline.comm.ring import ring
from paceline.comm.tree_exact import tree_exact

ALGORITHMS: dict[str, Algorithm] = {
    "all_reduce": all_reduce,
    "all_to_one": all_to_one,
    "parameter_server": parameter_server,
    "parameter_server_two_level": parameter_server_two_level,
    "ring": ring,
    "hierarchical": hierarchical,
    "tree_exact": tree_exact,
}
