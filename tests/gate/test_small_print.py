"""What a run promises beside the law's table: losses that count for nothing, statistics that forward passes move,
evaluations that leave no trace, random numbers between steps, and workers that stop doing the same."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import paceline
from paceline.errors import PacelineError
from tests.kit import losses, models
from tests.kit.engines import ENGINES
from tests.kit.oracle import Task, learn, order
from tests.kit.train import trained
from tests.kit.workers import run_ranks
from tests.law.tasks import rows, sequences, texts

_sgd = functools.partial(torch.optim.SGD, lr=0.3)
_decaying = functools.partial(torch.optim.SGD, lr=0.3, momentum=0.9, weight_decay=0.1)


def _with_a_worker_without_samples() -> Task:
    """Three workers; the last batch has two samples, of which the first has no token."""
    task = Task(models.layers, losses.counted_tokens, sequences(18), _sgd, epochs=1)
    has_tokens = (sequences(18).tensors[1] != losses.IGNORED).any(1).tolist()
    ends = {seed: [has_tokens[sample] for sample in order(seed, 0, 18)[-2:]] for seed in range(100)}
    return replace(task, seed=next(seed for seed, found in ends.items() if found == [False, True]))


TASKS: dict[str, tuple[str, Task]] = {
    "a worker without samples": ("dp on 3", _with_a_worker_without_samples()),
    "a limit that no gradient reaches": (
        "one worker",
        Task(models.layers, losses.classes, rows(8), _sgd, clip_norm=1e6),
    ),
    "an unused parameter that would decay": (
        "dp, bitwise",
        Task(models.tied, losses.counted_tokens, texts(16), _decaying, epochs=1),
    ),
    "the norm of weights in two stages": (
        "pp, 1f1b",
        Task(models.tied, losses.counted_tokens, texts(16), _sgd, epochs=1, clip_norm=0.1),
    ),
}


@pytest.mark.parametrize("name", TASKS)
def test_a_run_learns_what_a_plain_loop_learns(name: str) -> None:
    engine, task = TASKS[name]
    right = learn(task, num_shards=1)
    for outcome in trained(ENGINES[engine], task):
        for parameter, value in outcome.learned.weights.items():
            torch.testing.assert_close(value, right.weights[parameter], rtol=1e-11, atol=1e-13)


class _Statistics(nn.Module):
    """A layer, and what its passes have seen: a count, the smallest and a mean, which an evaluation moves too."""

    count: Tensor
    smallest: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.dropout = nn.Linear(2, 1), nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(1).eval()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("smallest", torch.tensor(torch.inf))
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, inputs: Tensor) -> Tensor:
        self.count += (inputs > 0).sum()
        self.smallest.copy_(torch.minimum(self.smallest, inputs.min()))
        self.mean.lerp_(inputs.detach().mean(0), 0.5)
        output: Tensor = self.norm(self.layer(self.dropout(inputs)))
        return output


def _pairs(num_samples: int = 8) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_samples, 2, generator=draw).relu()  # half of the numbers are 0, no number is below
    return TensorDataset(inputs, torch.randn(num_samples, 1, generator=draw))


def _squares(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    inputs, targets = batch
    return (model(inputs) - targets).square().mean(), {"target": targets.mean()}


def _init(**job: Any) -> paceline.Run:
    values = {"global_batch_size": 8, "virtual_shards": 4, "epochs": 1, "eval_batch_size": 3} | job
    return paceline.init(progress=False, **values)


def _in_order(_seed: int, _epoch: int) -> range:
    return range(8)


def _moved_statistics() -> list[Any]:
    with _init() as run:
        model, _ = run.prepare(found := _Statistics(), _sgd(found.parameters()))
        for batch in run.batches(_pairs(), sampler=_in_order):
            run.step(batch, _squares)
        return [int(model.count), float(model.smallest), float(run.values["target"]), model.norm.training]


def test_statistics_and_values_are_those_of_the_virtual_shards_on_any_number_of_workers() -> None:
    inputs, targets = _pairs().tensors
    of_first_shard = int((inputs[:2] > 0).sum())
    for found in run_ranks(_moved_statistics, 1) + run_ranks(_moved_statistics, 2):
        assert found == [of_first_shard, 0.0, pytest.approx(float(targets.mean()), rel=1e-6), False]


def _noisy(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    inputs, _ = batch
    return {"noisy": model(inputs).flatten() + torch.rand(len(inputs))}


def _with_evaluations(*, are_made: bool) -> list[Any]:
    """What is learned and drawn, and what the evaluations found."""
    found, drawn = [], []
    with _init(global_batch_size=4, epochs=2) as run:
        model, _ = run.prepare(made := _Statistics(), _sgd(made.parameters()))
        for batch in run.batches(_pairs()):
            run.step(batch, _squares)
            if are_made:
                found.append(run.evaluate(_pairs(7), _noisy)["noisy"])
            drawn.append(float(torch.rand(())))
        return [run.weights_sha256(), drawn, model.norm.training, model.layer.training, found]


def test_an_evaluation_leaves_no_trace_and_workers_draw_alike_between_steps() -> None:
    (plain,) = run_ranks(functools.partial(_with_evaluations, are_made=False), 1)
    evaluated = functools.partial(_with_evaluations, are_made=True)
    (alone,) = run_ranks(evaluated, 1)
    assert alone[0] == plain[0] and alone[2:4] == plain[2:4] == [False, True]
    first, second = run_ranks(evaluated, 2)
    assert first[1:] == second[1:]
    assert first[1] == alone[1]
    assert first[4] == pytest.approx(alone[4], rel=1e-5)


class _Numbers(IterableDataset[Tensor]):
    """Eleven numbers, in shards of their own that end one after the other."""

    num_shards = 4

    def __init__(self, numbers: tuple[float, ...] = tuple(range(11))) -> None:
        self._numbers = numbers

    def shard(self, num_shards: int, index: int) -> _Numbers:
        return _Numbers(self._numbers[index::num_shards] if index else self._numbers[::num_shards] * 3)

    def __iter__(self) -> Any:
        return (torch.tensor([number]) for number in self._numbers)


def _in_order_of(some: Tensor) -> str:
    return ",".join(str(int(one)) for one in some)


def _joined(first: str, second: str) -> str:
    return f"({first} {second})"


def _metrics() -> tuple[dict[str, float], list[str]]:
    """The metrics of some sets, and in which order states were merged, on rank 0."""
    import torchmetrics

    merged: list[str] = []

    def compute(state: str) -> int:
        merged.append(state)
        return len(state)

    def measure(_model: nn.Module, batch: Any) -> dict[str, Any]:
        (some,) = batch
        counted = some[some < 3]
        return {
            "tiny": some.new_full((len(some),), 1 / 3),
            "counted": paceline.Mean(counted.mean(), weight=len(counted)),
            "order": (some,),
            "accuracy": (some / 11, (some > 2).long()),
        }

    with _init() as run:
        run.prepare(model := nn.Linear(1, 1), _sgd(model.parameters()))
        accuracy = torchmetrics.Accuracy(task="binary") * 2 + 1
        others = {"order": (_in_order_of, _joined, compute), "accuracy": accuracy}
        found = run.evaluate(TensorDataset(torch.arange(11.0)), measure, others)
        stream = run.evaluate(_Numbers(), lambda _model, batch: {"stream": batch.flatten()})
        return found | stream, merged


def test_metrics_count_every_sample_once_whatever_they_are_made_of() -> None:
    ((alone, merged),) = run_ranks(_metrics, 1)
    assert alone["tiny"] == float(torch.tensor(1 / 3)) and alone["counted"] == 1.0
    assert alone["accuracy"] == pytest.approx(1 + 2 * 8 / 11)
    of_stream = [*range(1, 11, 4), *range(2, 11, 4), *range(3, 11, 4), *(3 * [0, 4, 8])]
    assert alone["stream"] == pytest.approx(sum(of_stream) / len(of_stream))
    first, *others = run_ranks(_metrics, 3)
    assert first == (alone, merged) and all(other == (alone, []) for other in others)


class _Swapped(nn.Module):
    """Two layers, made in another order on rank 1."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        for name in ("second", "first") if rank else ("first", "second"):
            setattr(self, name, nn.Linear(2, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(inputs)).sum(1, keepdim=True)  # type: ignore[operator]
        return output


def _different_layers() -> str:
    try:
        with _init() as run:
            run.prepare(model := _Swapped(run.rank), _sgd(model.parameters()))
            for batch in run.batches(_pairs()):
                run.step(batch, _squares)
    except PacelineError as refusal:
        return str(refusal)
    return "they trained"


def test_workers_that_stop_doing_the_same_are_told_rank_tensor_and_step() -> None:
    for said in run_ranks(_different_layers, 2):
        assert all(word in said for word in ("rank 1", "first", "second", "step 1")), said
