"""What a finished run says of itself."""

from __future__ import annotations

import json
import math

from tests.sample_records import sample_record


def test_the_summary_of_a_run_that_diverged_is_still_json() -> None:
    record = sample_record(loss=math.nan, accuracy=None)
    line = json.dumps(record.summary(), allow_nan=False)
    assert json.loads(line)["loss"] is None
    assert json.loads(line)["steps"] == record.steps
