"""The end of a run before its epochs are over."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.env import WorkerFacts
from paceline.spec import Job
from paceline.train.batches.data_progress import DataProgress
from paceline.train.process.process_group import World
from paceline.train.session.stopping import Stopping


@dataclass
class Clock:
    now_s: float

    def __call__(self) -> float:
        return self.now_s


ALONE = World(WorkerFacts(), torch.device("cpu"), None)


def test_a_run_ends_for_the_first_reason_and_only_once_workers_agree() -> None:
    progress = DataProgress(Job(), 0, 1)
    progress.steps = 7
    stopping = Stopping(ALONE, progress, begun_at=0.0)
    assert (stopping.is_wanted(), stopping.is_over) == (False, False)
    stopping.agree()
    assert not stopping.is_over
    stopping.ask("the first")
    stopping.ask("the second")
    assert (stopping.is_wanted(), stopping.is_over) == (True, False)
    stopping.agree()
    after = (stopping.reason, stopping.is_out_of_time, stopping.is_wanted(), stopping.is_over, progress.steps_left)
    assert after == ("the first", False, False, True, 0)


def test_time_is_counted_from_the_launch_by_rank_0() -> None:
    for rank in (0, 1):
        clock = Clock(1089.0)
        world = World(WorkerFacts(rank, 2), torch.device("cpu"), None)
        stopping = Stopping(world, DataProgress(Job(), 0, 1), 1000.0, max_minutes=1.5, clock=clock)
        assert not stopping.is_wanted()
        stopping.agree()
        clock.now_s = 1090.0
        assert stopping.is_wanted() == (rank == 0)
        stopping.agree()
        assert stopping.is_out_of_time == (rank == 0)
        if rank == 0:
            assert stopping.reason == "max_minutes = 1.5 are over"
