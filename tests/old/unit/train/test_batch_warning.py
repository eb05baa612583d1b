from __future__ import annotations

import math

from paceline.train.batches.batch_warning import batch_warning


def test_warnings_say_what_it_costs() -> None:
    assert batch_warning(400, 100.0, 4) is None
    assert batch_warning(64, math.inf, 4) is None
    wasteful = batch_warning(900, 100.0, 4)
    # 1 / (1 + 9) is left; a batch at the noise scale takes twice the least samples, where this takes ten times.
    assert wasteful is not None
    assert "9.0 times" in wasteful
    assert "90% of what" in wasteful
    assert "20% of the samples" in wasteful
    assert "1.8 times the steps" in wasteful
    assert "25 samples a worker" in wasteful
    assert "leave 4 of 8 workers idle" in str(batch_warning(64, 4.0, 8))
    assert "3 of 8 workers have no sample" in str(batch_warning(5, 100.0, 8))
