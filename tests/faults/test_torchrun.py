"""A script that calls `paceline.init` runs under torchrun as it is: a fault of one worker ends all of them, is reported
by the workers themselves, beside the checkpoints, and spoils nothing that was saved."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import paceline
from tests.kit.stage import EXCEPTION, SIGKILL, TRAINING, Fault, Stage, ended

FAULT = """
def fault(run):
    if RANK == {rank} and run.steps == 3:
        await_mark("checkpoints/step-00000002/manifest.json")
        {does}

train()
"""


@pytest.mark.budget(processor_s=30)
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(replace(EXCEPTION, causes=("exception",)), id="an exception", marks=pytest.mark.nightly),
        pytest.param(replace(SIGKILL, causes=("peer_lost",)), id="SIGKILL"),
        pytest.param(
            Fault("park()", 1, ("waiting: rank 1", "in fault"), ("hung",)), id="a hang", marks=pytest.mark.nightly
        ),
    ],
)
def test_a_fault_under_torchrun_ends_all_workers_and_spoils_no_checkpoint(stage: Stage, fault: Fault) -> None:
    rank = 0 if fault.causes == ("hung",) else 1  # whose end its peers must not report as another failure
    script = stage.script(TRAINING, FAULT.format(rank=rank, does=fault.does))
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    end = ended(stage.start(*torchrun, script, PACELINE_HANG_TIMEOUT="6"))
    assert end.exit_code == 1
    assert all(word in end.err for word in fault.told), end.err
    report = json.loads((stage.folder / "checkpoints" / "failure.json").read_text())
    assert report["cause"] in fault.causes and (report["ranks"], report["step"]) == ([rank], 3), report
    assert report["sentence"] in end.err
    assert len(stage.pids()) == 2  # the fixture sees that none is left
    states = {one.step: one.state for one in paceline.checkpoint.verify(stage.folder / "checkpoints")}
    assert states.pop(2) == "good"
    assert set(states.values()) <= {"good", "unfinished"}
    if fault.causes == ("peer_lost",):
        assert len(list(stage.folder.glob("paceline-*"))) == 1, "of the killed worker alone"
