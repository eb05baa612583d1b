"""Evaluation in a world of one: every sample once, and metrics that are none are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.data import Loading
from paceline.data.order import ListedOrder
from paceline.env import WorkerFacts
from paceline.errors import ModelError
from paceline.parallel.losses import Mean
from paceline.spec import Job, Mesh
from paceline.train.batches.reading import DatasetReader
from paceline.train.evaluation.evaluate import Measure, SetChunks, evaluate, own_chunks
from paceline.train.evaluation.metric_states import MergeTree, MetricFunctions, metric_functions, update_trees
from paceline.train.process.process_group import World

ALONE = World(WorkerFacts(), torch.device("cpu"), None)


@given(st.integers(0, 500), st.integers(1, 300), st.integers(1, 12))
def test_every_sample_belongs_to_one_chunk_and_every_chunk_to_one_worker(samples: int, size: int, workers: int) -> None:
    order = ListedOrder.of_size(np.arange(samples), size)
    chunks = [order.batch(number) for number in range(order.num_batches)]
    assert [i for chunk in chunks for i in chunk] == list(range(samples))
    assert all(0 < len(chunk) <= size for chunk in chunks)
    owned = [own_chunks(len(chunks), rank, workers, in_step=False) for rank in range(workers)]
    assert [number for numbers in owned for number in numbers] == list(range(len(chunks)))
    assert owned[0] or not chunks
    assert max(map(len, owned)) - min(map(len, owned)) <= 1
    in_step = [own_chunks(len(chunks), rank, workers, in_step=True) for rank in range(workers)]
    assert {number for numbers in in_step for number in numbers} == set(range(len(chunks)))
    assert len(set(map(len, in_step))) == 1


def run(values: Tensor, chunk_size: int, measure: Measure) -> dict[str, float]:
    job = Job(eval_batch_size=chunk_size)
    reader = DatasetReader(job, torch.device("cpu"))
    chunks = SetChunks(Loading(values), reader, job, Mesh(), ALONE, in_step=False)
    return evaluate(chunks, lambda _number: None, nn.Identity(), measure, ALONE)


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.int64])
def test_the_mean_over_samples_whatever_the_chunks(chunk_size: int, dtype: torch.dtype) -> None:
    values = torch.arange(7).to(dtype)  # a ragged last chunk counts by its samples

    def measure(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"value": model(batch), "one": torch.ones(len(batch))}

    assert run(values, chunk_size, measure) == {"value": pytest.approx(float(values.double().mean())), "one": 1.0}


def test_no_chunk_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[tuple[int, ...]] = []
    tolist = Tensor.tolist

    def counting(tensor: Tensor) -> Any:
        reads.append(tuple(tensor.shape))
        return tolist(tensor)

    def measure(_model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"v": batch, "per token": Mean(batch.mean(), weight=batch.sum())}

    values = torch.arange(1.0, 11.0)
    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "tolist", counting)
        patched.setattr(Tensor, "__float__", lambda _tensor: pytest.fail("the program waits for the device"))
        found = run(values, 2, measure)
    expected = sum(float(pair.mean() * pair.sum()) for pair in values.split(2)) / float(values.sum())
    assert found == {"v": 5.5, "per token": pytest.approx(expected)}
    assert reads == [(15,), (5, 3)] or reads == [(15,), (3, 5)], "the sums of five chunks, and the table of all workers"


def test_means_given_as_numbers_keep_their_precision() -> None:
    third = 1 / 3
    assert run(torch.zeros(4), 2, lambda _model, _batch: {"v": Mean(third, weight=1)})["v"] == third


def test_sums_are_float64() -> None:
    """In float32 the small values would vanish beside the large one."""
    values = torch.cat([torch.tensor([2.0**24]), torch.ones(31)])
    assert run(values, 64, lambda _model, batch: {"v": batch})["v"] == (2.0**24 + 31) / 32


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (lambda batch: batch.mean(), r"\(\)"),
        (lambda batch: batch[:, None], r"\(4, 1\)"),
        (lambda batch: batch[:-1], r"\(3,\)"),
        (lambda batch: float(batch.sum()), "float"),
        (lambda batch: batch.tolist(), "list"),
    ],
)
def test_a_metric_that_is_not_one_value_per_sample_is_refused(wrong: Callable[[Tensor], Any], got: str) -> None:
    refusal = rf"metric 'mine' should be one value per sample, shape \(4,\), or a paceline.Mean, but is {got}"
    with pytest.raises(ModelError, match=refusal):
        run(torch.arange(8.0), 4, lambda _model, batch: {"mine": wrong(batch)})


@pytest.mark.parametrize("num_chunks", range(1, 12))
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_states_are_merged_in_one_tree_whoever_has_them(num_chunks: int, workers: int) -> None:
    def merge(first: str, second: str) -> str:
        return f"({first}{second})"

    alone = MergeTree(merge)
    for number in range(num_chunks):
        alone.push(number, 1, f"{number},")
    whole = MergeTree(merge)
    for rank in range(workers):
        own = MergeTree(merge)
        for number in own_chunks(num_chunks, rank, workers, in_step=False):
            own.push(number, 1, f"{number},")
        for block in own.parts():
            whole.push(*block)
    assert whole.root() == alone.root()


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_a_metric_that_consists_of_others_has_their_states(num_chunks: int) -> None:
    def metric() -> Any:
        per_class = torchmetrics.classification.MulticlassAccuracy(3, average=None)
        of_all = torchmetrics.classification.MulticlassF1Score(3)
        return {"sum": 2 * of_all + 1, "by class": torchmetrics.wrappers.ClasswiseWrapper(per_class)}

    draw = torch.Generator().manual_seed(0)
    classes = torch.randint(3, (2, 30), generator=draw)
    for name, one in metric().items():
        functions = metric_functions(name, one)
        first, *rest = [
            functions.update(*part) for part in zip(*(row.chunk(num_chunks) for row in classes), strict=True)
        ]
        state = functools.reduce(functions.merge, rest, first)
        expected = metric()[name]
        expected.update(*classes)
        torch.testing.assert_close(functions.compute(state), expected.compute())


def test_what_cannot_be_merged_is_refused() -> None:
    with pytest.raises(ModelError, match="'f1' is a str; give a torchmetrics metric or three functions"):
        metric_functions("f1", "F1")
    with pytest.raises(ModelError, match=r"measure returned nothing for the metric 'f1', but only \['loss'\]"):
        update_trees({"f1": MetricFunctions(max, max, max)}, {}, 0, {"loss": 1})
    functions = metric_functions("r", torchmetrics.PearsonCorrCoef())
    states = [functions.update(torch.randn(4), torch.randn(4)) for _ in range(2)]
    with pytest.raises(ModelError, match="'r' has a state with the rule None, which cannot be merged"):
        functions.merge(*states)
