"""All that one node finds out about itself, as one value that travels as JSON."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline import env
from paceline.hardware.checks.finding import Finding
from paceline.hardware.checks.gpu import GpusFacts, check_gpus, collect_gpus, count_xids, read_kernel_log
from paceline.hardware.checks.network_checks import NetworkFacts, check_network, collect_network
from paceline.hardware.checks.pcie import PcieFacts, check_pcie, collect_pcie
from paceline.hardware.checks.storage_checks import StorageFacts, check_storage, collect_storage
from paceline.hardware.checks.system import SystemFacts, check_system, collect_system
from paceline.spec.codec import from_mapping, to_mapping

TORCH_LIMIT_S = 120.0
"""The first touch of GPUs loads gigabytes of libraries."""


@dataclass(frozen=True)
class NodeFacts:
    """What the checks of one node look at; nothing in it is judged yet."""

    hostname: str
    system: SystemFacts = field(default_factory=SystemFacts)
    storage: StorageFacts = field(default_factory=StorageFacts)
    network: NetworkFacts = field(default_factory=NetworkFacts)
    pcie: PcieFacts = field(default_factory=PcieFacts)
    gpus: GpusFacts = field(default_factory=GpusFacts)

    @classmethod
    def from_mapping(cls, mapping: dict[str, Any]) -> NodeFacts:
        """Raises `JobError` for what another version of Paceline may have sent."""
        return from_mapping(cls, mapping)

    def to_mapping(self) -> dict[str, Any]:
        return to_mapping(self)


def node_facts(
    addresses: Sequence[tuple[str, str]],
    variables: Mapping[str, str],
    *,
    folder: Path,
    marker: Path | None = None,
    peers: Sequence[str] = (),
) -> NodeFacts:
    """Look at this node.

    Args:
        addresses: (interface, address) of this node.
        variables: those of the environment that name network interfaces.
        folder: where runs are written.
        marker: a file that another node has written into a folder that should be shared.
        peers: names of the other nodes.
    """
    pcie = collect_pcie()
    gpus = collect_gpus(num_on_bus=pcie.num_gpus)
    if gpus.gpus:
        log = read_kernel_log()
        gpus = dataclasses.replace(
            gpus,
            xids=None if log is None else count_xids(log),
            torch_sees=None if env.visible_gpus() == [] else torch_sees(),
        )
    return NodeFacts(
        hostname=socket.gethostname(),
        system=collect_system(),
        storage=collect_storage(folder, marker),
        network=collect_network(addresses, variables, peers),
        pcie=pcie,
        gpus=gpus,
    )


def torch_sees() -> int:
    """GPUs that torch can use, asked in a process of its own: libraries that do not fit may take it down."""
    question = "import torch; torch.cuda.init(); print(torch.cuda.device_count())"
    try:
        answer = subprocess.run(
            [sys.executable, "-c", question], capture_output=True, text=True, timeout=TORCH_LIMIT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return int(answer) if answer.strip().isdigit() else 0


def check_node(facts: NodeFacts, num_nodes: int = 1) -> list[Finding]:
    """All checks that need one node alone."""
    return [
        *check_gpus(facts.gpus, facts.system.versions),
        *check_pcie(facts.pcie),
        *check_system(facts.system, has_gpus=bool(facts.gpus.gpus), has_rdma=bool(facts.network.rdma_ports)),
        *check_storage(facts.storage),
        *check_network(facts.network, num_nodes),
    ]
