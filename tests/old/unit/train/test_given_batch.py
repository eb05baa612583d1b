"""What a script computes from a batch before `run.step`: whether a sample follows from the others is found out."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from paceline.train.steps.given_batch import GivenBatch

Batch = dict[str, Tensor]
SAMPLES = 6


def _mixed(change: Callable[[Batch], Any]) -> str:
    generator = torch.Generator().manual_seed(3)
    batch = {
        "x": torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64),
        "y": torch.arange(SAMPLES),
    }
    given = GivenBatch(batch, SAMPLES, is_recorded=True)
    content = change(batch)
    given.stop()
    return given.finding(content)[0]


def _flipped(batch: Batch) -> Batch:
    """As timm's Mixup does it, in place."""
    flipped = batch["x"].flip(0).mul_(0.3)
    batch["x"].mul_(0.7).add_(flipped)
    return batch


def _permuted_by_numpy(batch: Batch) -> Batch:
    order = torch.from_numpy(np.random.default_rng(0).permutation(SAMPLES))
    return batch | {"x": batch["x"] * 0.5 + batch["x"][order] * 0.5}


def _cut_and_pasted(batch: Batch) -> Batch:
    batch["x"][:, 1:3] = batch["x"].flip(0)[:, 1:3]
    return batch


def _normalised(batch: Batch) -> Batch:
    return batch | {"x": (batch["x"] - batch["x"].mean(0)) / batch["x"].std(0)}


def _with_mean(batch: Batch) -> Batch:
    return batch | {"mean": batch["x"].mean()}


def _labels_rolled(batch: Batch) -> Batch:
    return batch | {"other": batch["y"].roll(1)}


def _with_teacher_in_training_mode(batch: Batch) -> Batch:
    teacher = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    return batch | {"targets": teacher(batch["x"]).detach()}


def _swapped_in_pairs_of_halves(batch: Batch) -> Batch:
    return batch | {"x": batch["x"][[1, 0, 2, 4, 3, 5]]}


def _in_a_queue(batch: Batch) -> Batch:
    queue = torch.zeros(SAMPLES, 4, dtype=torch.float64)
    queue.copy_(batch["x"].flip(0))
    return batch | {"negatives": queue}


def _moved_into_another(batch: Batch) -> Batch:
    moved = torch.zeros(SAMPLES, 4, dtype=torch.float64)
    moved[1:] = batch["x"][:-1]
    moved[0] = batch["x"][-1]
    return batch | {"x": moved}


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (_flipped, "batch['x']"),
        (_permuted_by_numpy, "batch['x']"),
        (_cut_and_pasted, "batch['x']"),
        (_normalised, "batch['x']"),
        (_with_mean, "batch['mean']"),
        (_labels_rolled, "batch['other']"),
        (_with_teacher_in_training_mode, "batch['targets']"),
        (_in_a_queue, "batch['negatives']"),
        (_moved_into_another, "batch['x']"),
        (_swapped_in_pairs_of_halves, "batch['x']"),
    ],
)
def test_what_mixes_samples_is_named(change: Callable[[Batch], Batch], place: str) -> None:
    assert f"makes {place} of several samples" in _mixed(change)


def _as_it_is(batch: Batch) -> Batch:
    return batch


def _scaled(batch: Batch) -> Batch:
    return batch | {"x": batch["x"].float().div_(255).sub(0.5), "y": nn.functional.one_hot(batch["y"], SAMPLES)}


def _with_noise(batch: Batch) -> Batch:
    noisy = batch["x"] + 0.1 * torch.randn_like(batch["x"])
    return batch | {"x": noisy, "mask": torch.rand(SAMPLES, 4) < 0.5, "drop": nn.functional.dropout(batch["x"])}


def _noise_in_place(batch: Batch) -> Batch:
    return batch | {"noise": batch["x"].clone().normal_(), "late": torch.empty(SAMPLES).copy_(batch["y"]).uniform_()}


def _with_teacher(batch: Batch) -> Batch:
    teacher = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double().eval()
    with torch.no_grad():
        return batch | {"targets": teacher(batch["x"]).softmax(-1)}


