"""A stream of samples from tar files, packed as WebDataset does: members that share a name are one sample's fields."""

from __future__ import annotations

import glob
import itertools
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from paceline.data import random_streams
from paceline.data.order import digest_of
from paceline.data.permutation import permuted
from paceline.errors import DataError

Decode = Callable[[dict[str, Any]], Any]
"""Makes a sample from its raw fields: bytes by the suffixes of their names, and its name as "__key__"."""


class TarShards(IterableDataset[Any]):
    """Samples of tar files on local disks, or wherever fsspec reaches, read once from front to back.

    The members `a/0001.jpg` and `a/0001.cls`, one after the other, are the sample {"__key__": "a/0001", "jpg": bytes,
    "cls": bytes}; a suffix begins at the first dot of the file's name.
    """

    def __init__(
        self, addresses: str | Sequence[str], decode: Decode | None = None, *, shuffle_seed: int | None = None
    ) -> None:
        """
        Args:
            addresses: tar files, each a path or an address such as s3://bucket/train.tar; {000..127} stands for all
                these numbers, and * and ? are wildcards for files that exist.
            decode: makes a sample of its raw fields; None: these are the sample.
            shuffle_seed: visit the files in another order in every epoch; None: in the given order.

        Raises:
            DataError: an address that stands for no file.
        """
        super().__init__()
        self.files: tuple[str, ...] = tuple(
            itertools.chain.from_iterable(map(_expanded, [addresses] if isinstance(addresses, str) else addresses))
        )
        self._decode = decode
        self._shuffle_seed = shuffle_seed
        self._epoch = 0
        self._start = self._now = 0, 0
        """The number of a file and of a sample in it: where reading begins, and where it is."""

    @property
    def num_shards(self) -> int:
        return len(self.files)

    def shard(self, num_shards: int, index: int) -> TarShards:
        """The stream of every `num_shards`-th file, from the one with number `index` on."""
        made = TarShards([], self._decode)
        made.files = self._in_order()[index::num_shards]
        return made

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def digest(self) -> str:
        """A fingerprint of the files and of their order, whose folder may have moved."""
        return digest_of(repr(([PurePosixPath(file).name for file in self.files], self._shuffle_seed)))

    def _in_order(self) -> tuple[str, ...]:
        """The files as this epoch visits them."""
        if self._shuffle_seed is None:
            return self.files
        places = np.arange(len(self.files))
        order = permuted(places, len(self.files), self._shuffle_seed, random_streams.TAR_FILES, self._epoch)
        return tuple(self.files[number] for number in order.tolist())

    def state_dict(self) -> dict[str, int]:
        """Where reading is now; `load_state_dict` lets the next one begin there."""
        return {"file": self._now[0], "sample": self._now[1]}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = state["file"], state["sample"]

    def __iter__(self) -> Iterator[Any]:
        (first_file, first_sample), self._start = self._start, (0, 0)
        for number, file in enumerate(self._in_order()[first_file:], first_file):
            skipped = first_sample if number == first_file else 0
            for index, sample in enumerate(itertools.islice(_samples(file), skipped, None), skipped):
                self._now = number, index + 1
                yield sample if self._decode is None else self._decode(sample)


def _samples(address: str) -> Iterator[dict[str, Any]]:
    """The samples of one tar file."""
    import fsspec  # only streams of tar files need it

    sample: dict[str, Any] = {}
    try:
        with fsspec.open(address, "rb") as file, tarfile.open(fileobj=file, mode="r|*") as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() else None
                if content is None:
                    continue
                folder, _, name = member.name.rpartition("/")
                stem, _, suffix = name.partition(".")
                key = f"{folder}/{stem}" if folder else stem
                if sample and sample["__key__"] != key:
                    yield sample
                    sample = {}
                if suffix in sample:
                    raise DataError(
                        f"{address} has the member {member.name} twice; give each sample a name of its own."
                    )
                sample = sample or {"__key__": key}
                sample[suffix] = content.read()
            if _is_cut_off(archive):
                raise DataError(f"{address} ends without the mark at a tar file's end; it was cut off, write it again.")
    except FileNotFoundError:
        raise DataError(f"There is no tar file {address}.") from None
    except (tarfile.TarError, EOFError, OSError) as problem:
        raise DataError(f"{address} cannot be read as a tar file ({problem}); repair or remove it.") from None
    if sample:
        yield sample


def _is_cut_off(archive: tarfile.TarFile) -> bool:
    """Whether nothing followed the last member, not even the block of zeros that ends a tar file."""
    stream: Any = archive.fileobj
    return bool(stream.pos <= archive.offset)


def _expanded(address: str) -> list[str]:
    """The addresses that one with braces or wildcards stands for."""
    braces = re.search(r"\{(\d+)\.\.(\d+)\}", address)
    if braces is not None:
        first, last = braces.groups()
        numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
        found = [_expanded(address[: braces.start()] + number + address[braces.end() :]) for number in numbers]
        return list(itertools.chain.from_iterable(found))
    if not glob.has_magic(address):
        return [address]
    import fsspec

    files, pattern = fsspec.core.url_to_fs(address)
    names = sorted(files.glob(pattern))
    if not names:
        raise DataError(f"No file matches {address}.")
    return [files.unstrip_protocol(name) for name in names]
