"""The parts of the benchmark of checkpoints that need no other worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import CheckpointError
from paceline.measure.checkpoint_bench import LARGEST_LAYER, time_saves, trained_state
from paceline.spec.checkpoint_timing import CheckpointRequest

CPU = torch.device("cpu")


@given(st.integers(1, 3), st.sampled_from([0, 1, LARGEST_LAYER - 1]))
def test_the_state_has_three_numbers_a_parameter(layers: int, more: int) -> None:
    num_parameters = (layers - 1) * LARGEST_LAYER + more + 1
    state = trained_state(num_parameters, torch.device("meta"))
    assert sum(tensor.numel() for tensor in state.values()) == 3 * num_parameters
    assert max(tensor.numel() for tensor in state.values()) <= LARGEST_LAYER


def test_the_first_save_is_counted_apart(tmp_path: Path) -> None:
    timings = time_saves(CheckpointRequest(str(tmp_path / "bench"), 5000, 3), CPU, None)
    for times in (timings.stalls_s, timings.copies_s, timings.completes_s, timings.reads_s):
        assert len(times) == 3
        assert min(times) > 0
    assert all(stall < complete for stall, complete in zip(timings.stalls_s, timings.completes_s, strict=True))
    assert 60_000 <= timings.num_bytes <= 62_000
    assert not list((tmp_path / "bench").glob("step-*"))


def test_a_checkpoint_that_could_not_be_written_is_not_timed(tmp_path: Path) -> None:
    (tmp_path / "place").touch()
    with pytest.raises(CheckpointError, match=r"^The checkpoint of step 0 could not be written to .*place/bench: "):
        time_saves(CheckpointRequest(str(tmp_path / "place" / "bench"), 5000, 1), CPU, None)
