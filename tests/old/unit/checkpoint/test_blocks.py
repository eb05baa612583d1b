"""A file's sum by those of its blocks, and boxes of tensors."""

from __future__ import annotations

import random
import zlib

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.checkpoint.block_checksums import BLOCK_BYTES, BlockReader, num_blocks, sum_of_blocks
from paceline.checkpoint.manifest import DataFile
from paceline.checkpoint.slice import Slice
from paceline.errors import CheckpointError
from tests.old.unit.checkpoint.memory import Memory

CONTENT = random.Random(5).randbytes(3 * BLOCK_BYTES + 77)


def _reader(content: bytes, file: DataFile) -> BlockReader:
    return BlockReader(Memory({"a": content}), "a", file)


def _file(content: bytes) -> DataFile:
    return DataFile("a", len(content), f"{zlib.crc32(content):08x}")


@settings(max_examples=30, deadline=None)
@given(st.integers(1, len(CONTENT)))
@example(BLOCK_BYTES)
@example(3 * BLOCK_BYTES)
def test_blocks_make_up_a_files_sum(num_bytes: int) -> None:
    content = CONTENT[:num_bytes]
    reader = _reader(content, _file(content))
    for number in range(num_blocks(num_bytes)):
        reader.read_block(number)
    assert sum_of_blocks(reader.sums, num_bytes) == zlib.crc32(content)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(CONTENT)), st.integers(0, len(CONTENT))), max_size=4))
def test_stretches_are_those_of_the_file(ends: list[tuple[int, int]]) -> None:
    reader = _reader(CONTENT, _file(CONTENT))
    for start, stop in map(sorted, ends):
        assert reader.read(start, stop) == CONTENT[start:stop]
        touched = range(start // BLOCK_BYTES, num_blocks(stop)) if stop > start else ()
        assert set(touched) <= reader.sums.keys()
    for number, crc in reader.sums.items():
        assert crc == zlib.crc32(CONTENT[number * BLOCK_BYTES :][:BLOCK_BYTES])


def test_a_file_that_changes_or_ends() -> None:
    storage, file = Memory({"a": CONTENT}), _file(CONTENT)
    for other in (CONTENT[:-1], CONTENT + b"\0", b""):
        with pytest.raises(CheckpointError, match="a does not have 3,145,805 bytes"):
            _reader(other, file)
    reader = BlockReader(storage, "a", file)
    reader.read_block(0)
    reader.read_block(2)
    storage.files["a"] = b"x" + CONTENT[1:]
    with pytest.raises(CheckpointError, match="a changes while it is read"):
        reader.read_block(0)
    storage.files["a"] = CONTENT[:10]
    with pytest.raises(CheckpointError, match="a ends too early"):
        reader.read_block(1)
    with pytest.raises(CheckpointError, match="a ends too early"):
        reader.read(8, len(CONTENT) + 1)


_BOXES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=2).map(
    lambda sides: Slice(tuple(start for start, _ in sides), tuple(size for _, size in sides))
)


@given(_BOXES, _BOXES)
def test_boxes_overlap_where_both_are(one: Slice, other: Slice) -> None:
    whole = Slice.whole((8, 8))
    masks = torch.zeros(2, 8, 8, dtype=torch.bool)
    for mask, slice in zip(masks, (one, other), strict=True):
        mask[slice.slices_in(whole)] = True
    both = torch.zeros(8, 8, dtype=torch.bool)
    overlap = one.overlap(other)
    if overlap is not None:
        both[overlap.slices_in(whole)] = True
        inside = torch.zeros(one.sizes)
        inside[overlap.slices_in(one)] = 1
        assert inside.sum() == both.sum() > 0
    assert torch.equal(both, masks[0] & masks[1])
