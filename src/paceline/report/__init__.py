"""Run records in, a scaling study out: tables, files and one HTML page. Never loads torch."""

from __future__ import annotations

from paceline.report.files import load_records, write_study
from paceline.report.study import Recommendation, Study, StudyRow, analyse, detect_grow
from paceline.report.study_table import study_table

__all__ = [
    "Recommendation",
    "Study",
    "StudyRow",
    "analyse",
    "detect_grow",
    "load_records",
    "study_table",
    "write_study",
]
