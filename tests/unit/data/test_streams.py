"""Streams come in a substream for each virtual shard: every sample once, in the same batches on any number of
workers, and a resumed run goes on with the next sample, at any number of workers, with random numbers of its own
for each sample."""

from __future__ import annotations

import functools
import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from paceline.data import Loading
from paceline.data.streams import StreamPosition, _Steps
from paceline.errors import DataError
from tests.kit.workers import in_turn, run_ranks
from tests.unit.data.reading import numbers_in, read_batches

Sample = tuple[int, float]
LENGTHS = [7, 3, 11, 0, 5, 9, 4, 8]


class Files(IterableDataset[Any]):
    """A stream of files of several lengths, which can be split by them. Its samples have a random number each."""

    def __init__(self, lengths: list[int]) -> None:
        ends = [0, *itertools.accumulate(lengths)]
        self.files = [range(start, stop) for start, stop in itertools.pairwise(ends)]

    @property
    def num_shards(self) -> int:
        return len(self.files)

    def shard(self, num_shards: int, index: int) -> Files:
        made = type(self)([])
        made.files = self.files[index::num_shards]
        return made

    def __iter__(self) -> Any:
        yield from ((number, random.random()) for file in self.files for number in file)


class Remembering(Files):
    """Goes on by its own state."""

    start = done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["done"]

    def __iter__(self) -> Any:
        self.done, self.start = self.start, 0
        for number in list(itertools.chain(*self.files))[self.done :]:
            self.done += 1
            yield number, random.random()


class AsItComes(IterableDataset[Any]):
    """Cannot be split, and comes in another order in each epoch."""

    def __init__(self, lengths: list[int]) -> None:
        self.size = sum(lengths)

    def __iter__(self) -> Any:
        numbers = list(range(self.size))
        random.shuffle(numbers)
        yield from ((number, random.random()) for number in numbers)


KINDS = {"files": Files, "remembering": Remembering, "as it comes": AsItComes}


@dataclass(frozen=True)
class Trial:
    """A stream, a job, and the legs in which it is trained: workers, and the step at which they stop."""

    kind: str
    lengths: tuple[int, ...]
    virtual_shards: int
    global_batch_size: int
    epochs: int
    legs: tuple[tuple[int, int | None], ...]
    folder: Path


def keep(shards: list[list[Sample]]) -> list[Sample]:
    return [sample for shard in shards for sample in shard]


def _train(trial: Trial, max_steps: int | None, folder: Path | None) -> list[list[Sample]]:
    return read_batches(
        KINDS[trial.kind](list(trial.lengths)),
        trial.global_batch_size,
        keep,
        epochs=trial.epochs,
        virtual_shards=trial.virtual_shards,
        max_steps=max_steps,
        checkpoint_dir=folder,
        collate_fn=list,
    )


def joined(parts: list[list[Sample]], wanted: list[Sample]) -> list[Sample]:
    """The samples of all workers; without those of workers that had none and got a single one as a stand-in."""
    whole = list(itertools.chain(*parts))
    lone = [rank for rank, part in enumerate(parts) if len(part) == 1]
    for left_out in itertools.chain.from_iterable(itertools.combinations(lone, n) for n in range(len(lone) + 1)):
        rest = list(itertools.chain(*(part for rank, part in enumerate(parts) if rank not in left_out)))
        if rest == wanted:
            return rest
    return whole


def drawn_trials(count: int, seed: int, folder: Path) -> list[Trial]:
    draw = random.Random(seed)
    trials = []
    for number in range(count):
        virtual_shards = draw.randint(3, 5)
        num_files = virtual_shards * draw.randint(1, 2) + draw.choice([0, 0, 1])  # 1: shards do not divide
        size = draw.randint(virtual_shards, 3 * virtual_shards)
        stops = sorted(draw.sample(range(1, 12), 2))
        legs = [(draw.randint(1, 3), stop) for stop in stops] + [(draw.randint(1, 3), None)]
        trials.append(
            Trial(
                kind=draw.choice(sorted(KINDS)),
                lengths=(*(draw.choice([0, 1, draw.randint(1, 16)]) for _ in range(num_files - 1)), 9),
                virtual_shards=virtual_shards,
                global_batch_size=size,
                epochs=draw.randint(1, 2),
                legs=tuple(legs),
                folder=folder / str(number),
            )
        )
    return trials


