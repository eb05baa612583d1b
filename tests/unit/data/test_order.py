"""Which samples form which global batch is a pure function of seed, epoch and number: every sample once an epoch, in an
order that is even, and the same on any number of workers and in any version (the digests in `tests/data/order.json`;
`python -m tests.unit.data.test_order` makes them anew)."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from paceline.data import load
from paceline.data.randomness import hash_keys, integers, key, permuted, uniform
from paceline.spec import DataSpec
from tests.kit.oracle import mixed_bits
from tests.kit.workers import in_turn, run_ranks
from tests.unit.data.reading import Numbers, collate, numbers_in, read_batches

GOLDEN = Path(__file__).parents[2] / "data" / "order.json"
SHUFFLED = [
    {"num_samples": 1, "global_batch_size": 1, "seed": 0, "epochs": 2},
    {"num_samples": 60, "global_batch_size": 16, "seed": 0, "epochs": 3},
    {"num_samples": 60, "global_batch_size": 16, "seed": 1, "epochs": 1},
    {"num_samples": 97, "global_batch_size": 10, "seed": 2**40 + 5, "epochs": 2, "drop_last": True},
    {"num_samples": 1797, "global_batch_size": 599, "seed": 7, "epochs": 4},
    {"num_samples": 20_003, "global_batch_size": 10_000, "seed": 3, "epochs": 1},
]
AUGMENTED: dict[str, Any] = {"augment": ("crop", "flip", "cutout"), "crop_padding": 3, "cutout_size": 9}


def shuffled_order(row: dict[str, Any]) -> list[list[int]]:
    size = row["global_batch_size"]
    loader = DataLoader(
        Numbers(row["num_samples"]), size, shuffle=True, drop_last=row.get("drop_last", False), collate_fn=collate
    )
    return read_batches(loader, size, numbers_in, seed=row["seed"], epochs=row["epochs"], collate_fn=None)


def digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def digest_of_images() -> str:
    """Of the augmented images of the first batches of digits."""
    train, _ = load(DataSpec("digits", train_limit=64, **AUGMENTED))
    images = read_batches(
        train, 32, lambda shards: torch.cat([one[0] for one in shards]), seed=5, epochs=2, collate_fn=None
    )
    pixels = torch.cat(images) * 0.3497 + 0.2247
    return digest((pixels * 255).round().to(torch.uint8).flatten().tolist())


def all_digests() -> dict[str, Any]:
    return {
        "shuffled": [{**row, "sha256": digest(shuffled_order(row))} for row in SHUFFLED],
        "augmented digits": digest_of_images(),
    }


@pytest.mark.parametrize("number", range(len(SHUFFLED)))
def test_the_order_of_a_run_is_that_of_every_version(number: int) -> None:
    recorded = json.loads(GOLDEN.read_text())["shuffled"][number]
    assert {**SHUFFLED[number], "sha256": digest(shuffled_order(SHUFFLED[number]))} == recorded


def test_augmented_images_are_those_of_every_version() -> None:
    assert digest_of_images() == json.loads(GOLDEN.read_text())["augmented digits"]


@given(
    num_samples=st.integers(1, 60),
    num_batches=st.integers(1, 5),
    seed=st.integers(0, 2**62),
    epochs=st.integers(1, 3),
    drop_last=st.booleans(),
)
@settings(max_examples=20)
def test_every_sample_comes_once_an_epoch_in_batches_of_one_size(
    num_samples: int, num_batches: int, seed: int, epochs: int, drop_last: bool
) -> None:
    size = -(-num_samples // num_batches)
    loader = DataLoader(Numbers(num_samples), size, shuffle=True, drop_last=drop_last, collate_fn=collate)
    found = read_batches(loader, size, numbers_in, seed=seed, epochs=epochs, collate_fn=None)
    rest = num_samples % size
    sizes = [size] * (num_samples // size) + ([rest] if rest and not drop_last else [])
    assert [len(batch) for batch in found] == sizes * epochs
    for epoch in range(epochs):
        samples = [number for batch in found[epoch * len(sizes) :][: len(sizes)] for number in batch]
        assert len(set(samples)) == sum(sizes)
        assert set(samples) <= set(range(num_samples))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    found = [
        tuple(order) for seed in range(4) for order in read_batches(Numbers(40), 40, numbers_in, seed=seed, epochs=4)
    ]
    assert len(set(found)) == 16


WORLD_CASES: list[tuple[int, int, int, int]] = [(42, 12, 6, 0), (29, 8, 5, 3), (11, 4, 3, 1)]
"""Samples, global batch size, virtual shards, seed."""


def _parts_of_batches(num_samples: int, size: int, virtual_shards: int, seed: int) -> list[list[int]]:
    return read_batches(Numbers(num_samples), size, numbers_in, seed=seed, epochs=2, virtual_shards=virtual_shards)


def test_any_number_of_workers_divides_the_same_global_batches_in_order() -> None:
    (alone,) = run_ranks(in_turn, 1, _parts_of_batches, WORLD_CASES)
    for world_size in (2, 3):
        by_rank = run_ranks(in_turn, world_size, _parts_of_batches, WORLD_CASES)
        for number, whole in enumerate(alone):
            batches = zip(*(parts[number] for parts in by_rank), strict=True)
            assert [[sample for part in batch for sample in part] for batch in batches] == whole


@given(num_samples=st.integers(1, 5000), seed=st.integers(0, 2**62), epoch=st.integers(0, 1000))
def test_a_permutation_has_every_number_once(num_samples: int, seed: int, epoch: int) -> None:
    found = permuted(np.arange(num_samples), num_samples, seed, 1, epoch)
    assert np.array_equal(np.sort(found), np.arange(num_samples))
    places = np.array([0, num_samples // 2, num_samples - 1])
    assert np.array_equal(permuted(places, num_samples, seed, 1, epoch), found[places])  # computed where it is needed


@pytest.mark.parametrize("size", [4095, 4096, 65_537, 1_000_003])
def test_a_large_permutation_has_every_number_once_and_no_pattern(size: int) -> None:
    found = permuted(np.arange(size), size, 3, 1, 0)
    assert np.array_equal(np.sort(found), np.arange(size))
    root = math.isqrt(size)  # where the rows of a Feistel network end
    for lag in (1, 2, root, root + 1):
        assert abs(np.corrcoef(found[:-lag], found[lag:])[0, 1]) < 5 / math.sqrt(size)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_permutations_of_few_samples_come_equally_often(size: int) -> None:
    """Chi-squared over 10 seeds for each permutation: within four deviations of its mean."""
    freedom = math.factorial(size) - 1
    seeds = range(10 * (freedom + 1))
    counts = Counter(tuple(permuted(np.arange(size), size, seed, 1, 0).tolist()) for seed in seeds)
    squares = sum((count - 10) ** 2 for count in counts.values()) + 100 * (freedom + 1 - len(counts))
    assert squares / 10 - freedom < 4 * math.sqrt(2 * freedom)


KEYS = st.tuples(st.integers(0, 2**63), st.integers(0, 30), st.integers(0, 10**6))


@given(KEYS, st.lists(st.integers(0, 2**40), min_size=1, max_size=20), st.integers(1, 1000))
def test_draws_are_hashes_of_their_keys(keys: tuple[int, int, int], indices: list[int], high: int) -> None:
    numbers = np.array(indices, np.int64)
    bits = [mixed_bits(*keys, index) for index in indices]
    assert hash_keys(*keys, numbers).tolist() == bits
    assert [key(*keys, index) for index in indices] == [one >> 1 for one in bits]
    drawn = uniform(*keys, numbers)
    assert drawn.tolist() == [(one >> 11) * 2.0**-53 for one in bits]
    assert integers(*keys, numbers, high).tolist() == [int(one * high) for one in drawn]


def test_draws_are_uniform_and_streams_are_unrelated() -> None:
    size = 100_000
    drawn = [uniform(1, stream, 0, np.arange(size)) for stream in (1, 2)]
    for values in drawn:
        counts = np.bincount((values * 50).astype(int), minlength=50)
        chi_squared = float(((counts - size / 50) ** 2 / (size / 50)).sum())
        assert abs(chi_squared - 49) < 5 * math.sqrt(2 * 49)
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 5 / math.sqrt(size)
    assert abs(np.corrcoef(drawn[0], drawn[1])[0, 1]) < 5 / math.sqrt(size)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(all_digests(), indent=1) + "\n")
