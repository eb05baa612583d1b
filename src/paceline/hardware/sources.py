"""Raw text of this machine: files and commands that may be missing, forbidden or broken."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path


def read_text(path: Path) -> str:
    """A file's text without the spaces around it; empty where it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def read_integer(path: Path) -> int | None:
    """The whole number in a file; None where there is none."""
    text = read_text(path)
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None


def entries(folder: Path) -> list[Path]:
    """What is in a folder, by name; nothing where there is no such folder."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def output_of(command: Sequence[str], timeout_s: float) -> str | None:
    """What a command prints; None where it is missing, fails or hangs."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
