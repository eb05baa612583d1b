"""Models that others wrote give the same result on any number of workers and by every strategy.

Every two strategies are tried on some model both, and every strategy on eleven models or more; `python -m
benchmarks.zoo` tries every model with every strategy.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pytest

from tests.kit.workers import run_ranks
from tests.old.ranks.zoo import COLUMNS, TOLERANCE, ZOO, Column, Result, largest_difference, train_columns

Table = Mapping[Column, Mapping[str, Result]]

SPREAD = [column for column in COLUMNS if column != column.reference]
LINE = (0, 1, 3)
"""Its translations modulo 7 are the lines of the Fano plane: any two columns of seven lie on one of them."""

REFUSED = {
    ("wav2vec2", "pp"): "takes a Python value out of a tensor",
    ("packed-lstm", "pp"): "takes or returns a packed sequence",
    ("plain-objects", "pp"): "'blocks.0' returns a Found, in which no tensors are found",
    ("spectral-norm", "pp"): "Forward passes change buffers",
    ("moving-averages", "pp"): "Forward passes change buffers",
    ("vq-vae", "pp"): "Forward passes change buffers",
    ("instance-norm", "pp"): "Forward passes change buffers",
}
"""What the sentence says, by model and strategy."""


def models_of(column: Column) -> list[str]:
    """The models that are trained this way here; by one worker those that are compared with it."""
    if column == column.reference:
        return sorted({name for one in SPREAD if one.reference == column for name in models_of(one)})
    place = SPREAD.index(column)
    on_line = [name for number, name in enumerate(ZOO) if (place - number) % len(SPREAD) in LINE]
    return on_line + [name for name, strategy in REFUSED if strategy == column.strategy and name not in on_line]


@pytest.fixture(scope="module")
def table() -> Table:
    """What rank 0 says of every model in its columns."""
    found: dict[Column, dict[str, Result]] = {}
    for column in COLUMNS:
        names = models_of(column)
        first, *others = run_ranks(train_columns, column.world_size, {column: names}, timeout_s=900)
        for name in names:
            assert all(other[column][name].sha == first[column][name].sha for other in others), (column, name)
        found |= first
    return found


def test_any_two_strategies_meet_on_a_model() -> None:
    assert len(SPREAD) == 7
    for one, other in itertools.combinations(SPREAD, 2):
        assert set(models_of(one)) & set(models_of(other))
    assert min(len(models_of(column)) for column in SPREAD) >= 11


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("column", "name"),
    [pytest.param(column, name, id=f"{column}-{name}") for column in SPREAD for name in models_of(column)],
)
def test_every_column_is_equal_to_one_worker(table: Table, column: Column, name: str) -> None:
    alone, spread = table[column.reference][name], table[column][name]
    if (name, column.strategy) in REFUSED:
        assert REFUSED[name, column.strategy] in spread.refusal
        return
    assert not spread.refusal
    assert len(spread.losses) == 3
    assert np.isfinite(spread.losses).all()
    assert spread.num_changed > 1
    if column.parity == "bitwise":
        assert (spread.sha, spread.losses, spread.metrics) == (alone.sha, alone.losses, alone.metrics)
    else:
        assert largest_difference(alone, spread) < TOLERANCE
