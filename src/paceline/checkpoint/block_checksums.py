"""Checksums of the blocks of a file, so that several workers can verify it together, each by what it reads."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import cache

from paceline.checkpoint.manifest import DataFile
from paceline.checkpoint.storage import Storage
from paceline.errors import CheckpointError

BLOCK_BYTES = 1 << 20
"""Only whole blocks are read, so small ones waste less; workers exchange a checksum of each, so there should be few."""


class BlockReader:
    """Reads one file and keeps the checksums of the blocks that were read."""

    def __init__(self, storage: Storage, path: str, file: DataFile) -> None:
        """Raises `CheckpointError` if the file is shorter or longer than the manifest says."""
        self._storage = storage
        self._path = path
        self._file = file
        self.sums: dict[int, int] = {}
        """The CRC-32 of every block that was read, by its number."""
        self._last = (-1, bytearray())
        """The block that was read last: the next range often begins in it."""
        # Before anything is allocated for what the file is said to hold.
        end = storage.stretch(path, max(file.num_bytes - 1, 0), file.num_bytes + 1)
        if len(end) != 1:
            raise CheckpointError(f"{file.name} does not have {file.num_bytes:,} bytes")

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes start … stop - 1; the blocks that they lie in are read and summed. Raises `CheckpointError` where the
        file ends before, or what is read again has changed."""
        if stop > self._file.num_bytes:
            raise CheckpointError(f"{self._file.name} ends too early")
        first, behind = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        if (first, behind) == (self._last[0], self._last[0] + 1):
            content = self._last[1]
        else:
            content = self._read_blocks(first, behind)
        return memoryview(content)[start - first * BLOCK_BYTES : stop - first * BLOCK_BYTES]

    def _read_blocks(self, first: int, behind: int) -> bytearray:
        end = min(behind * BLOCK_BYTES, self._file.num_bytes)
        known = self._last[1] if first == self._last[0] else bytearray()
        content = self._storage.stretch(self._path, first * BLOCK_BYTES + len(known), end)
        content[:0] = known
        if len(content) != end - first * BLOCK_BYTES:
            raise CheckpointError(f"{self._file.name} ends too early")
        view = memoryview(content)
        for number in range(first, behind):
            crc = zlib.crc32(view[(number - first) * BLOCK_BYTES :][:BLOCK_BYTES])
            if self.sums.setdefault(number, crc) != crc:
                raise CheckpointError(f"{self._file.name} changes while it is read")
        if behind > first:
            self._last = (behind - 1, bytearray(view[(behind - 1 - first) * BLOCK_BYTES :]))
        return content

    def read_block(self, number: int) -> None:
        """Read one block for its checksum."""
        self.read(number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, self._file.num_bytes))


def num_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES)


def sum_of_blocks(sums: Mapping[int, int], num_bytes: int) -> int:
    """The CRC-32 of a file of `num_bytes`, from the CRC-32 of each of its blocks.

    crc(a + b) = crc(b) XOR shift(crc(a)), where shift is the effect of appending len(b) zero bytes: CRC-32 is linear
    over GF(2) (Peterson and Brown 1961).
    """
    total = 0
    for number in range(num_blocks(num_bytes)):
        length = min(BLOCK_BYTES, num_bytes - number * BLOCK_BYTES)
        total = sums[number] ^ (_moved(total) if length == BLOCK_BYTES else _moved_by(length, total))
    return total


def _moved_by(num_zeros: int, crc: int) -> int:
    """The difference between two checksums after `num_zeros` zero bytes follow both."""
    zeros = bytes(num_zeros)
    return zlib.crc32(zeros, crc) ^ zlib.crc32(zeros)


def _moved(crc: int) -> int:
    """`_moved_by(BLOCK_BYTES, crc)`, bit by bit from a table: there may be a million blocks."""
    moved = 0
    for bit, column in enumerate(_columns()):
        if crc >> bit & 1:
            moved ^= column
    return moved


@cache
def _columns() -> tuple[int, ...]:
    return tuple(_moved_by(BLOCK_BYTES, 1 << bit) for bit in range(32))
