"""The commands about checkpoints say what is good, damaged or removed, with their exit codes, and an export takes the
newest whole one."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline
from paceline.errors import CheckpointError
from tests.kit.commands import forked_paceline, succeeded
from tests.resume.training import checkpoints_in, flip_a_bit


def test_an_unfinished_checkpoint_is_not_exported(stopped: Path, tmp_path: Path) -> None:
    before, newest = checkpoints_in(stopped)
    (newest / "manifest.json").unlink()
    assert paceline.checkpoint.export(stopped, tmp_path / "model.safetensors").name == before.name
    with pytest.raises(CheckpointError):
        paceline.checkpoint.export(newest, tmp_path / "other.safetensors")
    assert not (tmp_path / "other.safetensors").exists()


def test_commands_name_what_is_damaged_and_what_is_removed(stopped: Path) -> None:
    before, newest = checkpoints_in(stopped)
    (newest_file,) = newest.glob("worker-00000*")
    good = succeeded(forked_paceline("checkpoint", "verify", "stopped", cwd=stopped.parent))
    assert good.stdout.count("good") == 2
    flip_a_bit(newest_file)
    verified = forked_paceline("checkpoint", "verify", "stopped", cwd=stopped.parent)
    assert verified.returncode == 1
    (line,) = (line for line in verified.stdout.splitlines() if "damaged" in line)
    assert newest.name in line and newest_file.name in line
    listed = succeeded(forked_paceline("checkpoint", "ls", "stopped", cwd=stopped.parent)).stdout
    assert before.name in listed and newest.name in listed
    flip_a_bit(newest_file)  # it is good again
    pruned = succeeded(forked_paceline("checkpoint", "prune", "stopped", "--keep-last", "1", cwd=stopped.parent))
    assert checkpoints_in(stopped) == [newest]
    assert before.name in pruned.stdout
