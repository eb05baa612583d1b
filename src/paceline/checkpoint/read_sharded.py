"""Sharded reading of a checkpoint: each worker reads what it will hold, and together they verify every byte.

Every block of a file has a checksum. Workers exchange the checksums of the blocks that they have read, and divide the
blocks that no worker needs among them. The checksum of a file follows from those of its blocks and must be the one in
the manifest; a block that two workers read must have the same checksum on both. So either everything that was read
belongs to files with the right checksum, or no worker uses the checkpoint; all workers decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from paceline.checkpoint.block_checksums import BlockReader, num_blocks, sum_of_blocks
from paceline.checkpoint.data_file import DTYPES, Position, header_bytes, read_header
from paceline.checkpoint.load import check_cover, check_manifest, check_stored_slice, read_manifest, readable
from paceline.checkpoint.manifest import Manifest, StoredSlice, TensorEntry
from paceline.checkpoint.slice import Slice
from paceline.checkpoint.state_tree import unflatten_state
from paceline.checkpoint.storage import Catalogue, Storage
from paceline.errors import CheckpointError, reason_of
from paceline.object_collectives import all_gather_objects, broadcast_object

_Answer = TypeVar("_Answer")

Sums = dict[str, dict[int, int]]
"""The CRC-32 of blocks, by file name and block number."""


@dataclass(frozen=True)
class Stored:
    """A tensor in the checkpoint that was not read yet, or a slice of it."""

    name: str
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    slice: Slice

    @property
    def is_whole(self) -> bool:
        return self.slice.sizes == self.shape

    def slice_at(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Stored:
        return replace(self, slice=Slice(offsets, sizes))


@dataclass(frozen=True)
class Loaded:
    """The values of a slice of a tensor that was read."""

    values: Tensor


class SharedCatalogue:
    """A catalogue as rank 0 reads it: every method is a collective of a group with the same result on all workers."""

    def __init__(self, catalogue: Catalogue, group: dist.ProcessGroup) -> None:
        self.address = catalogue.address
        self._catalogue = catalogue
        self._group = group

    def read(self, name: str) -> bytes:
        return self._told(lambda: self._catalogue.read(name))

    def names(self, folder: str = "") -> list[str]:
        return self._told(lambda: self._catalogue.names(folder))

    def folders(self) -> list[str]:
        return self._told(self._catalogue.folders)

    def _told(self, look: Callable[[], _Answer]) -> _Answer:
        answer: Any = None
        problem: tuple[bool, str] | None = None
        if dist.get_rank(self._group) == 0:
            try:
                answer = look()
            except OSError as error:
                problem = isinstance(error, FileNotFoundError), reason_of(error)
        answer, problem = broadcast_object((answer, problem), self._group)
        if problem is not None:
            is_missing, words = problem
            raise (FileNotFoundError if is_missing else OSError)(words)
        return cast(_Answer, answer)


def read_together(
    storage: Storage, name: str, group: dist.ProcessGroup, want: Callable[[dict[str, Any]], Any]
) -> tuple[Manifest, Any]:
    """Read what a worker needs of the checkpoint in a folder, with every byte of it verified; a collective of `group`.

    Args:
        want: what this worker needs of the state that all workers had alike, in which each tensor is a `Stored`.

    Returns:
        The manifest, and what `want` returned with tensors in their place: a slice of one as a `Loaded`.

    Raises:
        CheckpointError: what is wrong with it, on all workers alike; the message does not name the checkpoint.
    """
    manifest = read_manifest(SharedCatalogue(storage, group), name)
    check_manifest(manifest)

    def stored(tensor: str) -> Any:
        shape = manifest.tensors[tensor].shape
        return Stored(tensor, shape, Slice.whole(shape))

    tree = want(unflatten_state(manifest.values, stored))
    wanted = {leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Stored)}
    rank, num_workers = dist.get_rank(group), dist.get_world_size(group)
    reading = _Reading(storage, name, manifest)
    tensors: dict[Stored, Tensor] = {}

    def read_own() -> None:
        tensors.update(reading.tensors(wanted))
        for file in manifest.files[rank::num_workers]:
            reading.positions(file.name)

    sums = _tell(read_own, reading, group)
    left = [
        (file.name, number)
        for file in manifest.files
        for number in range(num_blocks(file.num_bytes))
        if number not in sums.get(file.name, ())
    ]
    if left:
        sums = _tell(lambda: reading.sum_up(left[rank::num_workers]), reading, group)
    for file in manifest.files:
        if f"{sum_of_blocks(sums[file.name], file.num_bytes):08x}" != file.crc32:
            raise CheckpointError(f"{file.name} is damaged: its checksum is wrong")

    def in_place(leaf: Any) -> Any:
        if not isinstance(leaf, Stored):
            return leaf
        return tensors[leaf] if leaf.is_whole else Loaded(tensors[leaf])

    return manifest, pytree.tree_map(in_place, tree)


class _Reading:
    """Reads files of a checkpoint on one worker, and keeps the checksums of what was read."""

    def __init__(self, storage: Storage, name: str, manifest: Manifest) -> None:
        self._storage = storage
        self._name = name
        self._entries = manifest.tensors
        self._files = {file.name: file for file in manifest.files}
        self._chunks: dict[str, list[tuple[str, TensorEntry, StoredSlice]]] = {file: [] for file in self._files}
        for tensor, entry in manifest.tensors.items():
            for chunk in entry.chunks:
                self._chunks[chunk.file].append((tensor, entry, chunk))
        self._readers: dict[str, BlockReader] = {}
        self._positions: dict[str, dict[str, Position]] = {}

    @property
    def sums(self) -> Sums:
        """The checksums of all blocks that were read."""
        return {file: reader.sums for file, reader in self._readers.items()}

    def positions(self, file: str) -> dict[str, Position]:
        """Where its tensors are, which are those that the manifest says."""
        if file not in self._positions:
            with readable(file):
                reader = self._reader(file)
                length = header_bytes(bytes(reader.read(0, 8)))
                found = read_header(bytes(reader.read(0, length)), self._files[file])
            for tensor, entry, chunk in self._chunks[file]:
                check_stored_slice(tensor, entry, chunk, found.get(chunk.key))
            self._positions[file] = found
        return self._positions[file]

    def tensors(self, wanted: Collection[Stored]) -> dict[Stored, Tensor]:
        """Read the slices, each in its own shape, in the order in which the files hold them."""
        pieces: list[tuple[str, int, Stored, StoredSlice, Slice]] = []
        for stored in wanted:
            slices = []
            for chunk in self._entries[stored.name].chunks:
                slice = stored.slice.overlap(chunk)
                if slice is not None:
                    slices.append(slice)
                    start = self.positions(chunk.file)[chunk.key].start
                    pieces.append((chunk.file, start, stored, chunk, slice))
            check_cover(stored.name, stored.slice, slices)
        found = {one: torch.empty(one.slice.sizes, dtype=DTYPES[self._entries[one.name].dtype]) for one in wanted}
        for file, start, stored, chunk, slice in sorted(pieces, key=lambda piece: piece[:2]):
            with readable(file):
                found[stored][slice.slices_in(stored.slice)] = self._numbers(
                    file, start, chunk, slice, found[stored].dtype
                )
        return found

    def _numbers(self, file: str, start: int, chunk: StoredSlice, slice: Slice, dtype: torch.dtype) -> Tensor:
        """A slice of a stored slice that begins at byte `start`; read from its first value to its last one."""
        strides = torch.empty(chunk.sizes, device="meta").stride()
        cut = slice.slices_in(chunk)
        first = sum(one.start * stride for one, stride in zip(cut, strides, strict=True))
        behind = 1 + sum((one.stop - 1) * stride for one, stride in zip(cut, strides, strict=True))
        content = self._reader(file).read(start + first * dtype.itemsize, start + behind * dtype.itemsize)
        return torch.frombuffer(content, dtype=dtype).as_strided(slice.sizes, strides)

    def sum_up(self, blocks: Collection[tuple[str, int]]) -> None:
        for file, number in blocks:
            with readable(file):
                self._reader(file).read_block(number)

    def _reader(self, file: str) -> BlockReader:
        if file not in self._readers:
            self._readers[file] = BlockReader(self._storage, f"{self._name}/{file}", self._files[file])
        return self._readers[file]


def _tell(act: Callable[[], None], reading: _Reading, group: dist.ProcessGroup) -> Sums:
    """What all workers know when each has done its `act`. Raises the first one's `CheckpointError` on all of them."""
    problem = None
    try:
        act()
    except CheckpointError as found:
        problem = str(found)
    known: Sums = {}
    for failure, sums in all_gather_objects((problem, reading.sums), group):
        if failure is not None:
            raise CheckpointError(failure)
        for file, blocks in sums.items():
            before = known.setdefault(file, {})
            if any(before.setdefault(number, crc) != crc for number, crc in blocks.items()):
                raise CheckpointError(f"{file} is not the same for all workers")
    return known
