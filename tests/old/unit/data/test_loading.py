"""What a DataLoader says is taken over, or refused in one sentence; samplers give the same order everywhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
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
    WeightedRandomSampler,
)

from paceline.data import Loading, SampleRequest, read_samples
from paceline.data.order import EpochOrder
from paceline.data.samplers import listed_order
from paceline.errors import DataError

CPU = torch.device("cpu")


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return torch.arange(index)


def pad(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)


def noisy_pad(samples: list[torch.Tensor]) -> torch.Tensor:
    return pad(samples) + torch.rand(()) + random.random() + float(np.random.rand())


def batches(order: EpochOrder) -> list[list[int]]:
    return [order.batch(number).tolist() for number in range(order.num_batches)]


def order_of(loader: Any, epoch: int = 0, seed: int = 1) -> list[list[int]]:
    return batches(Loading.of(loader, 8).order(20, 8, seed, epoch))


def test_a_loader_is_taken_over() -> None:
    def init(worker: int) -> None: ...

    loader = DataLoader(
        Numbers(), 8, collate_fn=pad, num_workers=2, worker_init_fn=init, prefetch_factor=3, timeout=9, drop_last=True
    )
    loading = Loading.of(loader, 8)
    assert isinstance(loading.dataset, Numbers) and loading.collate_fn is pad and loading.worker_init_fn is init
    assert (loading.num_workers, loading.prefetch_factor, loading.timeout, loading.drop_last) == (2, 3, 9, True)
    assert Loading.of(loader, 8, num_workers=0, collate_fn=noisy_pad).collate_fn is noisy_pad
    assert Loading.of(DataLoader(Numbers(), 8), 8).collate_fn is None


def test_orders_of_loaders() -> None:
    in_order = [list(range(8)), list(range(8, 16)), list(range(16, 20))]
    assert order_of(DataLoader(Numbers(), 8)) == in_order
    assert order_of(DataLoader(Numbers(), 8, drop_last=True)) == in_order[:2]
    shuffled = order_of(DataLoader(Numbers(), 8, shuffle=True))
    assert shuffled == order_of(Numbers()) != in_order  # the job's own
    assert order_of(DataLoader(Numbers(), batch_sampler=BatchSampler(SequentialSampler(Numbers()), 6, True))) == [
        list(range(6)),
        list(range(6, 12)),
        list(range(12, 18)),
    ]


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


def by_function(seed: int, epoch: int) -> Any:
    return np.random.default_rng([seed, epoch]).permutation(20)


SAMPLERS: dict[str, Callable[[], Any]] = {
    "weighted": lambda: WeightedRandomSampler(list(range(20)), 15),
    "replacement": lambda: RandomSampler(Numbers(), replacement=True, num_samples=30),
    "with a generator": lambda: RandomSampler(Numbers(), generator=torch.Generator().manual_seed(3)),
    "in batches": lambda: BatchSampler(RandomSampler(Numbers(), generator=torch.Generator().manual_seed(3)), 7, False),
    "by length": ByLength,
    "stateful": Stateful,
    "with set_epoch": WithEpoch,
    "function": lambda: by_function,
    "function of batches": lambda: lambda seed, epoch: [[seed, epoch], [5, 6, 7], []],
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_depend_on_seed_and_epoch_alone(name: str) -> None:
    sampler = SAMPLERS[name]()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    first = [batches(listed_order(sampler, 20, 8, 1, epoch)) for epoch in (0, 1, 2)]
    state = torch.get_rng_state()
    torch.manual_seed(1), random.seed(2), np.random.seed(3)
    again = batches(listed_order(SAMPLERS[name](), 20, 8, 1, 2))  # as in a run that was resumed in epoch 2
    assert again == first[2]
    assert first[0] != first[1] != first[2]
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state), "the script's own generators are left alone"


def test_variable_batches() -> None:
    order = listed_order(ByLength(), 20, 8, 1, 0)
    assert order.num_batches == 3 and sorted(sample for batch in batches(order) for sample in batch) == list(range(20))
    assert batches(listed_order(lambda *_: [[1], [], [2, 3]], 20, 8, 0, 0)) == [[1], [2, 3]]


@pytest.mark.parametrize(
    ("give", "sentence"),
    [
        (lambda: Loading.of(DataLoader(Numbers(), 4), 8), "batch_size=4 and the job global_batch_size=8; set both"),
        (lambda: Loading.of(DataLoader(Numbers(), None), 8), "has batch_size=None, so its data set makes the batches"),
        (
            lambda: Loading.of(DataLoader(Numbers(), 8, sampler=DistributedSampler(Numbers(), 2, 0)), 8),
            "DistributedSampler gives each worker samples of its own, which Paceline does itself; leave it out",
        ),
        (lambda: Loading.of(Numbers(), 8, sampler=5), "give a torch Sampler or BatchSampler, or a function"),
        (lambda: order_with(lambda *_: []), "The sampler gave no sample for epoch 0"),
        (
            lambda: Loading.of(DataLoader(Numbers(), 32, drop_last=True), 32).order(20, 32, 0, 1),
            "drop_last=True leaves no batch of epoch 1, which has fewer than global_batch_size = 32 samples",
        ),
        (lambda: order_with(lambda *_: [1, 20]), "The sampler gave the sample 20 for epoch 0; the data set has 20"),
        (lambda: order_with(lambda *_: [[1, "a"]]), "A sampler gave 'a' where the number of a sample"),
        (
            lambda: Loading.of(DataLoader(Numbers(), 8, drop_last=True), 8, "evaluation").evaluation_order(20, 8, 0),
            "An evaluation counts every sample once; give its DataLoader drop_last=False",
        ),
    ],
)
def test_refusals(give: Any, sentence: str) -> None:
    with pytest.raises(DataError) as caught:
        give()
    assert sentence in str(caught.value) and str(caught.value).count(". ") == 0


def order_with(sampler: Any) -> EpochOrder:
    return Loading.of(Numbers(), 8, sampler=sampler).order(20, 8, 0, 0)


def test_a_seeded_collator_is_refused() -> None:
    class Masking:
        seed = 3

        def __call__(self, samples: list[Any]) -> Any:
            return samples

    with pytest.raises(DataError, match="has a seed, so its draws depend on how many batches it made before"):
        Loading.of(Numbers(), 8, collate_fn=Masking())


def contents(loading: Loading, requests: list[SampleRequest], **settings: Any) -> list[Any]:
    settings = {"seed": 3, "epoch": 1, "device": CPU, **settings}
    return [content for one in read_samples(loading, requests, **settings) for content in one]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_shards_are_collated_alone_whoever_reads_them(num_workers: int) -> None:
    shards = tuple(np.array(shard) for shard in ([3, 1], [7, 2], [4]))
    loading = Loading(Numbers(), noisy_pad, num_workers=num_workers)
    whole = contents(loading, [SampleRequest(shards, 5, 0)])
    apart = contents(loading, [SampleRequest(shards[:1], 5, 0), SampleRequest(shards[1:], 5, 1)])
    assert [content.shape[1] for content in whole] == [3, 7, 4]
    for one, other in zip(whole, apart, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(whole[0], contents(loading, [SampleRequest(shards, 6, 0)])[0])  # another batch, other draws
    assert not torch.equal(whole[0], contents(loading, [SampleRequest(shards, 5, 0)], train=False)[0])


def test_samples_that_do_not_fit_together() -> None:
    with pytest.raises(DataError, match=r"by torch's default \(stack expects .*\); give .*collate_fn"):
        contents(Loading(Numbers()), [SampleRequest((np.array([1, 2]),))])


class Unseeded(Numbers):
    def __getitem__(self, index: int) -> Any:
        return float(np.random.default_rng().normal())


class Counted(Numbers):
    def __init__(self) -> None:
        self.num_read = 0

    def __getitem__(self, index: int) -> Any:
        self.num_read += 1
        return self.num_read


class Seeded(Counted):
    """Draws, and counts its calls, but a sample is the same whenever it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng()

    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        return index + self.rng.normal() + float(np.random.rand())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_that_depend_on_how_often_they_are_read(num_workers: int) -> None:
    request = SampleRequest((np.array([4, 2]),))
    for kind in Unseeded, Counted:
        with pytest.raises(DataError, match="Sample 4 of the training set, read twice with the same seeds, differs"):
            contents(Loading(kind(), num_workers=num_workers), [request], epoch=0)
    contents(Loading(Seeded(), num_workers=num_workers), [request], epoch=0)


