"""The checks of `paceline doctor`, a theme a file: what is looked at, and functions of it that say what is wrong."""

from __future__ import annotations

from paceline.hardware.checks.facts import NodeFacts, check_node, node_facts
from paceline.hardware.checks.finding import Finding, Level
from paceline.hardware.checks.nodes import check_nodes
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
