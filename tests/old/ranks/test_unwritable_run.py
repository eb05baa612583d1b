"""The run folder is replaced by a file while workers train."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch

from paceline.spec import RunRecord
from tests.old.ranks.command_line import TRACEBACK, paceline

DATA = """
import contextlib
from pathlib import Path
import torch
from paceline.train.session import final_save

final_save.PATIENCE_S = 0.5

class Samples(torch.utils.data.Dataset):
    def __init__(self, size):
        self.size = size
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        if self.size == 97 and not Path("away").exists() and Path("run/metrics.jsonl").exists():
            with contextlib.suppress(OSError):  # the other worker has done it
                Path("run").rename("away")
                Path("run").write_text("a file")
        if self.size == 97 and BREAKS and Path("away").exists():
            raise ValueError("the true cause")
        return torch.full((1, 8, 8), index / 64.0), index % 10

def build():
    return Samples(97), Samples(10)
"""
JOB = """
name = "gone"
epochs = 2
global_batch_size = 16
virtual_shards = 4
model = {name = "mlp", options = {hidden = 8, num_classes = 10, in_channels = 1, image_size = 8}}
data = "samples:build"
"""


def _train(folder: Path, breaks: bool) -> str:
    (folder / "samples.py").write_text(DATA.replace("BREAKS", str(breaks)))
    (folder / "job.toml").write_text(JOB)
    result = paceline("train", "job.toml", "-n", "2", "--out", "run", cwd=folder, PYTHONPATH=str(folder))
    assert result.returncode != 0
    return result.stderr


def test_the_weights_and_the_record_are_in_a_place_that_is_named(tmp_path: Path) -> None:
    said = _train(tmp_path, breaks=False)
    (saved,) = tmp_path.glob("run-saved-*")
    assert f"are in {saved} instead" in said and TRACEBACK not in said, said
    assert RunRecord.load(saved / "record.json").steps == 14
    assert safetensors.torch.load_file(saved / "model.safetensors")


def test_the_launcher_shows_the_true_cause(tmp_path: Path) -> None:
    said = _train(tmp_path, breaks=True)
    (saved,) = tmp_path.glob("run-saved-*")
    assert "the true cause" in said.splitlines()[-2] and f"The report: {saved}/failure.txt" in said, said
    assert "the true cause" in (saved / "failure.json").read_text()