class Alternating:
    """A collate function that scales every second batch; it changes its samples."""

    def __init__(self, factor: float) -> None:
        self.factor, self.num_called = factor, 0

    def __call__(self, samples: list[list[Any]]) -> Any:
        self.num_called += 1
        return torch.tensor([sample.pop() for sample in samples]) * (self.factor if self.num_called % 2 else 1.0)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_collating_that_depends_on_how_often_it_is_done(num_workers: int) -> None:
    class Lists(Numbers):
        def __getitem__(self, index: int) -> Any:
            return [float(index)]

    request = SampleRequest((np.array([4, 2]),))
    with pytest.raises(
        DataError, match="collate function, called twice with the same samples and seeds, returned diff"
    ):
        contents(Loading(Lists(), collate_fn=Alternating(2.0), num_workers=num_workers), [request], epoch=0)
    (batch,) = contents(Loading(Lists(), collate_fn=Alternating(1.0), num_workers=num_workers), [request], epoch=0)
    assert batch.tolist() == [4.0, 2.0]


def test_another_worker_or_an_evaluation_does_not_look_for_them() -> None:
    contents(Loading(Counted()), [SampleRequest((np.array([4]),))], epoch=0, train=False)
    contents(Loading(Counted()), [SampleRequest((np.array([4]),), first_shard=1)], epoch=0)


def seed_worker(worker: int) -> None:
    torch.set_num_threads(worker + 2)


class Threads(Numbers):
    def __getitem__(self, index: int) -> Any:
        return torch.get_num_threads()


def test_worker_init() -> None:
    loading = Loading(Threads(), num_workers=2, worker_init_fn=seed_worker, prefetch_factor=1)
    requests = [SampleRequest((np.array([0]),)) for _ in range(4)]
    assert [int(content) for content in contents(loading, requests)] == [2, 3, 2, 3]
