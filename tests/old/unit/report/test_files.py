from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

from paceline.errors import PacelineError
from paceline.report.files import write_study
from paceline.report.study import Study, analyse
from tests.old.sample_records import sample_record


def test_a_study_leaves_three_files(study: Study, tmp_path: Path) -> None:
    write_study(study, tmp_path / "new" / "folder")
    names = sorted(path.name for path in (tmp_path / "new" / "folder").iterdir())
    assert names == ["report.html", "scaling.csv", "scaling.json"]


def test_scaling_json_holds_everything(study: Study, tmp_path: Path) -> None:
    write_study(study, tmp_path)
    plain = json.loads((tmp_path / "scaling.json").read_text())
    assert plain["recommended_devices"] == 4
    assert [row["devices"] for row in plain["rows"]] == [1, 2, 4]
    assert plain["job"] == json.loads(json.dumps(study.job.to_mapping()))
    assert plain["environment"]["torch"] == "2.13.0+cpu"
    assert len(plain["runs"]) == 9
    run = plain["runs"][0]
    assert run["weights_sha256"] == study.records[0].weights_sha256
    assert [epoch["epoch"] for epoch in run["epochs"]] == list(range(1, 13))
    assert run["epochs"][-1]["metrics"]["accuracy"] == pytest.approx(run["accuracy"], abs=0.01)


def test_scaling_csv_has_one_line_a_run(study: Study, tmp_path: Path) -> None:
    write_study(study, tmp_path)
    with open(tmp_path / "scaling.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["devices"], line["seed"]) for line in lines] == [
        (str(run.world_size), str(run.job.seed)) for run in study.records
    ]
    assert float(lines[4]["train_s"]) == study.records[4].train_s
    assert [line["recommended"] for line in lines] == ["0"] * 6 + ["1"] * 3


def test_a_run_that_diverged_still_gives_valid_files(tmp_path: Path) -> None:
    records = [sample_record(1), sample_record(2, loss=math.nan, train_loss=math.inf, accuracy=0.1)]
    write_study(analyse(records, grow="none", tolerance=0.01), tmp_path)
    text = (tmp_path / "scaling.json").read_text()
    plain = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert plain["runs"][1]["loss"] is None
    assert "nan" not in (tmp_path / "scaling.csv").read_text()


def test_an_output_folder_that_is_a_file_is_a_sentence(study: Study, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(PacelineError, match=r"The report cannot be written into .*; name another folder"):
        write_study(study, tmp_path / "taken")
