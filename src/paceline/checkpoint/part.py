"""One worker's part of a checkpoint: a block of host memory that is already the file it will become.

The file is in the safetensors format: eight bytes that say how long the header is, a JSON header with the dtype, shape
and place of every tensor, then the numbers. Training waits only while tensors are copied into the block; what is
written later comes straight from there, so nothing is copied twice and the block serves every checkpoint of a run.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from paceline.checkpoint.manifest import PartFile
from paceline.checkpoint.storage import PIECE_BYTES
from paceline.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""As the safetensors format calls them."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}

_ALIGNMENT = 8


class Part:
    """A block of memory for the tensors of one worker."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)

    def stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors` into the block; when this returns, the originals may change.

        Raises:
            CheckpointError: a dtype that the format lacks.
        """
        header, offsets, num_bytes = _layout(tensors)
        if len(self._block) != num_bytes:
            # On a GPU machine memory that the GPU can write to by itself.
            pinned = any(tensor.is_cuda for tensor in tensors.values())
            self._block = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._block[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        for name, tensor in tensors.items():
            start = offsets[name]
            place = self._block[start : start + tensor.numel() * tensor.element_size()]
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()

    def pieces(self) -> Iterator[memoryview]:
        """The file, a little at a time."""
        view = memoryview(cast(Any, self._block.numpy()))
        for start in range(0, len(view), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]


class Summed:
    """Passes pieces of a file on and keeps its length and CRC-32."""

    def __init__(self, pieces: Iterable[bytes | memoryview]) -> None:
        self._pieces = pieces
        self._num_bytes = 0
        self._crc = 0

    def __iter__(self) -> Iterator[bytes | memoryview]:
        for piece in self._pieces:
            self._crc = zlib.crc32(piece, self._crc)
            self._num_bytes += len(piece)
            yield piece

    def file(self, name: str) -> PartFile:
        return PartFile(name, self._num_bytes, f"{self._crc:08x}")


def verify_part(pieces: Iterable[bytes], file: PartFile) -> None:
    """Raises `CheckpointError` where a part's content is not what the manifest says."""
    summed = Summed(pieces)
    for _ in summed:
        pass
    found = summed.file(file.name)
    if found.num_bytes != file.num_bytes:
        raise CheckpointError(f"{file.name} has {found.num_bytes:,} bytes instead of {file.num_bytes:,}")
    if found.crc32 != file.crc32:
        raise CheckpointError(f"{file.name} is damaged: its checksum is wrong")


def read_part(content: bytes, file: PartFile) -> dict[str, Tensor]:
    """The tensors in a part's content.

    Raises:
        CheckpointError: it is not what the manifest says.
    """
    verify_part([content], file)
    try:
        return load(content)
    except (SafetensorError, ValueError, KeyError) as problem:
        raise CheckpointError(f"{file.name} is no safetensors file: {problem}") from None


def _layout(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int], int]:
    """The header, where each tensor's numbers begin in the file, and how long the file is.

    The format wants no gaps between tensors: the widest numbers come first, so that all are aligned.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    entries: dict[str, object] = {}
    offset = 0
    starts = {}
    for name, tensor in ordered:
        if tensor.dtype not in NAMES:
            raise CheckpointError(f"The tensor '{name}' has dtype {tensor.dtype}, which a checkpoint cannot hold.")
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        starts[name], offset = offset, end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}, len(header) + offset
