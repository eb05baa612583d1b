"""How numbers travel between workers: every wire format turns values into a message and a message into values.

A format knows nothing of who sends what to whom; an algorithm knows nothing of formats. Sums are always formed in the
dtype of the values (float32 or more), never in the format's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

INT8_CHUNK = 1024
"""Values that share one scale: 4 bytes of scale for 1,024 of values."""


@dataclass(frozen=True)
class Float:
    """The values themselves, or rounded to 16 bits: bfloat16 keeps float32's range, float16 has finer steps and
    overflows at 65,504.

    Values are float32 or float64; they and messages are 1-D and contiguous.
    """

    name: str
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


@dataclass(frozen=True)
class Int8:
    """Rounded to 255 steps between -scale and scale, where scale is the largest magnitude of a chunk of values.

    A message is the chunks' float32 scales as bytes, then one byte a value. A chunk with an infinite or undefined value
    comes back as undefined, so that an overflow on one worker is seen by all.
    """

    name: str = "int8"
    is_exact: bool = False

    def encode(self, values: Tensor) -> Tensor:
        chunks = _in_chunks(values.float())
        scales = chunks.abs().amax(1)
        # Divided before it is multiplied: 127 / scale would overflow for small scales.
        steps = chunks.div(scales.masked_fill(scales == 0, 1.0).unsqueeze(1)).mul_(127.0).round_()
        # Without a finite scale the bytes mean nothing; the scale alone carries the news.
        steps = steps.nan_to_num_(0.0).to(torch.int8).view(-1)[: values.numel()]
        return torch.cat([scales.view(torch.uint8), steps.view(torch.uint8)])

    def message_for(self, values: Tensor) -> Tensor:
        num_chunks = -(-values.numel() // INT8_CHUNK)
        return torch.empty(4 * num_chunks + values.numel(), dtype=torch.uint8, device=values.device)

    def decode(self, message: Tensor, into: Tensor) -> None:
        into.copy_(self._values(message, into.numel()))

    def add(self, message: Tensor, into: Tensor) -> None:
        into.add_(self._values(message, into.numel()))

    @staticmethod
    def _values(message: Tensor, num_values: int) -> Tensor:
        num_chunks = -(-num_values // INT8_CHUNK)
        # A copy, because a view as float32 needs memory aligned to four bytes.
        scales = message[: 4 * num_chunks].clone().view(torch.float32)
        steps = message[4 * num_chunks :].view(torch.int8).float()
        # In this order the largest value of a chunk comes back exactly, and nothing overflows on the way.
        return _in_chunks(steps).div_(127.0).mul_(scales.unsqueeze(1)).view(-1)[:num_values]


def _in_chunks(values: Tensor) -> Tensor:
    """`values` as rows of INT8_CHUNK, the last one filled up with zeros."""
    return torch.nn.functional.pad(values, (0, -values.numel() % INT8_CHUNK)).view(-1, INT8_CHUNK)


WireFormat = Float | Int8
FLOAT32 = Float("float32")

WIRE_FORMATS: dict[str, WireFormat] = {
    "float32": FLOAT32,
    "bfloat16": Float("bfloat16", torch.bfloat16),
    "float16": Float("float16", torch.float16),
    "int8": Int8(),
}
