"""Samples, samplers and collate functions give the same batches whoever reads them and however often: each sample,
shard and epoch has random numbers of its own, a DataLoader's settings are taken over, and what cannot be so is
refused."""

from __future__ import annotations

import multiprocessing
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import paceline
from paceline.errors import DataError
from tests.kit.stage import is_alive
from tests.kit.waiting import wait_until
from tests.unit.data.reading import Numbers, collate, numbers_in, read_batches

Draws = dict[int, list[float]]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


# --- samplers ---


class ByLength(Sampler[list[int]]):
    """Batches of several sizes; draws from Python's generator, NumPy's and torch's."""

    def __iter__(self) -> Iterator[list[int]]:
        numbers = torch.randperm(20).tolist()
        random.shuffle(numbers)
        cut = int(np.random.randint(3, 9))
        yield numbers[:cut]
        yield numbers[cut:10]
        yield numbers[10:]


class Stateful(Sampler[int]):
    """Draws from a generator that goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(20, generator=self.generator).tolist()


class WithEpoch(Sampler[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from np.random.default_rng(self.epoch).permutation(20)


SAMPLERS: dict[str, Callable[[], Any]] = {
    "weighted": lambda: WeightedRandomSampler(list(range(20)), 15),
    "with replacement": lambda: RandomSampler(Numbers(20), replacement=True, num_samples=30),
    "with a generator": lambda: RandomSampler(Numbers(20), generator=torch.Generator().manual_seed(3)),
    "in batches": lambda: BatchSampler(RandomSampler(Numbers(20), generator=torch.Generator()), 7, False),
    "of several sizes": ByLength,
    "stateful": Stateful,
    "with set_epoch": WithEpoch,
    "function": lambda: lambda seed, epoch: np.random.default_rng([seed, epoch]).permutation(20),
    "function that gives batches": lambda: lambda seed, epoch: [[seed, epoch], [5, 6, 7], []],
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_samplers_order_depends_on_seed_and_epoch_alone(name: str) -> None:
    seed_all(0)
    whole = read_batches(Numbers(20), 8, numbers_in, seed=1, epochs=3, sampler=SAMPLERS[name]())
    seed_all(1)
    again = read_batches(Numbers(20), 8, numbers_in, seed=1, epochs=3, sampler=SAMPLERS[name]())
    assert again == whole
    per_epoch = len(whole) // 3
    epochs = [whole[start : start + per_epoch] for start in range(0, len(whole), per_epoch)]
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_resumed_run_goes_on_in_a_samplers_order(tmp_path: Path) -> None:
    for name in ("stateful", "of several sizes", "with a generator"):
        whole = read_batches(Numbers(20), 8, numbers_in, epochs=3, sampler=SAMPLERS[name]())
        folder = tmp_path / name.replace(" ", "-")
        found = []
        for max_steps in (4, None):
            found += read_batches(
                Numbers(20),
                8,
                numbers_in,
                epochs=3,
                max_steps=max_steps,
                checkpoint_dir=folder,
                sampler=SAMPLERS[name](),
            )
        assert found == whole


def test_loaders_orders_are_taken_over() -> None:
    in_order = [list(range(8)), list(range(8, 16)), list(range(16, 20))]
    six = [list(range(6)), list(range(6, 12)), list(range(12, 18))]

    def order(loader: Any) -> list[list[int]]:
        return read_batches(loader, 8, numbers_in, collate_fn=None)

    assert order(DataLoader(Numbers(20), 8, collate_fn=collate)) == in_order
    assert order(DataLoader(Numbers(20), 8, drop_last=True, collate_fn=collate)) == in_order[:2]
    shuffled = order(DataLoader(Numbers(20), 8, shuffle=True, collate_fn=collate))
    assert shuffled == read_batches(Numbers(20), 8, numbers_in) != in_order  # the job's own order
    batches = BatchSampler(SequentialSampler(Numbers(20)), 6, True)
    assert order(DataLoader(Numbers(20), batch_sampler=batches, collate_fn=collate)) == six


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


REFUSALS: dict[str, tuple[Callable[[], Any], dict[str, Any], list[str]]] = {
    "another batch size": (lambda: DataLoader(Numbers(20), 4), {}, ["batch_size=4", "global_batch_size=8"]),
    "no batch size": (lambda: DataLoader(Numbers(20), None), {}, ["batch_size=None"]),
    "divided already": (
        lambda: DataLoader(Numbers(20), 8, sampler=DistributedSampler(Numbers(20), 2, 0)),
        {},
        ["DistributedSampler", "each worker"],
    ),
    "no batch left": (lambda: DataLoader(Numbers(5), 8, shuffle=True, drop_last=True), {}, ["drop_last", "8"]),
    "no sampler": (lambda: Numbers(20), {"sampler": 5}, ["sampler", "int"]),
    "an empty sampler": (lambda: Numbers(20), {"sampler": lambda *_: []}, ["sampler", "no sample", "epoch 0"]),
    "an unknown sample": (lambda: Numbers(20), {"sampler": lambda *_: [1, 20]}, ["20", "sampler"]),
    "no number": (lambda: Numbers(20), {"sampler": lambda *_: [[1, "a"]]}, ["'a'", "sampler"]),
    "no length": (NoLength, {}, ["NoLength", "length"]),
    "an empty set": (list, {}, ["no samples"]),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_divided_among_workers_is_refused(name: str) -> None:
    make, loading, words = REFUSALS[name]
    with pytest.raises(DataError) as caught:
        read_batches(make(), 8, numbers_in, **loading)
    assert all(word in str(caught.value) for word in words), caught.value


def test_an_evaluation_that_leaves_samples_out_is_refused() -> None:
    with paceline.init(global_batch_size=8, progress=False) as run:
        model = torch.nn.Linear(1, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(DataError, match="drop_last"):
            run.evaluate(DataLoader(Numbers(20), 8, drop_last=True), lambda _, batch: {"one": batch.double()})


# --- random numbers of samples ---


class Dice(Dataset[Any]):
    """Its samples are random by each of the global generators."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, list[float]]:
        return index, [random.random(), float(np.random.rand()), float(torch.rand(()))]


