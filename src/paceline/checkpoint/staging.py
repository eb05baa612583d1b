"""What a worker writes of a state: planned by all workers together, and staged in host memory as one file.

The file is in the safetensors format: eight bytes that say how long the header is, a JSON header with the dtype, shape
and place of every tensor, then the numbers. Training waits only while tensors are copied into a block of memory that
has the bytes of the file; what is written later comes straight from there, so nothing is copied twice and the block
serves every checkpoint of a run.
"""

from __future__ import annotations

import json
import math
import mmap
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint.format import DTYPES, Slice
from paceline.containers import is_dtensor, shard_slice
from paceline.errors import CheckpointError
from paceline.object_collectives import all_gather_objects

_MOST_SLICE_BYTES = 16 << 20
"""Larger tensors are written in slices of rows: a worker that needs some rows reads few others to check them."""

_PIECE_BYTES = 8 << 20
"""Bytes written at a time."""

_ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector of a processor. Copies between places so aligned are the fastest."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_Held = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""What a worker holds of a tensor: its name, dtype and whole shape; the offsets and sizes of the slice."""


@dataclass(frozen=True)
class PlannedSlice:
    """A slice of a tensor that one worker writes."""

    name: str
    """The tensor's name in the state."""
    dtype: str
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    place: Slice
    index: tuple[slice, ...]
    """Where the slice lies in what the worker holds of the tensor."""


@dataclass(frozen=True)
class WritePlan:
    """Which worker writes what, so that each number is written by exactly one; valid while they hold the same."""

    held: tuple[_Held, ...]
    """What this worker holds."""
    slices: tuple[dict[str, PlannedSlice], ...]
    """By rank, and by their names in the file; on rank 0 of all workers, on others of this one alone."""


def plan_writes(
    state: Mapping[str, Tensor], group: dist.ProcessGroup | None, before: WritePlan | None = None
) -> WritePlan:
    """Decide which worker writes what of `state`. A collective of `group`, whose backend handles host memory. Raises
    `CheckpointError` for a dtype that the format lacks.

    Tensors that all workers have are distributed evenly by size; of a sharded tensor (a DTensor) every worker writes
    its own shard; what only one worker has, that worker writes.

    Args:
        before: the plan of an earlier state. It is returned again unless some worker holds other tensors now.
    """
    own = tuple(_held(name, tensor) for name, tensor in state.items())
    if before is not None and not any(all_gather_objects(own != before.held, group)):
        return before
    rank = 0 if group is None else dist.get_rank(group)
    gathered = all_gather_objects(own, group)
    holders: dict[_Held, list[int]] = {}
    for worker, tensors in enumerate(gathered):
        for held in tensors:
            holders.setdefault(held, []).append(worker)
    num_bytes = [0] * len(gathered)
    """What each worker writes."""
    slices: tuple[dict[str, PlannedSlice], ...] = tuple({} for _ in gathered)
    for (name, dtype, shape, offsets, sizes), workers in holders.items():
        outer = Slice(offsets, sizes)
        for inner in _row_slices(outer, DTYPES[dtype].itemsize):
            writer = min(workers, key=num_bytes.__getitem__)
            num_bytes[writer] += math.prod(inner.sizes) * DTYPES[dtype].itemsize
            if rank in (0, writer):
                # The name of a slice in the file, or of what looks like one, also says where the slice begins.
                is_whole = inner.sizes == shape and "@" not in name
                key = name if is_whole else f"{name}@{','.join(map(str, inner.offsets))}"
                slices[writer][key] = PlannedSlice(name, dtype, shape, inner, inner.slices_in(outer))
    return WritePlan(own, slices)


def _held(name: str, tensor: Tensor) -> _Held:
    if tensor.dtype not in _NAMES:
        raise CheckpointError(f"The tensor '{name}' has dtype {tensor.dtype}, which a checkpoint cannot hold.")
    shape = tuple(tensor.shape)
    offsets, sizes = shard_slice(tensor) if is_dtensor(tensor) else ((0,) * tensor.dim(), shape)
    return name, _NAMES[tensor.dtype], shape, offsets, sizes


def _row_slices(outer: Slice, itemsize: int) -> Iterator[Slice]:
    """A slice, or slices of its rows that are not too large."""
    num_bytes = math.prod(outer.sizes) * itemsize
    if num_bytes <= _MOST_SLICE_BYTES:
        yield outer
        return
    (first, *offsets), (num_rows, *sizes) = outer.offsets, outer.sizes
    step = max(1, _MOST_SLICE_BYTES * num_rows // num_bytes)
    for start in range(0, num_rows, step):
        yield Slice((first + start, *offsets), (min(step, num_rows - start), *sizes))


class StagedFile:
    """A block of host memory that holds the data file of one worker."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._places: dict[str, tuple[int, int]] = {}
        """Where each tensor begins and ends in the block."""

    def stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors of any shape into the block; when this returns, they may change."""
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
        whole = self._block.numpy().data
        for start in range(0, self.num_bytes, _PIECE_BYTES):
            yield whole[start : start + _PIECE_BYTES]

    def checksums(self) -> dict[str, str]:
        """The CRC-32 of each tensor's bytes, by its name."""
        whole = self._block.numpy().data
        return {name: checksum(whole[start:stop]) for name, (start, stop) in self._places.items()}


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
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        places[name] = start, end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, {k: (len(header) + i, len(header) + j) for k, (i, j) in places.items()}, len(header) + end


def checksum(content: bytearray | memoryview) -> str:
    """CRC-32, as eight hexadecimal digits."""
    return f"{zlib.crc32(content):08x}"
