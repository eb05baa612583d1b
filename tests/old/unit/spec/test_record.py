"""What a finished run says of itself."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from paceline.errors import PacelineError
from paceline.spec.record import RunRecord
from tests.old.sample_records import sample_record, sample_study_records


def test_the_summary_of_a_run_that_diverged_is_still_json() -> None:
    record = sample_record(loss=math.nan, accuracy=None)
    line = json.dumps(record.summary(), allow_nan=False)
    assert json.loads(line)["loss"] is None
    assert json.loads(line)["steps"] == record.steps


def test_records_come_back_as_they_were_saved(tmp_path: Path) -> None:
    records = sample_study_records((1, 2), (0,))
    folders = [tmp_path / f"run-{record.world_size}" for record in records]
    for folder, record in zip(folders, records, strict=True):
        folder.mkdir()
        record.save(folder / "record.json")
    assert [RunRecord.load(folder / "record.json") for folder in folders] == records


def test_a_folder_without_a_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match=r"There is no run record '.*nowhere.*record\.json'"):
        RunRecord.load(tmp_path / "nowhere" / "record.json")


@pytest.mark.parametrize("content", [b'{"job": ', b"\xff\xfe", b"[]", b'{"surprise": 1}', b"{}"])
def test_a_damaged_record_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "record.json").write_bytes(content)
    with pytest.raises(PacelineError, match=r"The run record '.*record\.json' (is damaged|cannot be read: no text)"):
        RunRecord.load(tmp_path / "record.json")
