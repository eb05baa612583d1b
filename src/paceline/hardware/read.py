"""Reads a topology file in any of the supported formats."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import ClusterError, file_problems, shown
from paceline.hardware.smi_matrix import parse_topology
from paceline.regular_files import read_text
from paceline.spec import Cluster


def read_topology(source: Path | str) -> Cluster:
    """The cluster in a file or text, recognised by its content.

    Known are `nvidia-smi topo -m` (with `nvidia-smi -L` before it, if you like) and cluster.json.

    Args:
        source: A path, or the text itself: a string of several lines, or one that begins like JSON.

    Raises:
        ClusterError: no such file, or text that is none of these.
    """
    if isinstance(source, str) and (len(source.splitlines()) > 1 or source.startswith("{")):
        return _parse(source)
    path = Path(source)
    with file_problems(f"The topology file {shown(str(source))} cannot be read", ClusterError):
        text = read_text(path, encoding="utf-8-sig", errors="replace")
    try:
        return _parse(text)
    except ClusterError as problem:
        raise ClusterError(f"{path}: {problem}") from None


def _parse(text: str) -> Cluster:
    if text.lstrip("\ufeff \t\r\n").startswith("{"):
        return Cluster.from_json(text.lstrip("\ufeff"), "This")
    return Cluster((parse_topology(text),))