def keep_draws(shards: list[list[tuple[int, list[float]]]]) -> list[tuple[int, list[float]]]:
    return [sample for shard in shards for sample in shard]


def draws_of(seed: int = 3, epochs: int = 1, **loading: Any) -> Draws:
    """Of each sample in the last of so many epochs; the collate function leaves samples as they are."""
    shards = loading.pop("virtual_shards", 1)
    batches = read_batches(
        Dice(), 4, keep_draws, seed=seed, epochs=epochs, virtual_shards=shards, collate_fn=list, **loading
    )
    return dict(sample for batch in batches[-3:] for sample in batch)


def test_a_samples_random_numbers_belong_to_seed_epoch_and_sample() -> None:
    found = draws_of()
    assert len({tuple(draws) for draws in found.values()}) == 12
    assert draws_of(num_workers=2) == found  # loader processes
    assert draws_of(virtual_shards=4) == found
    assert draws_of(sampler=lambda *_: list(range(12))) == found
    for other in (draws_of(seed=4), draws_of(epochs=2)):
        assert all(other[index] != draws for index, draws in found.items())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_reading_leaves_the_scripts_generators_alone(num_workers: int) -> None:
    with paceline.init(global_batch_size=4, virtual_shards=1, epochs=1, progress=False) as run:
        model = torch.nn.Linear(1, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.batches(Dice(), collate_fn=list, num_workers=num_workers)
        seed_all(1)
        wanted = random.random(), np.random.rand()
        seed_all(1)
        next(batches)
        assert (random.random(), np.random.rand()) == wanted


# --- collating ---


def pad(samples: list[int]) -> Any:
    """As long as the longest of those that are together, and random."""
    rows = [torch.ones(number) for number in samples]
    noise = torch.rand(()) + random.random() + float(np.random.rand())
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1) + noise


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_virtual_shard_is_collated_by_itself(num_workers: int) -> None:
    found = read_batches(
        Numbers(20),
        6,
        list,
        epochs=2,
        virtual_shards=3,
        collate_fn=pad,
        sampler=lambda *_: range(1, 19),
        num_workers=num_workers,
    )
    lengths = [[content.shape for content in batch] for batch in found]
    assert lengths == [[(2, first + step) for step in (1, 3, 5)] for first in (1, 7, 13)] * 2
    noise = {float(content.max()) for batch in found for content in batch}
    assert len(noise) == 18
    if num_workers:
        alone = read_batches(
            Numbers(20), 6, list, epochs=2, virtual_shards=3, collate_fn=pad, sampler=lambda *_: range(1, 19)
        )
        for one, other in zip(found, alone, strict=True):
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


