"""The order of samples: a permutation that is never stored, for every size; batches of listed samples."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from paceline.data.order import EpochOrder, ListedOrder, ShuffledOrder
from paceline.data.permutation import permuted


def everything(order: EpochOrder) -> list[int]:
    return [int(sample) for number in range(order.num_batches) for sample in order.batch(number)]


@pytest.mark.parametrize("sizes", [range(1, 300), [4095, 4096, 4097, 65_537, 99_991, 1_000_003]])
def test_is_a_bijection_of_any_size(sizes: list[int]) -> None:
    for size in sizes:
        assert np.array_equal(np.sort(permuted(np.arange(size), size, 3, 1, 0)), np.arange(size)), size


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7])
def test_all_permutations_come_equally_often(size: int) -> None:
    num_permutations = math.factorial(size)
    per_permutation = 10 if size < 7 else 2
    seeds = range(per_permutation * num_permutations)
    counts = Counter(tuple(permuted(np.arange(size), size, seed, 1, 0).tolist()) for seed in seeds)
    wrong = sum((count - per_permutation) ** 2 for count in counts.values())
    wrong += (num_permutations - len(counts)) * per_permutation**2  # those that never came
    freedom = num_permutations - 1
    # Chi-squared has this mean and deviation; a tenth of a mean away, or four deviations, no shuffle would notice.
    assert wrong / per_permutation - freedom < max(4 * math.sqrt(2 * freedom), 0.1 * freedom)


def test_positions_of_a_large_set_are_uniform_and_unrelated() -> None:
    size, num_bins = 10_000_000, 50
    order = ShuffledOrder(size, 100_000, 5, 2)
    samples = order.batch(17)
    counts = np.bincount(samples * num_bins // size, minlength=num_bins)
    chi_squared = float(((counts - 2000) ** 2 / 2000).sum())
    assert abs(chi_squared - (num_bins - 1)) < 5 * math.sqrt(2 * (num_bins - 1))
    for lag in (1, 2, 64, 3162, 3163):  # the root of the size is where a Feistel network's rows end
        assert abs(np.corrcoef(samples[:-lag], samples[lag:])[0, 1]) < 0.02


def test_epochs_and_seeds_differ_and_calls_do_not() -> None:
    orders = {tuple(everything(ShuffledOrder(100, 7, seed, epoch))) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    digests = {ShuffledOrder(100, 7, seed, epoch).digest() for seed in range(5) for epoch in range(5)}
    assert len(digests) == 25
    assert everything(ShuffledOrder(100, 7, 1, 1)) == everything(ShuffledOrder(100, 7, 1, 1))


def test_batches_in_any_sequence_are_the_same() -> None:
    size, batch_size = 50_000, 300
    order = ShuffledOrder(size, batch_size, 1, 0)
    whole = permuted(np.arange(size), size, 1, 1, 0)
    for number in (166, 0, 54, 55, 54, 166, 1):  # across the blocks it computes at once
        assert np.array_equal(order.batch(number), whole[number * batch_size : (number + 1) * batch_size])
    assert len(order.batch(166)) == size - 166 * batch_size and order.num_batches == 167


@pytest.mark.parametrize("drop_last", [False, True])
def test_drop_last(drop_last: bool) -> None:
    shuffled = ShuffledOrder(23, 5, 0, 0, drop_last=drop_last)
    listed = ListedOrder.of_size(np.arange(23), 5, drop_last=drop_last)
    for order in (shuffled, listed):
        assert [len(order.batch(number)) for number in range(order.num_batches)] == [5] * 4 + [3] * (not drop_last)
        assert order.num_samples == 23 - 3 * drop_last and len(set(everything(order))) == order.num_samples


def test_batches_of_several_sizes() -> None:
    order = ListedOrder(np.array([4, 4, 1, 0, 2, 3]), np.array([2, 3, 6]))
    assert [order.batch(number).tolist() for number in range(3)] == [[4, 4], [1], [0, 2, 3]]
    assert order.digest() != ListedOrder(np.array([4, 4, 1, 0, 2, 3]), np.array([2, 4, 6])).digest()
