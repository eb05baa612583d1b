"""Models that others wrote give the same result on any number of workers and by every strategy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from tests.ranks.harness import run_ranks
from tests.ranks.zoo import COLUMNS, ZOO, Column, Result, largest_difference, train_columns

Table = Mapping[Column, Mapping[str, Result]]

TOLERANCE = 1e-12

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


@pytest.fixture(scope="module")
def table() -> Table:
    """Every model in every column, by one launch for each number of workers; what rank 0 says."""
    found: dict[Column, dict[str, Result]] = {}
    for world_size in sorted({column.world_size for column in COLUMNS}):
        columns = [column for column in COLUMNS if column.world_size == world_size]
        first, *others = run_ranks(train_columns, world_size, columns, timeout_s=1500)
        for column in columns:
            for name in ZOO:
                assert all(other[column][name].sha == first[column][name].sha for other in others), (column, name)
        found |= first
    return found


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("column", [column for column in COLUMNS if column != column.reference], ids=str)
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
