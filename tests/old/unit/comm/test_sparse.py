"""Top-k and random-k on one worker: what they choose, their residuals, their state."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.comm.compressor import Compressor
from paceline.comm.links import Links
from paceline.comm.randomk import RandomK
from paceline.comm.topk import TopK
from tests.old.unit.comm.buckets import alone, bucket_of, draw, residual, sent, snapshot

ALONE = cast(Links, SimpleNamespace(rank=0, ring=(0,)))


def _topk(density: float) -> Compressor:
    return TopK(density, ALONE)


def _randomk(density: float) -> Compressor:
    return RandomK(density, seed=3)


BOTH = pytest.mark.parametrize("build", [_topk, _randomk])
Build = Callable[[float], Compressor]
DENSITIES = st.floats(0.001, 1.0)


def _model(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"a": (5, 4), "b": (7,), "c": (2, 3, 2, 2), "d": ()}
    return {name: draw(*shape, seed=seed + number, dtype=dtype) for number, (name, shape) in enumerate(shapes.items())}


@BOTH
@given(seed=st.integers(0, 10**6), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_a_density_of_one_sends_all(build: Build, seed: int, dtype: torch.dtype) -> None:
    compressor = build(1.0)
    for step in range(2):
        gradients = _model(seed + step, dtype)
        for name, part in sent(compressor, gradients).items():
            assert part.dtype == dtype
            assert torch.equal(part, gradients[name])
            assert not torch.as_tensor(residual(compressor, name)).any()


@BOTH
@given(
    seed=st.integers(0, 10**6),
    density=DENSITIES,
    steps=st.integers(1, 6),
    rebuilt=st.integers(0, 6),
    idle=st.booleans(),
)
def test_what_was_sent_and_what_is_owed_is_all_there_was(
    build: Build, seed: int, density: float, steps: int, rebuilt: int, idle: bool
) -> None:
    """Whatever happens to the buckets, and to the gradients: in the last step there may be none."""
    compressor = build(density)
    names = list(_model(0))
    gone = {name: torch.zeros(()).double() for name in names}
    for step in range(steps):
        gradients = _model(seed + 10 * step)
        if idle and step == steps - 1:
            gradients = {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}
        for group in [names] if step < rebuilt else [names[2:], names[:2][::-1]]:
            result = sent(compressor, {name: gradients[name] for name in group})
            for name in group:
                gone[name] = gone[name] + gradients[name] - result[name]
    for name in names:
        torch.testing.assert_close(
            gone[name] - residual(compressor, name), torch.zeros_like(gone[name]), rtol=0, atol=1e-12
        )


@BOTH
def test_everything_owed_is_sent_in_the_end(build: Build) -> None:
    compressor = build(0.2)
    gradients = _model(1)
    received = sent(compressor, gradients)
    nothing = {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}
    for _ in range(60):
        for name, part in sent(compressor, nothing).items():
            received[name] = received[name] + part
    for name, gradient in gradients.items():
        torch.testing.assert_close(received[name], gradient)
        assert not torch.as_tensor(residual(compressor, name)).any()


@BOTH
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@given(place=st.integers(0, 51), density=st.sampled_from([0.01, 0.1, 1.0]))
def test_a_step_that_overflows_is_seen_and_owes_nothing_new(
    build: Build, bad: float, place: int, density: float
) -> None:
    compressor = build(density)
    sent(compressor, _model(1))
    before = snapshot(compressor)
    bucket = bucket_of(_model(2))
    bucket.values[place] = bad
    compressor.aggregate(bucket, alone)
    assert not bucket.values.isfinite().any()
    for name in _model(0):
        assert torch.equal(torch.as_tensor(residual(compressor, name)), before["owed/" + name])
    after = sent(compressor, _model(3))
    for name, gradient in _model(3).items():
        torch.testing.assert_close(after[name] + residual(compressor, name), gradient + before["owed/" + name])


@BOTH
def test_state_goes_into_a_file_and_back(build: Build, tmp_path_factory: pytest.TempPathFactory) -> None:
    compressor = build(0.1)
    for step in range(3):
        sent(compressor, _model(step))
    path = tmp_path_factory.mktemp("state") / "state.pt"
    torch.save(compressor.state_dict(), path)
    resumed = build(0.1)
    resumed.load_state_dict(torch.load(path))
    for step in range(3, 6):
        expected = sent(compressor, _model(step))
        for name, part in sent(resumed, _model(step)).items():
            assert torch.equal(part, expected[name])
    first, second = compressor.state_dict(), resumed.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@BOTH
def test_memory_in_another_order_is_remembered_in_the_right_place(build: Build) -> None:
    """A step's gradient may come in another memory format than the last one's."""
    compressor = build(0.1)
    plain = draw(4, 3, 2, 2, seed=0)
    last = plain.to(memory_format=torch.channels_last)
    gone = plain - sent(compressor, {"w": plain})["w"]
    gone = gone + plain - sent(compressor, {"w": last})["w"]
    torch.testing.assert_close(residual(compressor, "w"), gone)


@BOTH
def test_an_empty_bucket(build: Build) -> None:
    bucket = bucket_of({"w": torch.empty(0)})
    build(0.5).aggregate(bucket, alone)
    assert not bucket.values.numel()


@given(seed=st.integers(0, 10**6), density=DENSITIES)
def test_topk_sends_the_largest(seed: int, density: float) -> None:
    bucket = bucket_of(_model(seed))
    values = bucket.values.clone()
    lengths: list[int] = []
    TopK(density, ALONE).aggregate(bucket, lambda vector: lengths.append(len(vector)))
    k = math.ceil(density * values.numel())
    assert lengths == [k]
    chosen = bucket.values != 0
    assert int(chosen.sum()) == k
    assert torch.equal(bucket.values[chosen], values[chosen])
    if k < len(values):
        assert float(values[chosen].abs().min()) >= float(values[~chosen].abs().max())


def _choices(compressor: Compressor, num_values: int, name: str = "w") -> Tensor:
    """Which values of a bucket are sent, all of them being one and nothing owed."""
    bucket = bucket_of({name: torch.ones(num_values)})
    compressor.aggregate(bucket, alone)
    state = compressor.state_dict()
    compressor.load_state_dict({key: value for key, value in state.items() if not key.startswith("owed/")})
    return bucket.values.bool()


@given(num_values=st.integers(1, 3000), density=DENSITIES)
def test_randomk_sends_so_many_and_an_alarm(num_values: int, density: float) -> None:
    lengths: list[int] = []
    bucket = bucket_of({"w": torch.ones(num_values)})
    RandomK(density, seed=0).aggregate(bucket, lambda vector: lengths.append(len(vector)))
    k = math.ceil(density * num_values)
    assert lengths == [k + 1]
    assert int(bucket.values.bool().sum()) == k


def test_randomk_gives_every_value_the_same_chance() -> None:
    """3 of 12 in 4,000 draws: each 1,000 times, give or take five standard deviations of 27."""
    compressor = RandomK(0.25, seed=1)
    counts = torch.stack([_choices(compressor, 12) for _ in range(4000)]).sum(0)
    assert bool(((counts - 1000).abs() < 5 * 27.4).all()), counts


def test_randomk_draws_by_seed_step_and_name() -> None:
    first = RandomK(0.1, seed=0)
    draws = [_choices(first, 300) for _ in range(2)]
    again = RandomK(0.1, seed=0)
    assert all(torch.equal(_choices(again, 300), draw) for draw in draws)
    others = [draws[1], _choices(RandomK(0.1, seed=1), 300), _choices(RandomK(0.1, seed=0), 300, name="v")]
    assert not any(torch.equal(other, draws[0]) for other in others)