@pytest.mark.parametrize(
    ("count", "seed"),
    [
        pytest.param(10, 1, marks=pytest.mark.budget(processor_s=15)),
        pytest.param(50, 2, marks=[pytest.mark.nightly, pytest.mark.budget(processor_s=75)]),
    ],
)
def test_resumed_streams_go_on_exactly_on_any_number_of_workers(count: int, seed: int, tmp_path: Path) -> None:
    trials = drawn_trials(count, seed, tmp_path)
    (whole,) = run_ranks(in_turn, 1, _train, [(trial, None, None) for trial in trials], timeout_s=250)
    found: list[list[list[Sample]]] = [[] for _ in trials]
    for leg in range(3):
        for world_size in (1, 2, 3):
            chosen = [number for number, trial in enumerate(trials) if trial.legs[leg][0] == world_size]
            cases = [(trials[number], trials[number].legs[leg][1], trials[number].folder) for number in chosen]
            found_by_rank = run_ranks(in_turn, world_size, _train, cases, timeout_s=250)
            for number, *by_rank in zip(chosen, *found_by_rank, strict=True):
                for parts in zip(*by_rank, strict=True):
                    wanted = whole[number][len(found[number]) :][:1]
                    found[number].append(joined(list(parts), wanted[0] if wanted else []))
    for trial, batches, alone in zip(trials, found, whole, strict=True):
        samples = sorted(number for batch in alone for number, _ in batch)
        assert samples == sorted(list(range(sum(trial.lengths))) * trial.epochs), trial
        assert batches == alone, trial


def test_a_batch_takes_the_next_samples_of_each_substream() -> None:
    found = read_batches(Files(LENGTHS), 8, numbers_in, virtual_shards=4, collate_fn=_first)
    files = Files(LENGTHS).files
    substreams = [list(itertools.chain(*files[index::4])) for index in range(4)]
    for batch in found:
        for substream in substreams:
            taken = [number for number in batch if number in substream]
            assert taken == substream[: len(taken)] and len(taken) <= 2
            del substream[: len(taken)]
    assert not any(substreams)


def _first(samples: list[Sample]) -> list[int]:
    return [number for number, _ in samples]


@pytest.mark.parametrize("kind", KINDS)
def test_loader_processes_read_the_same(kind: str) -> None:
    def read(num_workers: int) -> list[list[Sample]]:
        loader = DataLoader(KINDS[kind](LENGTHS), 8, num_workers=num_workers, collate_fn=list)
        return read_batches(loader, 8, keep, virtual_shards=4, epochs=2, collate_fn=None)

    assert read(2) == read(0)


def test_epochs_of_a_stream_draw_anew() -> None:
    found = read_batches(AsItComes(LENGTHS), 47, keep, epochs=2, collate_fn=list)
    first, second = (dict(batch) for batch in found)
    assert [number for number, _ in found[0]] != [number for number, _ in found[1]]
    assert first.keys() == second.keys() and all(first[number] != second[number] for number in first)


def test_a_stream_that_changed_since_it_was_saved_is_refused(tmp_path: Path) -> None:
    read = functools.partial(read_batches, look=keep, virtual_shards=1, collate_fn=list)
    read(AsItComes([20]), 4, max_steps=3, checkpoint_dir=tmp_path)
    for other in (Files([10]), AsItComes([21])):
        with pytest.raises(DataError, match=r"saved|same data"):
            read(other, 4, checkpoint_dir=tmp_path)


def test_what_is_no_stream_for_several_workers_is_refused() -> None:
    with pytest.raises(DataError, match="generator"):
        read_batches((number for number in range(20)), 4, numbers_in)
    with pytest.raises(DataError, match="sampler"):
        read_batches(Files(LENGTHS), 4, numbers_in, sampler=lambda *_: [1])
    with pytest.raises(DataError, match="batch_size=None"):
        read_batches(DataLoader(Files(LENGTHS), None), 4, numbers_in)


def test_a_stream_of_datasets_comes_once_and_resumes(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    numbers = itertools.count()
    files = []
    for place, length in enumerate(length or 1 for length in LENGTHS):
        files.append(str(tmp_path / f"{place}.jsonl"))
        Path(files[-1]).write_text("\n".join(json.dumps({"n": n}) for n in itertools.islice(numbers, length)))
    stream = datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=str(tmp_path))
    for name, one in {
        "plain": stream,
        "shuffled": stream.shuffle(seed=2, buffer_size=6),
        "mapped": stream.map(lambda row: {"n": row["n"]}).filter(lambda row: row["n"] % 5),
    }.items():
        read = functools.partial(
            read_batches, one, 8, virtual_shards=4, collate_fn=list, look=lambda rows: [r["n"] for s in rows for r in s]
        )
        whole = read()
        wanted = [number for number in range(sum(LENGTHS) + 1) if name != "mapped" or number % 5]
        assert sorted(itertools.chain(*whole)) == wanted, name
        folder = tmp_path / f"run-{name}"
        assert read(max_steps=2, checkpoint_dir=folder) + read(checkpoint_dir=folder) == whole, name


class Changing(AsItComes):
    """Gives as its state what it changes as it is read."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(lengths)
        self.now = {"done": 0}

    def state_dict(self) -> dict[str, Any]:
        return self.now

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.now = state

    def __iter__(self) -> Any:
        for number in range(self.size):
            self.now["done"] = number + 1
            yield number


def test_the_state_after_a_step_does_not_change_with_the_next_one() -> None:
    loading = Loading(Changing([9]), collate_fn=list)
    steps = _Steps(loading, [0], 3, StreamPosition(0, (0,)), seed=0, epoch=0)
    assert [step.states for step in itertools.islice(steps, 2)] == [{"whole": {"done": 3}}, {"whole": {"done": 6}}]
