"""A script that calls `paceline.init` runs under torchrun as it is: a fault of one worker ends all of them and spoils
nothing that was saved."""

from __future__ import annotations

import pytest

import paceline
from tests.kit.stage import EXCEPTION, SIGKILL, TRAINING, Fault, Stage, ended

FAULT = """
def fault(run):
    if RANK == 1 and run.steps == 3:
        await_mark("checkpoints/step-00000002/manifest.json")
        {does}

train()
"""


@pytest.mark.budget(processor_s=30)
@pytest.mark.parametrize(
    "fault",
    [pytest.param(EXCEPTION, id="an exception", marks=pytest.mark.nightly), pytest.param(SIGKILL, id="SIGKILL")],
)
def test_a_fault_under_torchrun_ends_all_workers_and_spoils_no_checkpoint(stage: Stage, fault: Fault) -> None:
    script = stage.script(TRAINING, FAULT.format(does=fault.does))
    end = ended(stage.start("torch.distributed.run", "--standalone", "--nproc-per-node", "2", script))
    assert end.exit_code == 1
    assert all(word in end.err for word in fault.told), end.err
    assert len(stage.pids()) == 2  # the fixture sees that none is left
    states = {one.step: one.state for one in paceline.checkpoint.verify(stage.folder / "checkpoints")}
    assert states.pop(2) == "good"
    assert set(states.values()) <= {"good", "unfinished"}
