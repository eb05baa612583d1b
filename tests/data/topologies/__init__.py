"""Topologies of machines we do not have, by name; README.md says where each comes from."""

from __future__ import annotations

from pathlib import Path

from paceline.hardware import read_topology
from paceline.spec import Cluster

FOLDER = Path(__file__).parent


def paths() -> list[Path]:
    return sorted(FOLDER.glob("*.txt"))


def names() -> list[str]:
    return [path.stem for path in paths()]


def load(name: str) -> Cluster:
    return read_topology(path_of(name))


def path_of(name: str) -> Path:
    return next(path for path in paths() if path.stem == name)


def text_of(name: str) -> str:
    """As it was printed: escape codes, tabs and line ends are part of it."""
    return path_of(name).read_bytes().decode()
