"""What a node tells the launcher of itself: `python -m paceline.workflows.node` prints it as one line of JSON."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import socket
import sys

from paceline.hardware import detect
from paceline.network_addresses import addresses
from paceline.spec.codec import to_mapping


def describe_node() -> dict[str, object]:
    """Versions that must be equal on all nodes, hardware, addresses by interface, and a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    return {"versions": versions(), "node": to_mapping(detect().nodes[0]), "addresses": addresses(), "port": port}


def versions() -> dict[str, str]:
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "(none)"
    return {"paceline": importlib.metadata.version("paceline"), "torch": torch, "Python": platform.python_version()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(describe_node()) + "\n")
