"""Which of torch's operators draw random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def draws_random_numbers(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operator draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    arguments = operator._schema.arguments
    given = {one.name: one.default_value for one in arguments}
    given |= {one.name: value for one, value in zip(arguments, args, strict=False)}
    # Attention is tagged as well, and draws only where it drops something.
    return (given | dict(kwargs)).get("dropout_p") != 0.0


class NotesDraws(TorchDispatchMode):
    """Notes whether what runs inside draws random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.has_drawn |= draws_random_numbers(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
