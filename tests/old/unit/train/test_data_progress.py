"""Where a run goes on in its data: by the same order only; in little memory."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from paceline.data.order import EpochOrder, ListedOrder, ShuffledOrder
from paceline.errors import DataError, JobError
from paceline.spec import Job
from paceline.train.batches.data_progress import DataProgress

JOB = Job(global_batch_size=10, virtual_shards=4, epochs=3)


def shuffled(epoch: int) -> EpochOrder:
    return ShuffledOrder(50, 10, JOB.seed, epoch)


def saved(num_batches: int) -> dict[str, Any]:
    """The state after some batches of epoch 1."""
    progress = DataProgress(JOB, 0, 1)
    for epoch, count in ((0, 5), (1, num_batches)):
        numbers = progress.enter(epoch, shuffled, 50)
        for number in numbers[:count]:
            progress.trained_on(progress.batch(number, numbers.stop))
        progress.leave_epoch()
    return progress.state_dict()


def resumed(state: dict[str, Any], **keys: Any) -> DataProgress:
    progress = DataProgress(JOB, 0, 1)
    progress.load_state_dict(state, **keys)
    return progress


def test_goes_on_in_the_middle_of_an_epoch() -> None:
    progress = resumed(saved(2))
    assert progress.epochs() == range(1, 3) and progress.is_over(0) and not progress.is_over(1)
    assert progress.enter(1, shuffled, 50) == range(2, 5)
    assert np.array_equal(progress.batch(2, 5).samples, shuffled(1).batch(2))
    assert progress.steps == 7 and progress.samples_seen == 70


def test_a_checkpoint_of_an_earlier_version() -> None:
    """It has no fingerprint: another order began the epoch."""
    state = saved(2)
    del state["course"]["order"]
    with pytest.raises(DataError, match="from the middle of epoch 1 of an earlier version of Paceline, whose order"):
        resumed(state).enter(1, shuffled, 50)
    between = saved(5)
    del between["course"]["order"]
    assert resumed(between).enter(2, shuffled, 50) == range(5)


def test_another_order_than_when_it_was_saved() -> None:
    def reversed_(epoch: int) -> EpochOrder:
        return ListedOrder.of_size(np.arange(50)[::-1].copy() + 0 * epoch, 10)

    with pytest.raises(DataError, match="The samples of epoch 1 come in another order than when this run was saved"):
        resumed(saved(2)).enter(1, reversed_, 50)
    assert resumed(saved(2), check_order=False).enter(1, reversed_, 50) == range(2, 5)  # as --force says
    assert resumed(saved(5)).enter(2, reversed_, 50) == range(5)  # another epoch, another order
    with pytest.raises(DataError, match="has 51 samples, but 50 when this run was saved"):
        resumed(saved(2)).enter(1, shuffled, 51)


def test_a_stream_after_a_set_with_a_length() -> None:
    with pytest.raises(DataError, match="has no length, but 50 samples when this run was saved"):
        resumed(saved(2)).enter_stream(1, "any")


def test_ten_million_samples_cost_little_memory() -> None:
    """The command `python benchmarks/order_memory.py` visits all of them."""
    size = 10_000_000
    progress = DataProgress(Job(global_batch_size=256), 3, 8)
    tracemalloc.start()
    try:
        numbers = progress.enter(0, lambda epoch: ShuffledOrder(size, 256, 0, epoch), size)
        seen = 0
        for number in (*numbers[:200], *numbers[-200:]):
            seen += sum(map(len, progress.batch(number, numbers.stop).own_shards))
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(numbers) == 39_063 and seen == 399 * 32 + 16
    assert most_bytes < 20e6


def test_a_schedule_of_another_length_is_refused() -> None:
    """A run of 7 steps told the script 7; whole, it has 15 for these samples, and 30 for twice as many."""
    progress = DataProgress(JOB, 0, 1, max_steps=7)
    assert progress.total_steps(50) == 7
    state = progress.state_dict()
    assert resumed(state).total_steps(100) == 30
    with pytest.raises(JobError, match=r"run\.total_steps\(50\) is 15, and was 7 when this run was saved"):
        resumed(state).total_steps(50)
    told_first = DataProgress(JOB, 0, 1)
    told_first.total_steps(50)
    with pytest.raises(JobError, match="is 15, and was 7"):
        told_first.load_state_dict(state)
    again = DataProgress(JOB, 0, 1, max_steps=7)
    again.load_state_dict(state)
    again.end_here()
    assert again.total_steps(50) == 7
    assert resumed(state, check_order=False).total_steps(50) == 15


def test_a_run_that_stops_early_may_go_on() -> None:
    progress = DataProgress(JOB, 0, 1)
    progress.total_steps(50)
    progress.end_here()
    progress.total_steps(50)
    assert resumed(progress.state_dict()).total_steps(50) == 15
    assert resumed(resumed(progress.state_dict()).state_dict()).total_steps(50) == 15


def test_no_order_is_asked_for_after_the_last_epoch() -> None:
    """A sampler whose list follows from `set_epoch` need not know another one."""

    def listed(epoch: int) -> EpochOrder:
        return (shuffled, shuffled, shuffled)[epoch](epoch)

    progress = DataProgress(JOB, 0, 1)
    for epoch in range(3):
        numbers = progress.enter(epoch, listed, 50)
        for number in numbers:
            progress.trained_on(progress.batch(number, numbers.stop))
        progress.leave_epoch()
    assert progress.epochs_done == 3
