"""One worker's data file of a checkpoint, prepared in a block of host memory with the bytes that the file will have.

The file is in the safetensors format: eight bytes that say how long the header is, a JSON header with the dtype, shape
and place of every tensor, then the numbers. Training waits only while tensors are copied into the block; what is
written later comes straight from there, so nothing is copied twice and the block serves every checkpoint of a run.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from paceline.checkpoint.manifest import DataFile, is_possible
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
"""The data types by their names in the safetensors format."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector of a processor. Copies between places so aligned are the fastest."""


def dtype_name(name: str, tensor: Tensor) -> str:
    """The format's name of the dtype of a tensor, whatever its shape. Raises `CheckpointError` where it has none."""
    if tensor.dtype not in _NAMES:
        raise CheckpointError(f"The tensor '{name}' has dtype {tensor.dtype}, which a checkpoint cannot hold.")
    return _NAMES[tensor.dtype]


def data_file_name(writer: int) -> str:
    return f"worker-{writer:05d}.safetensors"


class StagedFile:
    """A block of host memory that holds the data file of one worker."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._places: dict[str, Tensor] | None = None
        """The place of each tensor, as a view of the block."""

    def stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors of any shape into the block; when this returns, they may change. Raises `CheckpointError` for a
        dtype that the format lacks."""
        if self._places is None or not _are_alike(self._places, tensors):
            self._places = None
            self._places = self._lay_out(tensors)
        for name, tensor in tensors.items():
            self._places[name].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()

    def _lay_out(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        header, starts, num_bytes = _layout(tensors)
        if len(self._block) != num_bytes:
            self._block = torch.empty(0, dtype=torch.uint8)  # two would be one too many
            self._block = _new_block(num_bytes, pinned=any(tensor.is_cuda for tensor in tensors.values()))
        self._block[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        places = {}
        for name, tensor in tensors.items():
            place = self._block[starts[name] : starts[name] + tensor.nbytes]
            places[name] = place.view(tensor.dtype).view(tensor.shape)
        return places

    def pieces(self) -> Iterator[memoryview]:
        """The bytes of the file, in pieces of limited size."""
        view = memoryview(cast(Any, self._block.numpy()))
        for start in range(0, len(view), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]


class ChecksumStream:
    """Passes the bytes of a file on and keeps their number and CRC-32."""

    def __init__(self, pieces: Iterable[bytes | memoryview]) -> None:
        self._pieces = pieces
        self._crc = 0
        self.num_bytes = 0

    def __iter__(self) -> Iterator[bytes | memoryview]:
        for piece in self._pieces:
            self._crc = zlib.crc32(piece, self._crc)
            self.num_bytes += len(piece)
            yield piece

    def file(self, name: str) -> DataFile:
        return DataFile(name, self.num_bytes, f"{self._crc:08x}")


def verify_data_file(pieces: Iterable[bytes], file: DataFile) -> dict[str, Position]:
    """Where the tensors of a data file are, by name; the whole file is never in memory.

    Raises:
        CheckpointError: the file is not what the manifest says.
    """
    beginning = bytearray()
    for piece in _checked(pieces, file):
        if len(beginning) < header_bytes(beginning):
            beginning += piece
    return read_header(beginning, file)


def read_data_file(pieces: Iterable[bytes], file: DataFile) -> dict[str, Tensor]:
    """The tensors in the bytes of a data file, by name, in the shapes of the manifest.

    Raises:
        CheckpointError: it is not what the manifest says.
    """
    content = bytearray()
    for piece in _checked(pieces, file):
        content += piece
    return {key: place.tensor_in(content) for key, place in read_header(content, file).items()}


def _checked(pieces: Iterable[bytes], file: DataFile) -> Iterator[bytes | memoryview]:
    """Passes bytes on; the last of them only if the file is what the manifest says."""
    summed = ChecksumStream(pieces)
    for piece in summed:
        if summed.num_bytes > file.num_bytes:  # it may have no end
            raise CheckpointError(f"{file.name} has more than {file.num_bytes:,} bytes")
        yield piece
    if summed.num_bytes != file.num_bytes:
        raise CheckpointError(f"{file.name} has {summed.num_bytes:,} bytes instead of {file.num_bytes:,}")
    if summed.file(file.name).crc32 != file.crc32:
        raise CheckpointError(f"{file.name} is damaged: its checksum is wrong")


@dataclass(frozen=True)
class Position:
    """Where a tensor is in a data file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """The offset in the file, in bytes."""

    def tensor_in(self, content: bytearray) -> Tensor:
        count = math.prod(self.shape)
        if not count:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(content, dtype=self.dtype, count=count, offset=self.start).reshape(self.shape)


def header_bytes(beginning: bytes | bytearray) -> int:
    """The length of a file's header in bytes, from its first eight bytes."""
    return 8 + int.from_bytes(beginning[:8], "little")


def read_header(content: bytes | bytearray, file: DataFile) -> dict[str, Position]:
    """Where the tensors of a data file are, by their names there. `content`: at least the header.

    The checksum may be right and the header still be wrong on purpose, so everything in it is checked.

    Raises:
        CheckpointError: this is not the header of such a file.
    """
    try:
        end = header_bytes(content)
        entries = json.loads(content[8:end])
        places = {key: _position(entry, end) for key, entry in entries.items() if key != "__metadata__"}
        for place in sorted(places.values(), key=lambda place: (place.start, math.prod(place.shape))):
            if place.start != end:
                raise ValueError("its tensors overlap, or there is something between them")
            end += math.prod(place.shape) * place.dtype.itemsize
        if end != file.num_bytes:
            raise ValueError("its tensors do not fill it")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        raise CheckpointError(f"{file.name} is not a safetensors file: {problem}") from None
    return places


def _position(entry: Any, header_end: int) -> Position:
    shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
    place = Position(DTYPES[entry["dtype"]], shape, header_end + start)
    if any(type(number) is not int or number < 0 for number in (*shape, start, end)):
        raise ValueError("a shape or an offset is not a whole number")
    if math.prod(shape) * place.dtype.itemsize != end - start or not is_possible(shape):
        raise ValueError("a shape does not fit the numbers that are there")
    if place.start % place.dtype.itemsize:
        raise ValueError("a tensor is not aligned")
    return place


def _are_alike(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    """Whether they have the same names, shapes and dtypes."""
    return some.keys() == others.keys() and all(
        tensor.shape == others[name].shape and tensor.dtype == others[name].dtype for name, tensor in some.items()
    )


def _new_block(num_bytes: int, *, pinned: bool) -> Tensor:
    """Memory for a data file; pinned where GPUs copy into it.

    Forked processes (data loaders) do not inherit it: copy-on-write pages would make the next checkpoint take a page
    fault for each of them, which takes six times as long. Huge pages are not requested: they save faults at the first
    checkpoint, but a virtual machine may have to get them from its host.
    """
    if pinned:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # Linux alone has it
        memory.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _layout(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int], int]:
    """The header, where each tensor's values begin in the file, and the length of the file in bytes.

    The format allows no gaps between tensors: the widest dtypes come first, and among them the tensors that fill whole
    cache lines, so that all are aligned to their dtype and almost all bytes to cache lines.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[1].nbytes % _ALIGNMENT != 0))
    entries: dict[str, object] = {}
    offset = 0
    starts = {}
    for name, tensor in ordered:
        end = offset + tensor.nbytes
        entries[name] = {"dtype": dtype_name(name, tensor), "shape": list(tensor.shape), "data_offsets": [offset, end]}
        starts[name], offset = offset, end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}, len(header) + offset
