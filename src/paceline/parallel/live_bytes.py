"""Counts the bytes of live tensors while a model trains, also where tensors are fake and only pretend to hold any."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import accumulate, count
from typing import Any

from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import is_fake
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.dtensor_type import is_dtensor


class LiveBytes(TorchDispatchMode):
    """Follows the memory of all tensors that operations of this thread make, each piece of memory once.

    What was there before does not count. Kernels' scratch memory is not seen, nor what a backend of collectives holds.
    """

    def __init__(self, *, is_real: bool = False) -> None:
        """
        Args:
            is_real: whether the memory that a process really takes is wanted. Fake tensors, which DTensor makes to know
                shapes, take none. Memory may be freed and taken again under a living tensor, as FSDP does, so all
                pieces are looked at after every operation.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_real = is_real
        self._numbers = count()
        self._piece_at: dict[int, int] = {}
        """The piece of memory of each living storage, by the storage's address."""
        self._storages: dict[int, weakref.ref[UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}
        self._changes: list[tuple[int, int]] = []
        """A piece, and by how many bytes it grew, in the order of time."""
        self._ignored: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = pytree.tree_leaves((args, kwargs))
        if any(map(is_dtensor, given)):  # operations on their local tensors come here too
            return NotImplemented
        for leaf in given:
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self._piece_at:
                self.ignore(leaf)
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and not is_dtensor(leaf) and not (self._is_real and is_fake(leaf)):
                self._piece_of(leaf)
        if self._is_real:
            for piece, reference in list(self._storages.items()):
                storage = reference()
                if storage is not None:
                    self._resize(piece, storage.nbytes())
        return result

    def ignore(self, tensor: Tensor) -> None:
        """Leave out the memory of `tensor`, of any shape, from its beginning on."""
        self._ignored.add(self._piece_of(tensor))

    def begin(self) -> None:
        """Forget the peak; what is alive counts on."""
        self._changes = list(self._sizes.items())

    @property
    def peak_bytes(self) -> int:
        """The most that was alive at once since `begin`."""
        changes = (change for piece, change in self._changes if piece not in self._ignored)
        return max(accumulate(changes, initial=0))

    @property
    def num_changes(self) -> int:
        """How often since `begin` memory was taken or freed: a moment, for `peaks`."""
        return len(self._changes)

    def peaks(self, moments: Sequence[int]) -> list[tuple[int, int]]:
        """What was alive at each of these moments, and the most from there to the next one."""
        alive = [0, *accumulate(change * (piece not in self._ignored) for piece, change in self._changes)]
        ends = [*moments[1:], len(self._changes)]
        return [(alive[start], max(alive[start : end + 1])) for start, end in zip(moments, ends, strict=True)]

    def _piece_of(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._piece_at:
            piece = self._piece_at[address] = next(self._numbers)
            self._storages[piece] = weakref.ref(storage, lambda _: self._forget(address))
            self._resize(piece, storage.nbytes())
        return self._piece_at[address]

    def _forget(self, address: int) -> None:
        piece = self._piece_at.pop(address)
        self._resize(piece, 0)
        del self._storages[piece], self._sizes[piece]

    def _resize(self, piece: int, num_bytes: int) -> None:
        change = num_bytes - self._sizes.get(piece, 0)
        self._sizes[piece] = num_bytes
        if change:
            self._changes.append((piece, change))
