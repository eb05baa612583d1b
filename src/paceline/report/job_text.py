"""A job as text: as TOML that `load_job` reads back to the same job, and key by key."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from paceline.spec.job import Job


def job_toml(job: Job) -> str:
    """Top-level keys first, then a table each for model, data, optim, checkpoint; unset keys are left out."""
    plain = job.to_mapping()
    lines = _lines({key: item for key, item in plain.items() if not isinstance(item, Mapping)})
    for name, table in plain.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{name}]", *_lines(table)]
    return "\n".join(lines) + "\n"


def flat(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optim": {"lr": 1}} as {"optim.lr": 1}."""
    found: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{_key(key)} = {toml_value(item)}" for key, item in table.items() if item not in (None, {}, [])]


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _text(key)


def _text(text: str) -> str:
    # JSON escapes what TOML wants escaped, but for the delete character.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_value(item: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(item, bool):
        return "true" if item else "false"
    if isinstance(item, str):
        return _text(item)
    if isinstance(item, Mapping):
        pairs = (f"{_key(str(key))} = {toml_value(value)}" for key, value in item.items() if value is not None)
        return f"{{ {', '.join(pairs)} }}" if item else "{}"
    if isinstance(item, list | tuple):
        return "[" + ", ".join(toml_value(value) for value in item) + "]"
    return repr(item)
