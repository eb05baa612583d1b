"""All checks of one node, theme by theme."""

from __future__ import annotations

from paceline.hardware.checks.engine import Finding
from paceline.hardware.checks.gpu_table import GPU_CHECKS, PCIE_CHECKS
from paceline.hardware.checks.network_table import NETWORK_CHECKS, OWN_NAME_CHECK, PEER_NAME_CHECK, peer_names
from paceline.hardware.checks.node_facts import NodeFacts
from paceline.hardware.checks.system_table import STORAGE_CHECKS, SYSTEM_CHECKS


def check_node(node: NodeFacts) -> list[Finding]:
    """All findings that need the facts of one node alone."""
    tables = (*GPU_CHECKS, *PCIE_CHECKS, *SYSTEM_CHECKS, *STORAGE_CHECKS, OWN_NAME_CHECK)
    return [
        *(finding for check in tables for finding in check.findings(node)),
        *(finding for peer in peer_names(node) for finding in PEER_NAME_CHECK.findings(peer)),
        *(finding for check in NETWORK_CHECKS for finding in check.findings(node)),
    ]
