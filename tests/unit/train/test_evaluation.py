"""An evaluation counts every sample once, in the precision of float64, whatever its batches; metrics that are no
means are merged from states; what is no metric is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.errors import JobError, ModelError


def evaluate(values: Tensor, measure: Callable[[nn.Module, Tensor], Any], batch: int = 3, **options: Any) -> Any:
    with paceline.init(global_batch_size=8, eval_batch_size=batch, progress=False) as run:
        model = nn.Linear(1, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return run.evaluate(list(values), measure, **options)


@pytest.mark.parametrize("batch", [1, 3, 7, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.int64])
def test_a_metric_is_the_mean_over_samples_whatever_the_batches(batch: int, dtype: torch.dtype) -> None:
    values = torch.arange(7).to(dtype)
    found = evaluate(values, lambda _, batch: {"value": batch, "one": torch.ones(len(batch))}, batch)
    assert found == {"value": pytest.approx(float(values.double().mean()), rel=1e-15), "one": 1.0}


@pytest.mark.parametrize("batch", [2, 3, 10])
def test_a_mean_with_weights_counts_by_them(batch: int) -> None:
    values = torch.arange(1.0, 11.0)
    found = evaluate(values, lambda _, batch: {"v": paceline.Mean(batch.mean(), weight=batch.sum())}, batch)
    expected = sum(float(part.mean() * part.sum()) for part in values.split(batch)) / float(values.sum())
    assert found["v"] == pytest.approx(expected)


def test_a_batch_in_which_nothing_counts_changes_nothing() -> None:
    values = torch.tensor([1.0, 3.0, 0.0, 0.0, 5.0, 7.0])
    found = evaluate(values, lambda _, batch: {"v": paceline.Mean(batch.sum() / batch.sum(), weight=batch.sum())}, 2)
    assert found["v"] == 1.0


def test_running_statistics_are_those_after_the_last_step_for_evaluations_and_for_other_models_steps() -> None:
    with paceline.init(global_batch_size=8, epochs=1, virtual_shards=2, progress=False) as run:
        norms = [nn.BatchNorm1d(1, momentum=1.0) for _ in range(2)]
        first, second = (nn.Sequential(norm, nn.Linear(1, 1)) for norm in norms)
        for model in (first, second):
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        seen: list[Tensor] = []

        def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
            if model is second:
                measure(first, batch)
            loss: Tensor = model(batch).square().mean()
            return loss

        def measure(_: nn.Module, batch: Tensor) -> Any:
            assert norms[0].running_mean is not None
            seen.append(norms[0].running_mean.clone())
            return {"v": batch[:, 0]}

        for batch in run.batches(list(torch.randn(16, 1))):
            run.step(batch, loss_fn, model=first)
            measure(first, batch.shards[0])
            run.step(batch, loss_fn, model=second)
            run.evaluate(list(torch.randn(3, 1)), measure)
            assert len(seen) > 3 and all(torch.equal(one, seen[0]) for one in seen)
            seen.clear()


def test_sums_are_float64() -> None:
    """In float32 the small values would vanish beside the large one."""
    values = torch.cat([torch.tensor([2.0**24]), torch.ones(31)])
    assert evaluate(values, lambda _, batch: {"v": batch}, 64)["v"] == (2.0**24 + 31) / 32
    third = 1 / 3
    assert evaluate(torch.zeros(4), lambda *_: {"v": paceline.Mean(third, weight=1)}, 2)["v"] == third


@pytest.mark.parametrize("batch", [1, 4, 11])
def test_a_metric_of_states_is_that_of_the_whole_set(batch: int) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    truth = torch.tensor([0, 1, 1, 0, 1, 1, 0, 0, 1, 0, 1])
    scores = torch.linspace(0.2, 0.9, 11).flip(0)
    numbers = torch.arange(11)

    found = evaluate(
        numbers,
        lambda _, batch: {"auroc": (scores[batch], truth[batch]), "total": (batch,)},
        batch,
        metrics={
            "auroc": torchmetrics.AUROC("binary"),
            "total": (lambda batch: int(batch.sum()), lambda one, other: one + other, float),
        },
    )
    both = torchmetrics.classification.BinaryAccuracy() + torchmetrics.classification.BinaryF1Score()
    sums = evaluate(numbers, lambda _, batch: {"sum": (scores[batch], truth[batch])}, batch, metrics={"sum": both})
    once = [kind() for kind in (torchmetrics.classification.BinaryAccuracy, torchmetrics.classification.BinaryF1Score)]
    assert sums["sum"] == pytest.approx(sum(float(metric(scores, truth)) for metric in once))
    whole = torchmetrics.AUROC("binary")
    whole.update(scores, truth)
    assert found["auroc"] == pytest.approx(float(whole.compute()))
    assert found["total"] == 55


def test_an_evaluation_runs_without_gradients_in_evaluation_mode_and_training_goes_on_in_its_own() -> None:
    modes: list[tuple[bool, bool]] = []
    with paceline.init(global_batch_size=8, progress=False) as run:
        model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def measure(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
            modes.append((model.training, torch.is_grad_enabled()))
            return {"v": model(batch[:, None].float())[:, 0]}

        run.evaluate(torch.arange(4.0), measure)
        assert model.training
    assert set(modes) == {(False, False)}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda batch: batch.mean(), ["()"]),
        (lambda batch: batch[:, None], ["(4, 1)"]),
        (lambda batch: batch[:-1], ["(3,)"]),
        (lambda batch: float(batch.sum()), ["float"]),
        (lambda batch: batch.tolist(), ["list"]),
    ],
)
def test_a_metric_that_is_not_one_value_for_each_sample_is_refused(
    wrong: Callable[[Tensor], Any], words: list[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        evaluate(torch.arange(8.0), lambda _, batch: {"mine": wrong(batch)}, 4)
    assert all(word in str(caught.value) for word in ["mine", "(4,)", *words]), caught.value


def test_what_is_no_table_of_metrics_is_refused() -> None:
    with pytest.raises(ModelError, match="Tensor"):
        evaluate(torch.arange(8.0), lambda _, batch: batch)


def test_arguments_of_prepare_in_the_wrong_order_are_told_in_a_sentence() -> None:
    model: Any = nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.init(global_batch_size=8, progress=False) as run, pytest.raises(ModelError, match="not SGD"):
        run.prepare(optimizer, model)


@pytest.mark.parametrize("optimizer", ["adam", torch.optim.Adam, [], [torch.optim.Adam]])
def test_what_is_no_optimizer_is_refused(optimizer: Any) -> None:
    with paceline.init(global_batch_size=8, progress=False) as run, pytest.raises(ModelError, match="optimizer"):
        run.prepare(nn.Linear(1, 1), optimizer)


def test_lbfgs_is_refused_with_a_memory_format_that_it_cannot_view() -> None:
    model = nn.Conv2d(2, 2, 3)
    optimizer = torch.optim.LBFGS(model.parameters())
    with paceline.init(global_batch_size=8, channels_last=True, progress=False) as run, pytest.raises(JobError) as told:
        run.prepare(model, optimizer)
    assert "channels_last" in str(told.value)


@pytest.mark.parametrize("computed", ["half", None, torch.ones(2)])
def test_a_metric_that_computes_no_number_is_refused(computed: Any) -> None:
    functions = {"mine": (torch.sum, torch.add, lambda _state: computed)}
    with paceline.init(global_batch_size=8, progress=False) as run, pytest.raises(ModelError, match="mine"):
        run.prepare(model := nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.1))
        run.evaluate(torch.arange(8.0), lambda _, batch: {"mine": batch}, functions)
