"""A batch whose shards were collated one by one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.sharded_batch import ShardedBatch


def _of_a_run(function: Callable[[Any], Any], shards: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(function(shard) + 1 for shard in shards)


def test_map_applies_a_function_as_the_run_says() -> None:
    batch = ShardedBatch((torch.zeros(2), torch.zeros(1)), (2, 1), _of_a_run)
    mapped = batch.map(lambda shard: shard + 2).map(lambda shard: shard * 2)
    assert mapped.sizes == (2, 1) and [shard.tolist() for shard in mapped.shards] == [[7, 7], [7]]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda batch: pickle.loads(pickle.dumps(batch))])
def test_a_copy_is_of_no_run(copied: Callable[[ShardedBatch], ShardedBatch]) -> None:
    """What a run applies functions by holds torch's generators, which cannot be copied."""
    batch = copied(ShardedBatch((torch.zeros(2),), (2,), _of_a_run))
    assert batch.map(lambda shard: shard + 2).shards[0].tolist() == [2, 2]
