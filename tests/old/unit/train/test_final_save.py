"""What a run leaves at its end is never lost, and its user is told where it is."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from paceline.errors import CheckpointError
from paceline.train.records.metrics import json_lines
from paceline.train.session import final_save
from paceline.train.session.final_save import save_at_the_end


def _write(folder: Path) -> None:
    (folder / "record.json").write_text("{}")


def _gone(tmp_path: Path) -> Path:
    """A run folder that somebody has replaced by a file."""
    (tmp_path / "run").write_text("a file")
    return tmp_path / "run"


def test_a_folder_that_comes_back_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = _gone(tmp_path)
    said: list[str] = []

    def come_back(_seconds: float) -> None:
        run_dir.unlink()
        run_dir.mkdir()

    monkeypatch.setattr("time.sleep", come_back)
    save_at_the_end(_write, run_dir, said.append)
    assert (run_dir / "record.json").exists() and len(said) == 1 and "Not a directory" in said[0]


@pytest.mark.parametrize("has_working_directory", [True, False])
def test_else_another_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_working_directory: bool
) -> None:
    monkeypatch.setattr(final_save, "PATIENCE_S", 0.0)
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    if not has_working_directory:
        here.rmdir()
    with pytest.raises(CheckpointError, match=r"its weights and its record are in .*run-saved-.* instead") as told:
        save_at_the_end(_write, _gone(tmp_path), lambda _line: None)
    (saved,) = (here if has_working_directory else home).iterdir()
    assert str(saved) in str(told.value) and (saved / "record.json").exists()


def test_where_nothing_can_be_written_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(final_save, "PATIENCE_S", 0.0)
    for name in ("HOME", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", None)

    def full(_folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"No space left on device.*neither can any other"):
        save_at_the_end(full, tmp_path / "run", lambda _line: None)
    assert not list(tmp_path.iterdir())


def _descriptor_of(path: Path) -> int:
    """The open file of this process with that path."""
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            if link.readlink() == path:
                return int(link.name)
    raise AssertionError(f"{path} is not open")


def test_training_goes_on_without_its_metrics(tmp_path: Path) -> None:
    said: list[str] = []
    sink = json_lines(tmp_path, 0, said.append)
    file = _descriptor_of(tmp_path / "metrics.jsonl")
    full = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    kept = os.dup(file)
    os.dup2(full.fileno(), file)
    for step in range(3):
        sink.log(step, {"loss": 1.0})
    assert len(said) == 1 and "No space left on device" in said[0]
    os.dup2(kept, file)
    sink.log(3, {"loss": 1.0})
    sink.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
