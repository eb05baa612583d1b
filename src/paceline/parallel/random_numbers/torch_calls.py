"""Contexts in which another function makes the calls of torch: of its operators, or of its Python functions."""

from __future__ import annotations

from collections.abc import Callable
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
