"""Which of torch's operators draw random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def draws_random_numbers(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operator draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    arguments = operator._schema.arguments
    given = {one.name: one.default_value for one in arguments}
    given |= {one.name: value for one, value in zip(arguments, args, strict=False)}
    # Attention is tagged as well, and draws only where it drops something.
    return (given | dict(kwargs)).get("dropout_p") != 0.0