def _cut_to_the_longest(batch: Batch) -> Batch:
    length = int((batch["y"] < 3).sum())
    return batch | {"x": batch["x"][:, :length]}


def _with_own_statistics(batch: Batch) -> Batch:
    x = batch["x"]
    return batch | {"x": (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True), "views": torch.stack([x, x * 2], 1)}


def _with_samples_of_a_mask(batch: Batch) -> Batch:
    x = batch["x"].clone()
    x[batch["y"] > 2] = 0
    return batch | {"x": x}


def _with_an_average_of_the_script(batch: Batch) -> Batch:
    average = torch.zeros(4, dtype=torch.float64)
    average.lerp_(batch["x"].mean(0), 0.1)  # of no sample
    return batch | {"x": batch["x"] * 2}


def _filled_row_by_row(batch: Batch) -> Batch:
    filled, other = torch.zeros(SAMPLES, 4, dtype=torch.float64), torch.zeros(SAMPLES, 4, dtype=torch.float64)
    whole = filled.view(-1)
    for number, row in enumerate(batch["x"]):
        filled[number, :3] = row[1:]
        filled.T[3, number] = row[0]
    whole.mul_(2)
    other.copy_(filled)
    return batch | {"x": filled + 1, "other": other + whole.view(SAMPLES, 4), "whole": filled}


def _through_packed_sequences(batch: Batch) -> Batch:
    lengths = torch.tensor([4, 4, 3, 3, 2, 1])[batch["y"]]
    packed = nn.utils.rnn.pack_padded_sequence(batch["x"][..., None], lengths, batch_first=True)
    _, (hidden, _) = nn.LSTM(1, 2, batch_first=True).double()(packed)
    return batch | {"hidden": hidden[0].detach()}


def _chosen_by_values(batch: Batch) -> Batch:
    rows = batch["x"][batch["y"] < 4]
    return batch | {"x": torch.cat([rows[:2], rows[2:], batch["x"][4:]])}


def _sparse_for_a_while(batch: Batch) -> Batch:
    return batch | {"x": batch["x"].to_sparse().to_dense()}


@pytest.mark.parametrize(
    "change",
    [
        _as_it_is,
        _sparse_for_a_while,
        _filled_row_by_row,
        _through_packed_sequences,
        _chosen_by_values,
        _scaled,
        _with_noise,
        _noise_in_place,
        _with_teacher,
        _cut_to_the_longest,
        _with_own_statistics,
        _with_samples_of_a_mask,
        _with_an_average_of_the_script,
    ],
)
def test_what_is_made_of_each_sample_alone_is_left_in_peace(change: Callable[[Batch], Batch]) -> None:
    assert not _mixed(change)


def _scaled_in_its_data(batch: Batch) -> Batch:
    batch["x"].data = batch["x"].data * 2
    return batch | {"x": batch["x"] + 1}


def _scaled_by_numpy(batch: Batch) -> Batch:
    values = batch["x"].numpy()
    values *= 2
    return batch | {"x": batch["x"] + 1}


def _scaled_where_numpy_has_it(batch: Batch) -> Batch:
    torch.from_numpy(batch["x"].numpy()).mul_(2)
    return batch | {"x": batch["x"] + 1}


def _in_eight_bits(batch: Batch) -> Batch:
    return batch | {"x": batch["x"].to(torch.float8_e4m3fn), "y": batch["y"].to(torch.uint16)}


def _by_an_operator_of_its_own(batch: Batch) -> Batch:
    return batch | {"x": torch.ops.paceline_tests.once(batch["x"])}


@pytest.mark.parametrize(
    "change",
    [
        _scaled_in_its_data,
        _scaled_by_numpy,
        _scaled_where_numpy_has_it,
        _in_eight_bits,
        _by_an_operator_of_its_own,
    ],
)
def test_what_torch_does_not_see_is_left_in_peace(change: Callable[[Batch], Batch], own_operator: None) -> None:
    assert not _mixed(change)


@pytest.fixture
def own_operator() -> Iterator[None]:
    """An operator that cannot be called twice."""
    calls: list[Tensor] = []

    def once(x: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) > 1:
            raise ValueError("once")
        return x * 2

    library = torch.library.Library("paceline_tests", "FRAGMENT")
    library.define("once(Tensor x) -> Tensor")
    library.impl("once", once, "CompositeExplicitAutograd")
    yield
    library._destroy()


