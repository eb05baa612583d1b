"""The agent that a launcher runs on every node, where it starts and watches workers."""

from __future__ import annotations

from paceline.hardware import detect
from paceline.launch.agent import serve
from paceline.spec.codec import to_mapping


def agent() -> None:
    """Start workers on this node for a launcher that talks to this process over its standard streams."""
    serve(to_mapping(detect().nodes[0]))