class Texts(Dataset[Any]):
    """Samples that torch's default cannot collate."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.ones(index)


def test_samples_that_do_not_fit_together_ask_for_a_collate_function() -> None:
    with pytest.raises(DataError, match="collate_fn"):
        read_batches(Texts(), 4, list, collate_fn=None)


def test_rows_of_tensors_are_what_single_samples_collate_to() -> None:
    class OnesOwn(TensorDataset):
        """A subclass may draw, so its samples are made one by one."""

    tensors = torch.arange(24).view(6, 2, 2), torch.arange(6.0), torch.ones(6, dtype=torch.int32)

    def read(kind: Any) -> list[Any]:
        return read_batches(kind(*tensors), 4, lambda shards: shards[0], collate_fn=None)

    for mine, wanted in zip(read(TensorDataset), read(OnesOwn), strict=True):
        for one, other in zip(mine, wanted, strict=True):
            assert torch.equal(one, other) and one.dtype == other.dtype


# --- errors and processes ---


class Raising(Numbers):
    """Raises what it was made of, for all samples."""

    def __init__(self, raising: Callable[[], Any]) -> None:
        super().__init__(12)
        self.raising = raising

    def __getitem__(self, index: int) -> Any:
        return self.raising()


def _bug() -> Any:
    raise KeyError("a bug")


def _damaged() -> Any:
    raise DataError("b.png is not a readable image; remove it.")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_errors_of_a_data_set_arrive_as_they_were_raised(num_workers: int) -> None:
    with pytest.raises(DataError) as caught:
        read_batches(Raising(_damaged), 4, list, num_workers=num_workers)
    assert str(caught.value) == "b.png is not a readable image; remove it."
    with pytest.raises(KeyError, match="a bug"):
        read_batches(Raising(_bug), 4, list, num_workers=num_workers)
    with pytest.raises(SystemExit) as left:
        read_batches(Raising(lambda: sys.exit(3)), 4, list, num_workers=num_workers)
    assert left.value.code == 3
    with pytest.raises(RuntimeError, match="StopIteration"):  # which would end the epoch silently
        read_batches(Raising(lambda: next(iter(()))), 4, list, num_workers=num_workers)


def _use_threads(worker: int) -> None:
    torch.set_num_threads(worker + 2)


class Threads(Numbers):
    def __getitem__(self, index: int) -> Any:
        return torch.get_num_threads()


def test_loader_processes_are_begun_by_the_given_function_and_end_with_the_epoch() -> None:
    before = set(multiprocessing.active_children())  # a session's own servers, for instance
    loader = DataLoader(Threads(12), 3, num_workers=2, worker_init_fn=_use_threads, collate_fn=collate)
    found = read_batches(loader, 3, numbers_in, collate_fn=None)
    assert {number for batch in found for number in batch} == {2, 3}
    with pytest.raises(KeyError):
        read_batches(Raising(_bug), 4, list, num_workers=2)
    assert set(multiprocessing.active_children()) <= before


ORPHANS = """
import os, signal, threading
import torch
from paceline.data import Loading, SampleRequest, read_samples

class Blocked(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        print(os.getpid(), flush=True)
        os.kill(os.getppid(), signal.SIGKILL)
        threading.Event().wait()

request = SampleRequest((torch.arange(1).numpy(),))
next(read_samples(Loading(Blocked(), num_workers=1), [request], seed=0, epoch=0, device=torch.device("cpu")))
"""


def test_loader_processes_end_with_a_worker_that_is_killed() -> None:
    killed = subprocess.run([sys.executable, "-c", ORPHANS], capture_output=True, text=True, timeout=100)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    wait_until(lambda: not is_alive(int(killed.stdout)))
