"""Wire formats of gradients: their names, and what the parts that do not load torch need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WireName = Literal["float32", "bfloat16", "float16"]
"""The wire format; "float32" sends values unchanged."""


@dataclass(frozen=True)
class WireFacts:
    """What a wire format costs and loses."""

    bytes_per_value: float
    """Bytes of a message for each value; values that are exact and wider than float32 take their own."""
    rounding: float
    """Largest error of one rounding, as a fraction of the value."""
    loss: str = ""
    """The loss of precision, in words for the log of a run; empty: none."""


WIRE_FACTS: dict[WireName, WireFacts] = {
    "float32": WireFacts(4.0, 2.0**-24),
    "bfloat16": WireFacts(2.0, 2.0**-8, loss="they are sent rounded to bfloat16 (8 bits of precision)"),
    "float16": WireFacts(
        2.0, 2.0**-11, loss="they are sent rounded to float16 (11 bits of precision, overflow at 65,504)"
    ),
}
