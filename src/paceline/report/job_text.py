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
    lines = [f"{key} = {_value(item)}" for key, item in plain.items() if not _is_unset(item) and not _is_table(item)]
    for name, table in plain.items():
        if _is_table(table):
            lines += ["", f"[{name}]"]
            lines += [f"{_key(key)} = {_value(item)}" for key, item in table.items() if not _is_unset(item)]
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


def _is_unset(item: Any) -> bool:
    return item is None or item == {} or item == []


def _is_table(item: Any) -> bool:
    return isinstance(item, Mapping)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _text(key)


def _text(text: str) -> str:
    # JSON escapes what TOML wants escaped, but for the delete character.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(item: Any) -> str:
    if isinstance(item, bool):
        return "true" if item else "false"
    if isinstance(item, str):
        return _text(item)
    if isinstance(item, Mapping):
        pairs = (f"{_key(str(key))} = {_value(value)}" for key, value in item.items() if value is not None)
        return "{ " + ", ".join(pairs) + " }"
    if isinstance(item, list | tuple):
        return "[" + ", ".join(_value(value) for value in item) + "]"
    return repr(item)
