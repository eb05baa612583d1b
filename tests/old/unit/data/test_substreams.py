"""Streams in substreams: every sample once, the same batches whoever reads them, exact continuation."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import json
import random
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from paceline.data import Loading, TarShards
from paceline.data.stream_reader import read_stream, stand_in
from paceline.data.substreams import StreamPosition, Substreams, check_stream, is_split, is_stream, quota
from paceline.errors import DataError
from paceline.parallel.assignment import shards_of_rank

Sample = tuple[int, float]


class Plain(IterableDataset[Any]):
    """Gives all its samples to whoever asks; those that split by torch's loader processes would lose some here."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        step = 1 if worker is None else worker.num_workers
        numbers = list(range(0, self.size, step))
        random.shuffle(numbers)
        yield from ((number, random.random()) for number in numbers)


class Sharded(IterableDataset[Any]):
    """Several files of several lengths."""

    def __init__(self, lengths: list[int]) -> None:
        ends = [0, *itertools.accumulate(lengths)]
        self.files = [range(start, stop) for start, stop in itertools.pairwise(ends)]

    @property
    def num_shards(self) -> int:
        return len(self.files)

    def shard(self, num_shards: int, index: int) -> Sharded:
        made = type(self)([])
        made.files = self.files[index::num_shards]
        return made

    def __iter__(self) -> Iterator[Sample]:
        yield from ((number, random.random()) for file in self.files for number in file)


class WithState(Sharded):
    """Goes on by its own state, and fails if it is read again."""

    start = done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["done"]

    def __iter__(self) -> Iterator[Sample]:
        start, self.start = self.start, 0
        for number in list(itertools.chain(*self.files))[start:]:
            start += 1
            self.done = start
            yield number, random.random()


def packed(lengths: list[int], folder: str) -> TarShards:
    """Tar files in memory, as fsspec has it."""
    numbers = itertools.count()
    for file, length in enumerate(lengths):
        with fsspec.open(f"{folder}/{file:03}.tar", "wb") as opened, tarfile.open(fileobj=opened, mode="w") as archive:
            for number in itertools.islice(numbers, length):
                for suffix, content in (("txt", str(number)), ("seg.cls", "x")):
                    info = tarfile.TarInfo(f"some/{number:05}.{suffix}")
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content.encode()))
    return TarShards(f"{folder}/{{000..{len(lengths) - 1:03}}}.tar", _decoded, shuffle_seed=4)


@functools.cache
def _packed() -> tuple[tempfile.TemporaryDirectory[str], TarShards]:
    folder = tempfile.TemporaryDirectory()
    return folder, packed(LENGTHS, f"file://{folder.name}")


def on_disk() -> TarShards:
    return copy.deepcopy(_packed()[1])


def _decoded(fields: dict[str, Any]) -> Sample:
    assert set(fields) == {"__key__", "txt", "seg.cls"} and fields["__key__"] == f"some/{int(fields['txt']):05}"
    return int(fields["txt"]), random.random()


LENGTHS = [7, 3, 11, 0, 5, 9, 4, 8]
TOTAL = sum(LENGTHS)
STREAMS: dict[str, Callable[[], Any]] = {
    "plain": lambda: Plain(TOTAL),
    "sharded": lambda: Sharded(LENGTHS),
    "with a state": lambda: WithState(LENGTHS),
    "tar files": on_disk,
    "shards that do not divide": lambda: WithState([*LENGTHS[:-1], 4, 4]),
}


