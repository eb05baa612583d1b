"""Ragged samples, loaders and samplers as people have them: the same bits on any number of workers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, WeightedRandomSampler

import paceline
from paceline.env import worker_facts
from paceline.errors import DataError, ModelError
from paceline.sharded_batch import ShardedBatch
from paceline.spec import Job
from tests.kit.workers import run_ranks

SIZE = 45


class Sentences(Dataset[dict[str, Any]]):
    """Token lists of many lengths, with a little noise of their own."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = 2 + (index * 7) % 11
        tokens = torch.randint(1, 40, (length,), generator=torch.Generator().manual_seed(index))
        return {"tokens": tokens, "noise": torch.rand(()), "label": index % 3}


def masked_padding(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Pads to the longest, and masks some tokens at random, as collators of language models do."""
    tokens = nn.utils.rnn.pad_sequence([sample["tokens"] for sample in samples], batch_first=True)
    tokens = torch.where(torch.rand(tokens.shape) < 0.1, torch.tensor(40), tokens)
    if random.random() + np.random.rand() < 0.3:
        tokens = tokens.flip(1)
    return {
        "tokens": tokens,
        "longest": tokens.shape[1],  # a model that sees how far it was padded
        "noise": torch.stack([sample["noise"] for sample in samples]),
        "label": torch.tensor([sample["label"] for sample in samples]),
    }


class ByLength(Sampler[list[int]]):
    """Batches of several sizes; the last has fewer samples than there are workers."""

    def __iter__(self) -> Iterator[list[int]]:
        numbers = torch.randperm(SIZE).tolist()
        ends = [0, 9, 16, 31, 43, 45]
        yield from (numbers[start:stop] for start, stop in itertools.pairwise(ends))


def by_function(seed: int, epoch: int) -> Any:
    return np.random.default_rng([seed, epoch]).permutation(SIZE)


def _loader(name: str) -> tuple[Any, dict[str, Any]]:
    dataset: Any = Sentences()
    if name == "padding":
        return dataset, {"collate_fn": masked_padding}
    if name == "loader with everything":
        weighted = WeightedRandomSampler([1 + number % 4 for number in range(SIZE)], 30)
        keys: dict[str, Any] = {"num_workers": 2, "worker_init_fn": _init, "persistent_workers": True}
        return DataLoader(dataset, 9, sampler=weighted, collate_fn=masked_padding, drop_last=True, **keys), {}
    if name == "batches by length":
        return DataLoader(dataset, batch_sampler=ByLength(), collate_fn=masked_padding), {}
    return dataset, {"collate_fn": masked_padding, "sampler": by_function}


def _init(worker: int) -> None:
    torch.rand(worker + 1)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(41, 8)
        self.out = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 3))

    def forward(self, tokens: Tensor, longest: int) -> Any:
        return self.out(self.embedding(tokens).sum(1) / longest)


def _loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    losses = nn.functional.cross_entropy(model(batch["tokens"], batch["longest"]), batch["label"], reduction="none")
    loss: Tensor = (losses * (1 + batch["noise"])).mean()
    return loss


def _measure(model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
    return {"right": (model(batch["tokens"], batch["longest"]).argmax(1) == batch["label"]).double()}


NAMES = ("padding", "loader with everything", "batches by length", "function")


def _train_all(parity: str, strategy: str, names: tuple[str, ...] = NAMES) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        values: dict[str, Any] = {"precision": "float64"} if parity == "numeric" else {}
        job = Job(global_batch_size=9, virtual_shards=4, epochs=2, seed=5, parity=parity)  # type: ignore[arg-type]
        with paceline.init(job, strategy=strategy, **values) as run:
            torch.manual_seed(3)
            run.prepare(model := _Model(), torch.optim.SGD(model.parameters(), 0.3))
            dataset, keys = _loader(name)
            losses, sizes = [], []
            for batch in run.batches(dataset, **keys):
                sizes.append(batch.num_samples)
                losses.append(float(run.step(batch.map(dict), _loss)))
            metrics = run.evaluate(Sentences(), _measure, collate_fn=masked_padding)
            found[name] = run.weights_sha256(), losses, metrics, run.samples_seen, run.steps
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    answer: dict[str, Any] = run_ranks(_train_all, 1, "bitwise", "dp")[0]
    assert [answer[name][3:] for name in NAMES] == [(2 * 45, 10), (2 * 27, 6), (2 * 45, 10), (2 * 45, 10)]
    return answer


@pytest.mark.parametrize("world_size", [2, 3])
def test_bits_do_not_depend_on_the_number_of_workers(alone: dict[str, Any], world_size: int) -> None:
    for one in run_ranks(_train_all, world_size, "bitwise", "dp", timeout_s=120):
        assert one == alone


def test_numeric_parity_in_sharded_engines_too() -> None:
    wanted = run_ranks(_train_all, 1, "numeric", "dp", NAMES[:3], timeout_s=120)[0]
    for world_size, strategy in ((3, "dp"), (2, "fsdp")):
        for one in run_ranks(_train_all, world_size, "numeric", strategy, NAMES[:3], timeout_s=120):
            for name in NAMES[:3]:
                np.testing.assert_allclose(one[name][1], wanted[name][1], rtol=1e-12, err_msg=f"{strategy} {name}")


def _refused() -> list[str]:
    sentences = []
    rank = worker_facts().rank
    with paceline.init(Job(global_batch_size=9, virtual_shards=4)) as run:
        run.prepare(model := _Model(), torch.optim.SGD(model.parameters(), 0.3))
        samplers: list[Any] = [lambda _seed, _epoch: [rank, 1, 2], None]
        for sampler in samplers:
            dataset: Any = (
                Sentences() if sampler is not None else torch.utils.data.Subset(Sentences(), range(30 + rank))
            )
            with pytest.raises(DataError) as caught:
                next(iter(run.batches(dataset, collate_fn=masked_padding, sampler=sampler)))
            sentences.append(str(caught.value))
    return sentences


def test_workers_with_other_orders_are_refused() -> None:
    for sentences in run_ranks(_refused, 2):
        for sentence in sentences:
            assert sentence.startswith("In epoch 0 rank 1 would read other samples than rank 0, or in another order")


def test_a_sharded_batch_says_how_it_is_used() -> None:
    batch = ShardedBatch(({"x": 1}, {"x": 2}), (3, 2))
    assert batch.map(lambda shard: shard["x"]).shards == (1, 2) and batch.num_samples == 5
    wrongs: list[Callable[[], Any]] = [lambda: batch["x"], lambda: batch.to("cpu"), lambda: list(batch)]
    for wrong in wrongs:
        with pytest.raises(ModelError, match=r"one collated batch for each virtual shard, .* by batch.map"):
            wrong()


def _follow() -> list[float]:
    """The losses of a run that compares each shard with what the model said of it before two steps; the last batch has
    fewer shards than others."""
    job = Job(global_batch_size=8, virtual_shards=4, epochs=1, precision="float64")
    data = [torch.randn(5, generator=torch.Generator().manual_seed(number)) for number in range(18)]

    def follow(shard: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            shard["said"] = model(shard["inputs"] + 0.1 * torch.randn(5))
        return shard

    with paceline.init(job, strategy="fsdp", progress=False) as run:
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
        run.prepare(model, torch.optim.SGD(model.parameters(), 0.3))
        losses = []
        for batch in run.batches(data, collate_fn=lambda samples: {"inputs": torch.stack(samples)}):
            changed = batch.map(follow)
            for _ in range(2):
                loss = run.step(
                    changed, lambda model, one: (model(one["inputs"]) - one["said"]).square().mean(), model=model
                )
                losses.append(float(loss))
            batch.map(follow)
        return losses


def test_a_sharded_model_is_called_equally_often_for_the_shards_of_a_batch() -> None:
    (alone,) = run_ranks(_follow, 1)
    for losses in run_ranks(_follow, 3, timeout_s=60):
        np.testing.assert_allclose(losses, alone, rtol=1e-9)
