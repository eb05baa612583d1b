"""All that one node finds out about itself, as one value that travels as JSON."""

from __future__ import annotations

import dataclasses
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline import env
from paceline.hardware.checks.gpu_facts import GpusFacts, collect_gpus, count_xids, read_kernel_log
from paceline.hardware.checks.network_facts import NetworkFacts, collect_network
from paceline.hardware.checks.pcie_facts import PcieFacts, collect_pcie
from paceline.hardware.checks.storage_facts import StorageFacts, collect_storage
from paceline.hardware.checks.system_facts import SystemFacts, collect_system
from paceline.hardware.sources import output_of
from paceline.spec.codec import JsonValue

TORCH_LIMIT_S = 120.0
"""Initialising CUDA loads gigabytes of libraries."""


@dataclass(frozen=True)
class NodeFacts(JsonValue):
    """What the checks of one node look at; nothing in it is judged yet."""

    hostname: str
    system: SystemFacts = field(default_factory=SystemFacts)
    storage: StorageFacts = field(default_factory=StorageFacts)
    network: NetworkFacts = field(default_factory=NetworkFacts)
    pcie: PcieFacts = field(default_factory=PcieFacts)
    gpus: GpusFacts = field(default_factory=GpusFacts)

    @property
    def has_peers(self) -> bool:
        """Whether the run has other nodes; alone, a node talks to itself through loopback and needs no name."""
        return bool(self.network.peers)


def node_facts(
    addresses: Sequence[tuple[str, str]],
    variables: Mapping[str, str],
    *,
    folder: Path,
    marker: Path | None = None,
    peers: Sequence[str] = (),
) -> NodeFacts:
    """Collect the facts of this node.

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
    answer = output_of([sys.executable, "-c", question], TORCH_LIMIT_S) or ""
    return int(answer) if answer.strip().isdigit() else 0
