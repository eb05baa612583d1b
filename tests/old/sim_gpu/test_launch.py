"""Runs on simulated GPUs through the launcher: forked workers, a worker that dies, a worker that fails, a restart.

Workers of the run that fails load torch as a user's do, those of the others are forked from a process that has.
"""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.old.ranks.command_line import paceline, python

pytestmark = [pytest.mark.sim_gpu, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
SCRIPT = """\
import os, sys
from pathlib import Path
import torch
assert not torch.cuda.is_initialized()
from tests.kit.sim_gpu.torch_cuda import simulate
simulate(Path({library!r}), 2)
import paceline
from paceline import models
from tests.old.ranks.training import images, loss_fn

torch.set_num_threads(1)
job = {{"global_batch_size": 16, "virtual_shards": 4, "epochs": 2, "model": "resnet20"}}
with paceline.init(**job, checkpoint={{"dir": "checkpoints", "every_steps": 3}}) as run:
    assert run.device == torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    model = models.build(run.job.model, num_classes=10, in_channels=3)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    Path("began at").write_text(str(run.steps))
    for batch in run.batches(images(64, (3, 8, 8))):
        if run.steps == 5 and run.rank == 1 and sys.argv[1] != "nothing" and not Path("was here").exists():
            Path("was here").touch()
            if sys.argv[1] == "dies":
                os._exit(3)
            raise ValueError("a bad sample")
        loss = run.step(batch, loss_fn)
    if run.rank == 0:
        Path("end").write_text(run.weights_sha256())
"""


def _launch(
    folder: Path, library: Path, fate: str, *options: str, is_forked: bool = True
) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    (folder / "script.py").write_text(textwrap.dedent(SCRIPT.format(library=str(library))))
    words = ["launch", "-n", "2", *options, "script.py", fate]
    environ = {
        "PACELINE_DEVICE": "cuda",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
    }
    if is_forked:
        return paceline(*words, cwd=folder, timeout_s=280, **environ)
    return python("-m", "paceline", *words, cwd=folder, timeout_s=280, **environ)


def test_a_run_goes_on_after_a_workers_death_as_if_nothing_had_happened(simulated_gpu: Path, tmp_path: Path) -> None:
    calm = _launch(tmp_path / "calm", simulated_gpu, "nothing")
    assert calm.returncode == 0, calm.stderr
    struck = _launch(tmp_path / "struck", simulated_gpu, "dies", "--min-workers", "1")
    assert struck.returncode == 0, struck.stderr
    assert "worker 1 left with exit code 3" in struck.stderr
    # In the middle of the sixth step; a checkpoint of the third was there already.
    assert (tmp_path / "struck" / "began at").read_text() == "5"
    assert (tmp_path / "calm" / "end").read_text() == (tmp_path / "struck" / "end").read_text()


def test_an_error_ends_the_run_with_a_report_and_a_checkpoint(simulated_gpu: Path, tmp_path: Path) -> None:
    ended = _launch(tmp_path / "failed", simulated_gpu, "fails", is_forked=False)
    assert ended.returncode != 0
    assert "Rank 1 of 2" in ended.stderr and "a bad sample" in ended.stderr
    (report,) = (tmp_path / "failed" / "runs").glob("*/failure.json")
    assert "a bad sample" in json.dumps(json.loads(report.read_text()))
    assert (tmp_path / "failed" / "checkpoints" / "step-00000005" / "manifest.json").exists()
