"""One worker's data file of a checkpoint: staged in host memory, and read in slices that are checked as they are read.

The file is in the safetensors format: eight bytes that say how long the header is, a JSON header with the dtype, shape
and place of every tensor, then the numbers. Training waits only while tensors are copied into a block of memory that
has the bytes of the file; what is written later comes straight from there, so nothing is copied twice and the block
serves every checkpoint of a run. Files are read by plain reads, not by a memory map: where a disk cannot read a sector,
that is an error to go on from, not the end of the process.
"""

from __future__ import annotations

import json
import math
import mmap
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from paceline.checkpoint.manifest import DataFile, StoredSlice
from paceline.checkpoint.storage import Storage
from paceline.errors import CheckpointError, reason_of

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
"""The data types by their names in the safetensors format."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_PIECE_BYTES = 8 << 20
"""Bytes written at a time."""

_ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector of a processor. Copies between places so aligned are the fastest."""


def dtype_name(name: str, tensor: Tensor) -> str:
    """The format's name of the dtype of a tensor, whatever its shape. Raises `CheckpointError` where it has none."""
    if tensor.dtype not in _NAMES:
        raise CheckpointError(f"The tensor '{name}' has dtype {tensor.dtype}, which a checkpoint cannot hold.")
    return _NAMES[tensor.dtype]


class StagedFile:
    """A block of host memory that holds the data file of one worker."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._header = b""
        self._places: dict[str, tuple[int, int]] = {}
        """Where each tensor begins and ends in the block."""

    def stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors of any shape into the block; when this returns, they may change. Raises `CheckpointError` for a
        dtype that the format lacks."""
        header, self._places, num_bytes = _layout(tensors)
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        if len(self._block) != num_bytes:
            self._block = torch.empty(0, dtype=torch.uint8)  # two would be one too many
            # A forked process (a data loader) shares a mapping, where it would leave pages to be copied at each write.
            if on_gpu:
                self._block = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            else:
                self._block = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        self._block[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        for name, tensor in tensors.items():
            start, stop = self._places[name]
            place = self._block[start:stop].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()

    @property
    def num_bytes(self) -> int:
        return len(self._block)

    def pieces(self) -> Iterator[memoryview]:
        """The bytes of the file, in pieces of limited size."""
        for start in range(0, self.num_bytes, _PIECE_BYTES):
            yield self._bytes(start, start + _PIECE_BYTES)

    def checksums(self) -> dict[str, str]:
        """The CRC-32 of each tensor's bytes, by its name."""
        return {name: _checksum(self._bytes(*place)) for name, place in self._places.items()}

    def _bytes(self, start: int, stop: int) -> memoryview:
        return memoryview(cast(Any, self._block[start:stop].numpy()))


def _layout(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, tuple[int, int]], int]:
    """The header, where each tensor begins and ends in the file, and the length of the file in bytes.

    The format allows no gaps between tensors: the widest dtypes come first, and among them the tensors that fill whole
    cache lines, so that all are aligned to their dtype and almost all bytes to cache lines.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[1].nbytes % _ALIGNMENT != 0))
    entries: dict[str, object] = {}
    places, end = {}, 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": dtype_name(name, tensor), "shape": list(tensor.shape), "data_offsets": [start, end]}
        places[name] = start, end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, {k: (len(header) + i, len(header) + j) for k, (i, j) in places.items()}, len(header) + end


class DataFileReader:
    """Reads tensors of a data file."""

    def __init__(self, storage: Storage, folder: str, file: DataFile) -> None:
        """Raises `CheckpointError` if the file is not of the length in the manifest, or not in the format."""
        self._storage = storage
        self._path = f"{folder}/{file.name}"
        self._file = file
        # Before anything is allocated for what the file is said to hold.
        if len(self._read(max(file.num_bytes - 1, 0), file.num_bytes + 1)) != 1:
            raise CheckpointError(f"{file.name} does not have {file.num_bytes:,} bytes")
        if file.crc32 and self._checksum_of_all() != file.crc32:
            raise CheckpointError(f"{file.name} is damaged: its checksum is wrong")
        self._begin = 8 + int.from_bytes(self._read(0, 8), "little")
        """Where the header ends."""
        try:
            header = json.loads(self._read(8, min(self._begin, file.num_bytes)))
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict):
            raise CheckpointError(f"{file.name} is not a safetensors file")
        self._entries = header

    def tensor(self, name: str, dtype: str, chunk: StoredSlice) -> Tensor:
        """A stored slice of the tensor of this name. Raises `CheckpointError` if it is not what the manifest says."""
        num_bytes = math.prod(chunk.sizes) * DTYPES[dtype].itemsize
        match self._entries.get(chunk.key):
            case {"dtype": str(stored), "shape": list(shape), "data_offsets": [int(start), int(stop)]} if (
                stored == dtype and shape == list(chunk.sizes) and 0 <= start <= stop == start + num_bytes
            ):
                content = self._read(self._begin + start, self._begin + stop)
            case _:
                raise CheckpointError(f"{self._file.name} does not hold what the manifest says of '{name}'")
        if len(content) != num_bytes or (chunk.crc32 and _checksum(content) != chunk.crc32):
            raise CheckpointError(f"{self._file.name} is damaged: the checksum of '{name}' is wrong")
        if not content:
            return torch.empty(chunk.sizes, dtype=DTYPES[dtype])
        return torch.frombuffer(content, dtype=DTYPES[dtype]).reshape(chunk.sizes)

    def _read(self, start: int, stop: int) -> bytearray:
        try:
            return self._storage.read(self._path, start, stop)
        except FileNotFoundError:
            raise CheckpointError(f"{self._file.name} is missing") from None
        except OSError as problem:
            raise CheckpointError(f"{self._file.name} cannot be read: {reason_of(problem)}") from None

    def _checksum_of_all(self) -> str:
        crc = 0
        for start in range(0, self._file.num_bytes, _PIECE_BYTES):
            crc = zlib.crc32(self._read(start, start + _PIECE_BYTES), crc)
        return f"{crc:08x}"


def _checksum(content: bytearray | memoryview) -> str:
    return f"{zlib.crc32(content):08x}"
