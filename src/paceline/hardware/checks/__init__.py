"""The checks of `paceline doctor`: files of facts, tables of what can be wrong with them, and the engine of both."""

from __future__ import annotations

from paceline.hardware.checks.between_nodes import check_nodes
from paceline.hardware.checks.engine import Finding, Level
from paceline.hardware.checks.node_checks import check_node
from paceline.hardware.checks.node_facts import NodeFacts, node_facts
from paceline.hardware.checks.reachability import ReachTest, answer_until, try_to_reach
from paceline.hardware.checks.survey import Survey, survey

__all__ = [
    "Finding",
    "Level",
    "NodeFacts",
    "ReachTest",
    "Survey",
    "answer_until",
    "check_node",
    "check_nodes",
    "node_facts",
    "survey",
    "try_to_reach",
]
