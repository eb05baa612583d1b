from __future__ import annotations

import pytest

from paceline.report.study import Study, analyse
from tests.old.sample_records import sample_grown_records, sample_job, sample_study_records


@pytest.fixture
def study() -> Study:
    """1, 2 and 4 devices, three seeds, fixed global batch."""
    return analyse(sample_study_records(), grow="none", tolerance=0.01)


@pytest.fixture
def bitwise_study() -> Study:
    """The same with `parity = "bitwise"`: all weights agree."""
    return analyse(sample_study_records(job=sample_job(parity="bitwise")), grow="none", tolerance=0.01)


@pytest.fixture
def grown_study() -> Study:
    """1, 2 and 4 devices, three seeds, fixed batch per device; 4 devices lose more than a point."""
    return analyse(sample_grown_records(), grow="batch", tolerance=0.01)
