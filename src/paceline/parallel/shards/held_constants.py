"""Constants of a loss, held while weights move: what `detach` and `item` returned at other weights.

A constant that is computed over all samples of a pass, as in `loss / loss.detach()`, couples their gradients and not
the value of the loss. Where weights move and constants do not, the value shows it, without a backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from paceline.parallel.random_numbers.torch_calls import FunctionCalls, calling_module

_CUTTING = (Tensor.detach, Tensor.data.__get__, Tensor.item, Tensor.tolist, Tensor.__float__)  # type: ignore[attr-defined]
"""Functions whose results do not lead back to the model."""


class HeldConstants(FunctionCalls):
    """A context for one call of a loss function: notes what the program's calls of `detach` and `item` return, or has
    them return what they did in another call."""

    def __init__(self, instead: Iterable[object] = ()) -> None:
        """
        Args:
            instead: what these calls return, in their order; further ones return what they would.
        """
        super().__init__(self._call_function)
        self.values: list[object] = []
        self._instead = iter(instead)

    def held(self) -> HeldConstants:
        """A context in which calls return what they returned in this one."""
        return HeldConstants(self.values)

    def _call_function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        if function not in _CUTTING or calling_module().partition(".")[0] in ("torch", "paceline"):
            return result
        result = next(self._instead, result)
        self.values.append(result.clone() if isinstance(result, Tensor) else result)
        return result
