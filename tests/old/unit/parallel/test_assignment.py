"""Virtual shards tile every batch, and their runs tile the shards, for any number of workers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import JobError
from paceline.parallel.assignment import Assignment, check_shards, shard_sizes

BATCHES = st.integers(1, 500)
SHARDS = st.integers(1, 20)


@given(BATCHES, SHARDS)
def test_shards_are_even_and_complete(num_samples: int, num_shards: int) -> None:
    sizes = shard_sizes(num_samples, num_shards)
    assert sum(sizes) == num_samples
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


@given(BATCHES, SHARDS, st.data())
def test_shares_tile_the_batch_in_order(num_samples: int, num_shards: int, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, num_shards))
    shares = [Assignment.of(num_samples, num_shards, rank, world_size) for rank in range(world_size)]
    spans = [share.span for share in shares]
    assert spans[0][0] == 0
    assert spans[-1][1] == num_samples
    assert all(left[1] == right[0] for left, right in itertools.pairwise(spans))
    # Nothing about the shards themselves depends on who holds them.
    assert {share.shard_sizes for share in shares} == {shard_sizes(num_samples, num_shards)}


@given(BATCHES, SHARDS, st.data())
def test_shards_tile_the_share(num_samples: int, num_shards: int, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, num_shards))
    share = Assignment.of(num_samples, num_shards, data.draw(st.integers(0, world_size - 1)), world_size)
    position, weight = 0, 0.0
    for shard in range(*share.own):
        start, stop = share.span_of(shard)
        assert start == position and stop - start == share.shard_sizes[shard]
        position, weight = stop, weight + share.weight(shard)
    assert position == share.span[1] - share.span[0]
    assert weight == pytest.approx(position / num_samples)


def test_more_workers_than_shards_is_refused() -> None:
    with pytest.raises(JobError, match="virtual_shards = 4"):
        check_shards(5, 4)
