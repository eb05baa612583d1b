"""Contexts in which another function makes the calls of torch: of its operators, or of its Python functions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class OperatorCalls(TorchDispatchMode):
    """Inside, another function calls torch's operators."""

    def __init__(self, call: Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        """
        Args:
            call: call(operator, types, args, kwargs).
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return self._call(func, types, args, kwargs or {})


class FunctionCalls(TorchFunctionMode):
    """Inside, another function calls torch's functions."""

    def __init__(self, call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        """
        Args:
            call: call(function, args, kwargs).
        """
        super().__init__()
        self._call = call

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return self._call(func, args, kwargs or {})


_CONTEXTS = ("paceline.parallel.random_numbers", "paceline.parallel.shards")
"""The packages in which there are classes of such contexts."""


def calling_module(*passed_over: str) -> str:
    """The name of the module whose code made the call that a context handles now.

    Args:
        passed_over: packages that call torch for others.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith((*_CONTEXTS, *passed_over)):
        frame = frame.f_back
    return "" if frame is None else frame.f_globals.get("__name__", "")
