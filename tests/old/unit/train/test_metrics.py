"""Where measured values go."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import JobError
from paceline.spec.job import TRACKER_NAMES
from paceline.train.records.metrics import TRACKERS, json_lines, open_sinks


def test_json_lines_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    (sink,) = open_sinks(tmp_path, [], 0, print)
    sink.log(1, {"loss": 0.1 + 0.2})
    path = tmp_path / "metrics.jsonl"
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1, "loss": 0.1 + 0.2}]
    sink.log(2, {"loss": 0.5, "samples_seen": 128})
    sink.close()
    assert json.loads(path.read_text().splitlines()[1]) == {"step": 2, "loss": 0.5, "samples_seen": 128}


def test_tensorboard_gets_the_same_values(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sinks = open_sinks(tmp_path, ["tensorboard"], 0, print)
    assert len(sinks) == 2
    for step in (1, 2):
        for sink in sinks:
            sink.log(step, {"loss": 1.0 / step})
    for sink in sinks:
        sink.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 0.5)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_an_unknown_tracker_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"no tracker 'tensorbord'; it is one of tensorboard, wandb, mlflow"):
        open_sinks(tmp_path, ["tensorbord"], 0, print)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_not_installed_says_how(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = {"tensorboard": "torch.utils.tensorboard"}.get(name, name)
    real_import = builtins.__import__

    def fail(target: str, *arguments: Any, **keywords: Any) -> Any:
        if target == module:
            raise ModuleNotFoundError(f"No module named {target!r}")
        return real_import(target, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(JobError, match=rf"'{name}' is not installed; pip install 'paceline\[{name}\]'"):
        open_sinks(tmp_path, [name], 0, print)


def test_the_command_line_knows_the_trackers() -> None:
    assert set(TRACKERS) == set(TRACKER_NAMES)


def test_a_file_that_cannot_be_begun_is_begun_later(tmp_path: Path) -> None:
    said: list[str] = []
    place = tmp_path / "run"
    place.write_text("a file in the place of the folder")
    sink = json_lines(place, 0, said.append)
    sink.log(1, {"loss": 2.0})
    place.unlink()
    place.mkdir()
    sink.log(2, {"loss": 1.0})
    sink.close()
    lines = (place / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert len(said) == 1 and "cannot be written to" in said[0]
