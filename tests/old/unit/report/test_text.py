from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from paceline.report.study import Study, analyse
from paceline.report.study_table import study_table
from tests.old.sample_records import sample_record, sample_study_records


def piped(study: Study, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(study_table(study))
    return out.getvalue()


def test_piped_table_is_plain_and_complete(study: Study) -> None:
    lines = piped(study, 100).splitlines()
    assert "\x1b" not in "".join(lines)
    assert lines[0].split() == [
        "devices", "time", "speed-up", "efficiency", "samples/s", "accuracy", "spread", "change"
    ]  # fmt: skip
    assert lines[2].split()[0] == "1"
    assert lines[4].split()[:2] == ["*", "4"]
    assert study.recommendation.verdict in lines


def test_a_pipe_of_80_columns_cuts_no_number(study: Study, grown_study: Study) -> None:
    for each in (study, grown_study):
        text = piped(each)
        assert "…" not in text
        assert all(row.accuracy is not None and f"{100 * row.accuracy:.2f} %" in text for row in each.rows)


def test_grown_batches_and_rates_are_shown(grown_study: Study) -> None:
    assert ["*", "2", "128", "0.1"] in [line.split()[:4] for line in piped(grown_study, 110).splitlines()]
    assert grown_study.recommendation.rejected[4] in piped(grown_study, 200)


def test_without_accuracy_its_columns_go() -> None:
    study = analyse([sample_record(1, accuracy=None)], grow="none", tolerance=0.01)
    assert "accuracy" not in piped(study).splitlines()[0]


def test_one_seed_shows_no_spread_and_one_count_no_mark() -> None:
    study = analyse(sample_study_records((1,), (0,)), grow="none", tolerance=0.01)
    text = piped(study, 100)
    assert "97.80 %" in text
    assert "97.80–97.80" not in text  # noqa: RUF001
    assert "*" not in text


def test_same_weights_are_told(bitwise_study: Study) -> None:
    assert "Same weights bit for bit on 1, 2 and 4 devices" in piped(bitwise_study, 200)


def test_forecast_and_measurement_stand_side_by_side() -> None:
    records = sample_study_records(devices=(1, 2), seeds=(0,))
    runs = [replace(run, plan=replace(run.plan, forecast_samples_per_s=0.9 * run.samples_per_s)) for run in records]
    lines = piped(analyse(runs, grow="none", tolerance=0.01), 120).splitlines()
    assert lines[0].split()[5:7] == ["forecast", "error"]
    assert all("\N{MINUS SIGN}10.0 %" in line for line in lines[2:4])
    assert "forecast" not in piped(analyse(records, grow="none", tolerance=0.01), 120)
