"""How numbers travel between workers: every wire format turns values into a message and a message into values.

A format knows nothing of who sends what to whom; an algorithm knows nothing of formats. Sums are always formed in the
dtype of the values (float32 or more), never in the format's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.spec.algorithm import WireName


@dataclass(frozen=True)
class WireFormat:
    """The values themselves, or rounded to 16 bits: bfloat16 keeps float32's range, float16 has finer steps and
    overflows at 65,504.

    Values are float32 or float64; they and messages are 1-D and contiguous.
    """

    name: WireName
    dtype: torch.dtype | None = None
    """None: that of the values."""

    @property
    def is_exact(self) -> bool:
        """Whether a message gives back what was put in."""
        return self.dtype is None

    def encode(self, values: Tensor) -> Tensor:
        """The message; it may be `values` itself."""
        return values if self.dtype is None else values.to(self.dtype)

    def message_for(self, values: Tensor) -> Tensor:
        """An empty message for as many values as `values` has, to receive into."""
        return torch.empty_like(values, dtype=self.dtype)

    def decode(self, message: Tensor, into: Tensor) -> None:
        """Overwrite `into` with the values of the message."""
        into.copy_(message)

    def add(self, message: Tensor, into: Tensor) -> None:
        """Add the values of the message to `into`."""
        into.add_(message)


FLOAT32 = WireFormat("float32")

WIRE_FORMATS: dict[str, WireFormat] = {
    "float32": FLOAT32,
    "bfloat16": WireFormat("bfloat16", torch.bfloat16),
    "float16": WireFormat("float16", torch.float16),
}
