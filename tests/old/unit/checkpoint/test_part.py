"""A worker's file is a safetensors file, whatever tensors there are."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.checkpoint.data_file import DTYPES, ChecksumStream, StagedFile, read_data_file, verify_data_file
from paceline.checkpoint.manifest import DataFile
from paceline.errors import CheckpointError


def _file(tensors: Mapping[str, Tensor], part: StagedFile | None = None) -> tuple[bytes, DataFile]:
    part = part or StagedFile()
    part.stage(tensors)
    summed = ChecksumStream(part.pieces())
    content = b"".join(bytes(piece) for piece in summed)
    return content, summed.file("a")


def _bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def _assert_alike(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        other = others[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
        assert _bits(tensor) == _bits(other), name


def _of(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    raw = raw.random_(0, 2 if dtype == torch.bool else 256, generator=torch.Generator().manual_seed(seed))
    return raw.view(dtype).view(shape)


_TENSORS = st.builds(
    _of,
    st.sampled_from(list(DTYPES.values())),
    st.sampled_from([(), (0,), (1,), (3, 5), (2, 0, 4), (7, 1, 3)]),
    st.integers(0, 99),
)


@given(st.dictionaries(st.text(max_size=6).filter(lambda name: name != "__metadata__"), _TENSORS, max_size=6))
def test_the_library_reads_what_we_write(tensors: dict[str, Tensor]) -> None:
    content, file = _file(tensors)
    _assert_alike(tensors, safetensors.torch.load(content))
    _assert_alike(tensors, read_data_file([content], file))


@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), _TENSORS, max_size=5))
def test_we_read_what_the_library_writes(tensors: dict[str, Tensor]) -> None:
    content = safetensors.torch.save(tensors, metadata={"format": "pt"})
    _assert_alike(tensors, read_data_file([content], DataFile("a", len(content), f"{zlib.crc32(content):08x}")))


def test_views_of_other_tensors() -> None:
    whole = torch.arange(24.0).view(4, 6)
    views = {
        "turned": whole.t(),
        "column": whole[:, 2],
        "every other": whole[::2, ::3],
        "same again": whole[:1].expand(5, 6),
        "from behind": whole.flip(0),
        "channels last": torch.arange(48.0).view(1, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(whole[1]),
    }
    content, file = _file(views)
    _assert_alike({name: view.detach() for name, view in views.items()}, read_data_file([content], file))
    _assert_alike({name: view.detach() for name, view in views.items()}, safetensors.torch.load(content))


def test_a_block_serves_again_and_forgets() -> None:
    part = StagedFile()
    first, _ = _file({"a": torch.ones(1000), "b": torch.zeros((), dtype=torch.int64)}, part)
    tensors = {"a": torch.zeros(1000), "b": torch.ones((), dtype=torch.int64)}
    second, file = _file(tensors, part)
    assert len(first) == len(second)
    _assert_alike(tensors, read_data_file([second], file))
    smaller, file = _file({"c": torch.ones(3)}, part)
    _assert_alike({"c": torch.ones(3)}, read_data_file([smaller], file))


@given(st.integers(0, 2**32))
def test_pieces_may_be_of_any_size(seed: int) -> None:
    tensors = {"a": torch.arange(50), "b": torch.ones(3).half()}
    content, file = _file(tensors)
    draw = random.Random(seed)
    cuts = sorted(draw.sample(range(len(content)), 5))
    pieces = [content[start:end] for start, end in zip([0, *cuts], [*cuts, len(content)], strict=True)]
    _assert_alike(tensors, read_data_file(pieces, file))
    held = verify_data_file(pieces, file)
    assert {name: (t.dtype, t.shape) for name, t in held.items()} == {n: (t.dtype, t.shape) for n, t in tensors.items()}


def test_dtypes_that_the_format_lacks() -> None:
    with pytest.raises(CheckpointError, match=r"'a' has dtype torch.complex64, which a checkpoint cannot hold"):
        StagedFile().stage({"a": torch.zeros(2, dtype=torch.complex64)})