def batches(
    stream: Any,
    num_substreams: int,
    size: int,
    num_workers: int,
    position: StreamPosition | None = None,
    epoch: int = 1,
) -> Iterator[tuple[list[Sample], StreamPosition]]:
    """Global batches as `num_workers` workers read them together, and the position after each."""
    position = position or StreamPosition(0, (0,) * num_substreams)
    owns = [range(*shards_of_rank(rank, num_workers, num_substreams)) for rank in range(num_workers)]
    workers = [Substreams(stream() if callable(stream) else stream, own, size, 3, epoch, position) for own in owns]
    for step in itertools.count(position.step):
        read: dict[int, list[Sample]] = {}
        states: dict[str, Any] = {}
        for worker in workers:
            read |= worker.read(step)
            states |= worker.states()
        assert sorted(read) == list(range(num_substreams))
        taken = tuple(before + len(read[number]) for number, before in enumerate(position.taken))
        position = StreamPosition(step + 1, taken, json.loads(json.dumps(states)))
        batch = [sample for number in range(num_substreams) for sample in read[number]]
        if not batch:
            return
        assert all(len(read[number]) <= quota(step, number, num_substreams, size) for number in read)
        yield batch, position


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize(("num_substreams", "size"), [(4, 8), (8, 11), (2, 7), (1, 5), (8, 8)])
def test_every_sample_once_and_the_same_batches(name: str, num_substreams: int, size: int) -> None:
    whole = [batch for batch, _ in batches(STREAMS[name], num_substreams, size, 1)]
    samples = [number for batch in whole for number, _ in batch]
    assert sorted(samples) == list(range(TOTAL))
    assert all(len(batch) <= size for batch in whole) and len(whole[0]) >= size - 2
    for num_workers in range(2, min(num_substreams, 4) + 1):
        assert [batch for batch, _ in batches(STREAMS[name], num_substreams, size, num_workers)] == whole


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_goes_on_exactly_at_any_number_of_workers(data: st.DataObject) -> None:
    """Killed up to three times, at any batch, with or without the streams' own states."""
    name = data.draw(st.sampled_from(sorted(STREAMS)))
    num_substreams, size = data.draw(st.integers(1, 6)), data.draw(st.integers(6, 13))
    whole = [batch for batch, _ in batches(STREAMS[name], num_substreams, size, 1)]
    found: list[list[Sample]] = []
    position: StreamPosition | None = None
    for _ in range(data.draw(st.integers(1, 3))):
        num_workers = data.draw(st.integers(1, num_substreams))
        stop = data.draw(st.integers(0, len(whole) - len(found)))
        for batch, after in itertools.islice(batches(STREAMS[name], num_substreams, size, num_workers, position), stop):
            found.append(batch)
            position = after
        if position is not None and data.draw(st.booleans()):
            position = StreamPosition(position.step, position.taken)  # an error, after which nobody gathers states
    found += [batch for batch, _ in batches(STREAMS[name], num_substreams, size, 1, position)]
    assert [[number for number, _ in batch] for batch in found] == [[number for number, _ in batch] for batch in whole]
    assert found == whole, "random transforms too"


def test_an_own_state_saves_reading_again() -> None:
    (_, position), *_ = itertools.islice(batches(STREAMS["with a state"], 4, 8, 1), 1, 2)
    assert position.states == {"0": {"done": 4}, "1": {"done": 4}, "2": {"done": 4}, "3": {"done": 4}}
    stream = WithState(LENGTHS)
    next(batches(stream, 4, 8, 1, position))
    assert stream.start == 0, "the next epoch begins at the beginning"
    with pytest.raises(DataError, match="ended before the 999 samples that it had given"):
        next(batches(Sharded(LENGTHS), 4, 8, 1, StreamPosition(9, (999, 0, 0, 0))))


def test_tar_files_wherever_fsspec_reaches() -> None:
    stream = packed(LENGTHS, "memory://substreams")
    samples = [sample[0] for batch, _ in batches(stream, 4, 8, 1) for sample in batch]
    assert sorted(samples) == list(range(TOTAL))
    assert TarShards("memory://substreams/*.tar").num_shards == len(LENGTHS)


def test_tar_files_come_in_another_order_every_epoch(tmp_path: Path) -> None:
    stream = packed(LENGTHS, f"file://{tmp_path}")
    epochs = [[sample[0] for batch, _ in batches(stream, 4, 8, 1, epoch=epoch) for sample in batch] for epoch in (0, 1)]
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1]) == list(range(TOTAL))
    assert TarShards(f"{tmp_path}/*.tar").num_shards == len(LENGTHS)
    assert TarShards([f"{tmp_path}/00{{0..2}}.tar", f"{tmp_path}/007.tar"]).num_shards == 4


