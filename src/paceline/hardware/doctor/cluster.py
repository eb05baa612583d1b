"""Checks of several nodes together: versions, GPUs, packets, ways, clocks and the folder of runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.hardware.doctor.checks import Finding, Row, findings, first_few
from paceline.hardware.doctor.node import NodeFacts

MAX_SKEW_S = 1.0
"""Time stamps of logs, heartbeats and files of different nodes stay comparable below it."""
OPEN_PORTS = (
    "Let the nodes talk to each other on all ports; on each, for one subnet: sudo ufw allow from SUBNET, or sudo "
    "firewall-cmd --zone=trusted --add-source=SUBNET"
)
ONE_ENVIRONMENT = "Use one environment on all nodes: a shared folder, a container, or pip install from one list."


@dataclass(frozen=True)
class NodeSurvey:
    """One node as this one sees it."""

    facts: NodeFacts
    skew_s: float
    """Seconds that its clock is ahead of this node's; the way of the answer makes it less, by milliseconds."""
    sees_folder: bool
    """Whether it read what this node wrote into the folder of runs."""
    unreachable: Mapping[str, str]
    """Why it cannot connect to other nodes, by their names."""


def check_nodes(nodes: Mapping[str, NodeSurvey], folder: str) -> list[Finding]:
    """All findings that compare nodes; runs are written to `folder`."""
    models = {node.facts.gpus for node in nodes.values()}
    each = first_few([f"{name} has {node.facts.gpus}" for name, node in nodes.items()])
    unlike = f"The nodes are not alike: {each}; the slowest GPU sets the pace."
    mtus = {f"{mtu} on {way} of {name}": mtu for name, node in nodes.items() for way, mtu in node.facts.mtus.items()}
    packets = f"The largest packets differ between nodes, so that large messages may hang: {first_few(list(mtus))}."
    one_mtu = f"Set one size on all nodes and switches: sudo ip link set INTERFACE mtu {min(mtus.values(), default=0)}"
    ways: list[Row] = [
        (True, "error", f"{name} cannot connect to a port of {target}: {problem}.", OPEN_PORTS)
        for name, node in nodes.items()
        for target, problem in node.unreachable.items()
    ]
    fast, worst = max(nodes.items(), key=lambda item: abs(item[1].skew_s))
    direction = "ahead of" if worst.skew_s > 0 else "behind"
    late = f"The clock of {fast} is {abs(worst.skew_s):.1f} s {direction} that of this node."
    is_late = abs(worst.skew_s) > MAX_SKEW_S
    blind = [name for name, node in nodes.items() if not node.sees_folder]
    unseen = f"{first_few(blind)} cannot see what this node writes into {folder}, and could not resume there."
    share = "Run in a folder that all nodes share (NFS, Lustre), or name one with --folder."
    odd = "Leave the odd nodes out of --hosts."
    num_ways = len(nodes) * (len(nodes) - 1)
    is_mixed = len(set(mtus.values())) > 1
    return [
        *findings("same versions", f"All {len(nodes)} nodes have the same versions.", _different_versions(nodes)),
        *findings("same GPUs", f"All nodes have {next(iter(models))}.", [(len(models) > 1, "warning", unlike, odd)]),
        *findings("MTU", "All nodes send packets of the same size.", [(is_mixed, "warning", packets, one_mtu)]),
        *findings("firewall", f"All {num_ways} ways between nodes are open.", ways),
        *findings(
            "clocks", "All clocks agree.", [(is_late, "warning", late, "sudo timedatectl set-ntp true, on both")]
        ),
        *findings("shared folder", f"All nodes see {folder}.", [(blind, "warning", unseen, share)]),
    ]


def _different_versions(nodes: Mapping[str, NodeSurvey]) -> list[Row]:
    """Workers of different versions speak different protocols, or compute differently."""
    rows: list[Row] = []
    for package in ("paceline", "python", "torch", "CUDA"):
        found = {name: node.facts.versions.get(package) or "none" for name, node in nodes.items()}
        if package == "python":  # its patch releases are alike
            found = {name: ".".join(version.split(".")[:2]) for name, version in found.items()}
        ((usual, _),) = Counter(found.values()).most_common(1)
        others = [f"{version} on {name}" for name, version in found.items() if version != usual]
        where = next(name for name, version in found.items() if version == usual)
        rows.append((others, "error", f"{package} is {usual} on {where}, but {first_few(others)}.", ONE_ENVIRONMENT))
    return rows
