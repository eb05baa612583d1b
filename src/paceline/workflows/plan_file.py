"""A plan that `paceline plan` wrote, read back."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.errors import JobError
from paceline.spec import Plan


def load_plan(path: Path) -> Plan:
    """The plan in a file.

    Raises:
        JobError: it cannot be read, or is no plan; the message names the file.
    """
    try:
        mapping = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(mapping, dict):
            raise JobError("it should be a table")
        return Plan.from_mapping(mapping)
    except (OSError, ValueError, JobError) as problem:
        raise JobError(f"{path} cannot be read as a plan: {problem}") from None