def test_tar_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "damaged.tar").write_bytes(b"x" * 2000)
    with pytest.raises(DataError, match=r"damaged.tar cannot be read as a tar file \(.*\); repair or remove it"):
        list(TarShards(str(tmp_path / "damaged.tar")))
    whole = packed([9], f"file://{tmp_path}/whole").files[0].removeprefix("file://")
    content = Path(whole).read_bytes()
    for size in (2048, 2560, 9 * 2048):  # after a member, in a member, and where only the end is missing
        (tmp_path / "cut.tar").write_bytes(content[:size])
        with pytest.raises(DataError, match=r"cut.tar (ends without the mark|cannot be read as a tar file)"):
            list(TarShards(str(tmp_path / "cut.tar")))
    with pytest.raises(DataError, match=r"There is no tar file memory://none.tar"):
        list(TarShards("memory://none.tar"))
    with pytest.raises(DataError, match="No file matches"):
        TarShards(f"{tmp_path}/*.tgz")


def test_what_cannot_be_shared_is_refused() -> None:
    assert is_stream(Plain(3)) and is_stream(x for x in "abc") and not is_stream([1, 2])
    with pytest.raises(DataError, match=r"a generator, which can be read only once; give a data set"):
        check_stream(x for x in "abc")
    assert is_split(Sharded(LENGTHS), 4) and not is_split(Sharded(LENGTHS), 3) and not is_split(Plain(4), 1)
    with pytest.raises(DataError, match="A stream has an order of its own; leave the sampler out"):
        Loading.of(Plain(3), 8, sampler=lambda *_: [1])
    with pytest.raises(DataError, match="has batch_size=None, so its data set makes the batches"):
        Loading.of(torch.utils.data.DataLoader(Plain(3), None), 8)
    assert Loading.of(torch.utils.data.DataLoader(Plain(3), 8, num_workers=1), 8).sampler is None


@pytest.mark.parametrize("name", ["plain", "sharded"])
def test_loader_processes_read_the_same(name: str) -> None:
    def read(num_processes: int) -> list[Any]:
        loading = Loading(STREAMS[name](), _collated, num_workers=num_processes)
        steps = read_stream(
            loading,
            [0, 1, 2],
            8,
            StreamPosition(0, (0,) * 4),
            seed=3,
            epoch=1,
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
        return [(step.sizes, step.contents) for step in itertools.islice(steps, 8)]

    assert read(0) == read(2) == read(3)


def _collated(samples: list[Sample]) -> Any:
    return [*samples, random.random()]


def test_a_stand_in() -> None:
    assert stand_in(Loading(Sharded([0, 3]), _collated))[0][0] == 0
    number, _ = stand_in(Loading(Sharded([0, 3])))
    assert number.tolist() == [0]
    assert stand_in(Loading(Sharded([]))) is None


def huggingface(folder: Path) -> dict[str, Any]:
    datasets = pytest.importorskip("datasets")
    files, numbers = [], itertools.count()
    for file, length in enumerate(length or 1 for length in LENGTHS):
        files.append(folder / f"{file}.jsonl")
        lines = [json.dumps({"number": number, "text": "x" * number}) for number in itertools.islice(numbers, length)]
        files[-1].write_text("\n".join(lines))
    options = {"split": "train", "streaming": True, "cache_dir": str(folder)}
    stream = datasets.load_dataset("json", data_files=[str(file) for file in files], **options)
    return {
        "plain": stream,
        "shuffled": stream.shuffle(seed=2, buffer_size=6),
        "mapped": stream.map(lambda row: {"length": len(row["text"])}).filter(lambda row: row["number"] % 5),
        "batched": stream.map(lambda rows: {"n": [len(text) for text in rows["text"]]}, batched=True, batch_size=4),
    }


def test_streams_of_datasets(tmp_path: Path) -> None:
    for name, stream in huggingface(tmp_path).items():
        for num_substreams in (4, 3):  # split by files, or as it comes
            whole: Any = [batch for batch, _ in batches(stream, num_substreams, 8, 1)]
            numbers = [sample["number"] for batch in whole for sample in batch]
            wanted = [number for number in range(TOTAL + 1) if name != "mapped" or number % 5]
            assert sorted(numbers) == wanted, name
            other: Any = [batch for batch, _ in batches(stream, num_substreams, 8, 1, epoch=2)]
            assert name != "shuffled" or other != whole
            for stop, num_workers in ((2, 2), (3, 3), (len(whole) - 1, 2)):
                *_, (_, position) = itertools.islice(batches(stream, num_substreams, 8, 1), stop)
                assert bool(position.states) == (name != "shuffled"), name
                rest = [batch for batch, _ in batches(stream, num_substreams, 8, num_workers, position)]
                assert rest == whole[stop:], name