def _in_a_copy(batch: Batch, _of_all: Tensor) -> Batch:
    copied = copy.deepcopy(batch)
    copied["x"].mul_(2)
    return copied


def _in_another_place(batch: Batch, of_all: Tensor) -> Batch:
    batch["x"].set_(of_all.expand(SAMPLES, 4).contiguous()).mul_(2)  # type: ignore[call-overload]
    return batch


def _with_an_average(batch: Batch, of_all: Tensor) -> Batch:
    with torch.inference_mode():
        average = of_all.clone()
        view = average.view_as(batch["x"][0])
        view.mul_(0.9).add_(batch["x"].mean(0))
        return batch | {"average": average, "view": view}


def _with_norms_of_instances(batch: Batch, of_all: Tensor) -> Batch:
    norm = nn.InstanceNorm1d(2, track_running_stats=True).double()
    with torch.inference_mode():
        normalised = norm(batch["x"].view(SAMPLES, 2, 2))
    return batch | {"x": normalised, "mean": norm.running_mean, "variance": norm.running_var}


@pytest.mark.parametrize("change", [_in_a_copy, _in_another_place, _with_an_average, _with_norms_of_instances])
def test_what_the_script_has_made_stays_as_it_is(change: Callable[[Batch, Tensor], Batch]) -> None:
    of_all = torch.linspace(0, 1, 4, dtype=torch.float64)
    made = []

    def changed(batch: Batch) -> Batch:
        made.append(change(batch, of_all))
        made.append(copy.deepcopy(made[0]))
        return made[0]

    assert not _mixed(changed)
    assert all(torch.equal(made[0][name], before) for name, before in made[1].items())


def test_what_is_computed_on_the_way_is_not_held_when_it_is_computed_again() -> None:
    held: list[int] = []

    class Counting(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if func == torch.ops.aten.sin.default:
                alive.add(made)
                held.append(len(alive))
            return made

    alive: Any = weakref.WeakSet()
    batch = {"x": torch.randn(SAMPLES, 4, dtype=torch.float64)}
    given = GivenBatch(batch, SAMPLES, is_recorded=True)
    x = batch["x"].flip(0)
    for _ in range(20):
        x = x.sin()
    given.stop()
    with Counting():
        assert given.finding({"x": x})[0]
    assert max(held) <= 2


def test_a_teacher_that_is_looked_at_stays_as_it_is() -> None:
    teacher = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    once = copy.deepcopy(teacher)
    targets = []

    def taught(batch: Batch) -> Batch:
        targets.append(batch["x"].clone())
        return batch | {"targets": teacher(batch["x"]).detach()}

    state = torch.get_rng_state()
    assert _mixed(taught)
    assert torch.equal(torch.get_rng_state(), state)
    once(targets[0])
    assert all(torch.equal(one, other) for one, other in zip(once.buffers(), teacher.buffers(), strict=True))


def test_a_mode_of_the_scripts_that_goes_on_is_not_disturbed() -> None:
    batch = {"x": torch.randn(SAMPLES, 4, dtype=torch.float64)}
    given = GivenBatch(batch, SAMPLES, is_recorded=True)
    with FlopCounterMode(display=False) as counter:
        content = {"x": batch["x"].flip(0)}
        given.stop()
        assert "batch['x']" in given.finding(content)[0]
        _ = batch["x"] @ batch["x"].T
    assert counter.get_total_flops() == 2 * SAMPLES * SAMPLES * 4
    given.stop()
    before = GivenBatch(batch, SAMPLES, is_recorded=True)  # there is no mode left over, so this one is recorded
    content = {"x": batch["x"].roll(1, 0)}
    before.stop()
    assert "batch['x']" in before.finding(content)[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_functions_are_compiled_all_the_same() -> None:
    compiled: list[int] = []

    def backend(module: Any, _inputs: Any) -> Any:
        compiled.append(1)
        return module.forward

    function = torch.compile(lambda x: x.flip(0), backend=backend)
    _mixed(lambda batch: {"x": function(batch["x"])})
    assert compiled == [1]
