"""`paceline train JOB` tells a fault of a worker as `paceline launch` does, and a mistake in the user's data as one
sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.kit.commands import TRACEBACK
from tests.kit.stage import EXCEPTION, SIGKILL, Stage, ended, is_one_sentence

JOB = """
global_batch_size = 8
virtual_shards = 4
epochs = 2
data = "samples:build"
model = { name = "mlp", options = { hidden = 4 } }
"""

SAMPLES = """
import torch
from paceline.errors import DataError

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        if RANK == 1 and index < 8:
            {does}
        return torch.ones(1, 4, 4), index % 2

def build(split="train"):
    return Samples()
"""


FAULTS = {"an exception": replace(EXCEPTION, causes=("exception",)), "SIGKILL": SIGKILL}
MISTAKE = "raise DataError('train.bin is cut short: download it again.')"
"""Paceline's own errors are for mistakes of the user."""


def start(stage: Stage, does: str) -> None:
    (stage.folder / "job.toml").write_text(JOB)
    stage.script(SAMPLES.format(does=does), name="samples.py")


@pytest.mark.budget(processor_s=10)
@pytest.mark.parametrize("name", [pytest.param("an exception", marks=pytest.mark.nightly), "SIGKILL"])
def test_a_fault_while_a_job_reads_its_data_is_told_with_its_rank(stage: Stage, name: str) -> None:
    fault = FAULTS[name]
    start(stage, fault.does)
    end = ended(stage.start("paceline", "train", "job.toml", "-n", "2", "--out", "run"))
    report = stage.report()
    assert end.exit_code == fault.exit_code, end
    assert report["cause"] in fault.causes and report["ranks"] == [1], report
    assert "Rank 1 of 2" in end.err and all(word in end.err for word in fault.told), end.err
    assert not (stage.folder / "run" / "record.json").exists()


@pytest.mark.budget(processor_s=10)
def test_a_mistake_in_a_jobs_data_is_one_sentence(stage: Stage) -> None:
    start(stage, MISTAKE)
    end = ended(stage.start("paceline", "train", "job.toml", "-n", "2", "--out", "run"))
    assert end.exit_code == 2, end
    sentence = end.err.removeprefix("job on 2 workers\n")  # progress
    assert is_one_sentence(sentence), end.err
    assert "samples.py, line " in sentence and "train.bin is cut short" in sentence
    assert TRACEBACK not in end.out
    assert stage.report()["is_user_error"]  # so that `watch` knows
