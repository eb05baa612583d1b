"""The block that a worker's state is copied into: where numbers lie in it, and what kind of memory it is."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from paceline.checkpoint.data_file import StagedFile, _layout

CACHE_LINE_BYTES = 64
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.uint8)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 70)), max_size=8))
def test_numbers_lie_where_the_processor_likes_them(kinds: list[tuple[torch.dtype, int]]) -> None:
    tensors = {f"t{n}": torch.arange(count).to(dtype) for n, (dtype, count) in enumerate(kinds)}
    header, starts, num_bytes = _layout(tensors)
    assert len(header) % CACHE_LINE_BYTES == 0
    assert all(start % tensors[name].element_size() == 0 for name, start in starts.items())
    widest = max((tensor.element_size() for tensor in tensors.values()), default=0)
    for name, tensor in tensors.items():
        if tensor.element_size() == widest and tensor.nbytes % CACHE_LINE_BYTES == 0:
            assert starts[name] % CACHE_LINE_BYTES == 0

    part = StagedFile()
    part.stage(tensors)
    content = b"".join(part.pieces())
    assert len(content) == num_bytes
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load(content).items())


def test_a_block_serves_every_checkpoint_of_one_size() -> None:
    part = StagedFile()
    part.stage({"a": torch.zeros(1000)})
    first = memoryview(next(part.pieces()))
    part.stage({"a": torch.ones(1000)})
    assert load(bytes(first))["a"].sum() == 1000
    part.stage({"a": torch.ones(2000)})
    assert load(b"".join(part.pieces()))["a"].sum() == 2000


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can leave memory out of a fork, and tell of it")
def test_the_block_stays_out_of_forks() -> None:
    part = StagedFile()
    part.stage({"a": torch.zeros(1 << 20)})
    assert "dc" in _flags_at(part._block.data_ptr())  # "do not copy area on fork"


def test_a_block_is_laid_out_anew_for_other_tensors_of_the_same_size() -> None:
    part = StagedFile()
    for tensors in ({"a": torch.ones(64)}, {"b": torch.ones(64)}, {"b": torch.ones(8, 8)}, {"b": torch.ones(64).int()}):
        part.stage(tensors)
        found = load(b"".join(part.pieces()))
        assert found.keys() == tensors.keys()
        assert all(
            torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
        )


def _flags_at(address: int) -> set[str]:
    """What the kernel was told of the mapping at an address (proc_pid_smaps(5), VmFlags)."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(found[1], 16) <= address < int(found[2], 16)
        elif is_inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError("no such mapping")
