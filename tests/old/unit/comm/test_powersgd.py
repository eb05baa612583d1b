"""PowerSGD on one worker: what it sends, its residuals, its state."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.comm.compressor import Compressor
from paceline.comm.powersgd import PowerSGD
from tests.old.unit.comm.buckets import alone, bucket_of, draw, residual, sent, snapshot


def _low_rank(rows: int, columns: int, rank: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return draw(rows, rank, seed=seed, dtype=dtype) @ draw(rank, columns, seed=seed + 1, dtype=dtype)


def _model(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Gradients of all kinds; those of `dense` and `conv` are worth compressing at rank 2."""
    shapes: dict[str, tuple[int, ...]] = {
        "dense": (12, 9),
        "bias": (12,),
        "conv": (8, 3, 3, 3),
        "small": (2, 3),
        "scale": (),
    }
    return {name: draw(*shape, seed=seed + number, dtype=dtype) for number, (name, shape) in enumerate(shapes.items())}


@given(
    rows=st.integers(5, 40),
    columns=st.integers(5, 40),
    rank=st.integers(1, 2),
    true_rank=st.integers(0, 2),
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_exact_where_the_gradient_has_no_higher_rank(
    rows: int, columns: int, rank: int, true_rank: int, seed: int, dtype: torch.dtype
) -> None:
    matrix = _low_rank(rows, columns, min(true_rank, rank), seed, dtype)
    compressor = PowerSGD(rank, seed=0)
    result = sent(compressor, {"w": matrix})["w"]
    assert result.dtype == dtype
    # How well a random basis finds the matrix depends on the draw: far from rounding, but far from wrong too.
    tolerance = (2e-3 if dtype == torch.float32 else 1e-9) * float(matrix.norm())
    assert float((result - matrix).norm()) <= tolerance
    assert float(torch.as_tensor(residual(compressor, "w")).norm()) <= tolerance


def test_vectors_and_small_matrices_are_sent_whole() -> None:
    gradients = _model(seed=0, dtype=torch.float32)
    compressor = PowerSGD(2, seed=0)
    result = sent(compressor, gradients)
    for name in ("bias", "small", "scale"):
        assert torch.equal(result[name], gradients[name])
        assert residual(compressor, name) == 0.0
    for name in ("dense", "conv"):
        assert not torch.allclose(result[name], gradients[name])
        assert torch.linalg.matrix_rank(result[name].reshape(len(result[name]), -1), rtol=1e-4) == 2


@pytest.mark.parametrize("shape", [(4, 4), (1, 50), (0, 3), (3, 0), (2, 0, 4), (5, 3)])
def test_nothing_worth_compressing_is_one_plain_sum(shape: tuple[int, ...]) -> None:
    lengths: list[int] = []
    bucket = bucket_of({"w": torch.ones(shape), "b": torch.ones(3)})
    compressor = PowerSGD(2, seed=0)
    compressor.aggregate(bucket, lambda vector: lengths.append(len(vector)))
    assert lengths == [len(bucket.values)]
    assert bool((bucket.values == 1).all())
    assert not compressor.state_dict()


def test_a_bucket_travels_as_two_vectors() -> None:
    lengths: list[int] = []
    PowerSGD(2, seed=0).aggregate(bucket_of(_model(seed=0)), lambda vector: lengths.append(len(vector)))
    assert lengths == [(12 + 6 + 1) + 2 * (12 + 8), 2 * (9 + 27)]


def test_memory_in_another_order_makes_no_difference() -> None:
    gradients = {"conv": draw(8, 4, 3, 3, seed=5)}
    plain = sent(PowerSGD(1, seed=0), gradients)["conv"]
    last = {"conv": gradients["conv"].to(memory_format=torch.channels_last)}
    compressor = PowerSGD(1, seed=0)
    result = sent(compressor, last)["conv"]
    assert not result.is_contiguous()
    assert torch.equal(result, plain)
    torch.testing.assert_close(result + residual(compressor, "conv"), gradients["conv"])


def test_warm_start_finds_the_best_approximation() -> None:
    """Without residuals, the iteration alone: it converges to the truncated singular value decomposition."""
    left, right = torch.linalg.qr(draw(20, 20, seed=1))[0], torch.linalg.qr(draw(30, 20, seed=2))[0]
    spectrum = 0.6 ** torch.arange(20.0)
    matrix = left * spectrum @ right.T
    best = float(spectrum[2:].norm())
    errors = []
    compressor = PowerSGD(2, seed=0)
    for _ in range(12):
        errors.append(float((sent(compressor, {"w": matrix})["w"] - matrix).norm()))
        state = snapshot(compressor)
        compressor.load_state_dict({key: value for key, value in state.items() if key.startswith("factor/")})
    assert errors[0] > 1.05 * best
    assert errors[-1] < 1.001 * best


@pytest.mark.parametrize("dead", [0.0, 1e-30])
def test_recovers_from_a_gradient_of_nothing(dead: float) -> None:
    compressor = PowerSGD(2, seed=0)
    for _ in range(2):
        result = sent(compressor, {"w": torch.full((9, 11), dead)})["w"]
        torch.testing.assert_close(result, torch.full((9, 11), dead), rtol=1e-3, atol=0.0)
    matrix = _low_rank(9, 11, 2, seed=3)
    torch.testing.assert_close(sent(compressor, {"w": matrix})["w"], matrix, rtol=1e-3, atol=1e-3)


@given(seed=st.integers(0, 10**6), rank=st.integers(1, 3), steps=st.integers(1, 6), rebuilt=st.integers(0, 6))
def test_what_was_sent_and_what_is_owed_is_all_there_was(seed: int, rank: int, steps: int, rebuilt: int) -> None:
    compressor = PowerSGD(rank, seed)
    names = list(_model(0))
    gone = {name: torch.zeros(()).double() for name in names}
    for step in range(steps):
        gradients = _model(seed + 10 * step)
        groups = [names] if step < rebuilt else [names[3:], names[:3][::-1]]
        for group in groups:
            result = sent(compressor, {name: gradients[name] for name in group})
            for name in group:
                gone[name] = gone[name] + gradients[name] - result[name]
    for name in names:
        torch.testing.assert_close(
            gone[name] - residual(compressor, name), torch.zeros_like(gone[name]), rtol=0, atol=1e-9
        )


def test_nothing_depends_on_how_parameters_are_put_into_buckets() -> None:
    together, apart = PowerSGD(2, seed=4), PowerSGD(2, seed=4)
    for step in range(4):
        gradients = _model(step)
        expected = sent(together, gradients)
        for name, gradient in list(gradients.items())[:: -1 if step % 2 else 1]:
            assert torch.equal(sent(apart, {name: gradient})[name], expected[name])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", list(_model(0)))
def test_a_step_that_overflows_leaves_no_trace(name: str, bad: float) -> None:
    compressor, twin = PowerSGD(2, seed=0), PowerSGD(2, seed=0)
    for other in (compressor, twin):
        sent(other, _model(1))
    before = snapshot(compressor)
    gradients = _model(2)
    gradients[name].view(-1)[-1] = bad
    result = sent(compressor, gradients)
    assert all(not bool(torch.isfinite(part).any()) for part in result.values())
    after = compressor.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
    for mine, theirs in zip(sent(compressor, _model(3)).values(), sent(twin, _model(3)).values(), strict=True):
        assert torch.equal(mine, theirs)


def test_an_overflow_of_the_second_sum_alone() -> None:
    def second_overflows(vector: Tensor) -> None:
        calls.append(len(vector))
        if len(calls) == 2:
            vector[0] = math.inf

    calls: list[int] = []
    compressor = PowerSGD(2, seed=0)
    sent(compressor, _model(1))
    before = snapshot(compressor)
    bucket = bucket_of(_model(2))
    compressor.aggregate(bucket, second_overflows)
    assert bool(bucket.values.isnan().all())
    assert all(torch.equal(value, before[key]) for key, value in compressor.state_dict().items())


def test_state_goes_into_a_file_and_back(tmp_path_factory: pytest.TempPathFactory) -> None:
    compressor: Compressor = PowerSGD(2, seed=0)
    for step in range(3):
        sent(compressor, _model(step))
    path = tmp_path_factory.mktemp("state") / "state.pt"
    torch.save(compressor.state_dict(), path)
    resumed = PowerSGD(2, seed=0)
    resumed.load_state_dict(torch.load(path))
    for step in range(3, 5):
        expected = sent(compressor, _model(step))
        for name, part in sent(resumed, _model(step)).items():
            assert torch.equal(part, expected[name])
    # What was loaded is a copy: the two go on without each other.
    first, second = compressor.state_dict(), resumed.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert all(first[key].data_ptr() != second[key].data_ptr() for key in first)


def test_state_of_another_rank_is_no_warm_start_but_still_owed() -> None:
    compressor = PowerSGD(2, seed=0)
    sent(compressor, _model(0))
    other = PowerSGD(1, seed=0)
    other.load_state_dict(compressor.state_dict())
    debt = torch.as_tensor(residual(compressor, "dense")).clone()
    gradients = _model(1)
    result = sent(other, gradients)["dense"]
    torch.testing.assert_close(result + residual(other, "dense"), gradients["dense"] + debt)


def test_starts_differ_by_parameter_and_by_seed() -> None:
    matrix = draw(10, 10, seed=0)
    one = sent(PowerSGD(1, seed=0), {"a": matrix, "b": matrix})
    assert not torch.equal(one["a"], one["b"])
    assert not torch.equal(sent(PowerSGD(1, seed=1), {"a": matrix})["a"], one["a"])
    assert torch.equal(sent(PowerSGD(1, seed=0), {"a": matrix})["a"], one["a"])


def test_an_empty_bucket() -> None:
    bucket = bucket_of({"w": torch.empty(0)})
    PowerSGD(1, seed=0).aggregate(bucket, alone)
    assert not bucket.values.numel()
