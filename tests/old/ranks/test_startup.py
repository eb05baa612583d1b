"""Nothing that a run does not need is loaded before its first step: it would be waited for at every start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.old.ranks.command_line import python, succeeded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

COMPILER = ["sympy", "torch._dynamo", "torch.fx.experimental.symbolic_shapes", "torch.distributed.tensor"]
"""What torch itself loads where an optimizer is made, and not before."""
OTHERS = ["torch.distributed.checkpoint", "torch.distributed.elastic", "fsspec", "pandas", "scipy"]
LAUNCHER = ["torch", "numpy", "jinja2", "plotly", "pandas", "scipy"]

MODULE = """
import json, os, sys
from pathlib import Path

def note(moment):
    loaded = [name for name in json.loads(os.environ["LOOK_FOR"]) if name in sys.modules]
    Path(f"{moment}.{os.environ['RANK']}.json").write_text(json.dumps(loaded))
"""

SCRIPT = """
from looking import note
import paceline, torch
from torch.nn import functional as F

with paceline.init(global_batch_size=8, epochs=1, virtual_shards=2, max_steps=1) as run:
    model, data = torch.nn.Linear(4, 2), [(torch.ones(4), 1)] * 16
    note("ready")
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for inputs, labels in run.batches(data):
        run.step((inputs, labels), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
        note("stepped")
"""

LAUNCH = """
import json, sys, paceline
paceline.launch("script.py", workers=int(sys.argv[1]), out="run")
print(json.dumps([name for name in json.loads(sys.argv[2]) if name in sys.modules]))
"""

CALLBACK = """
import paceline
from looking import note

class Look(paceline.Callback):
    def step_made(self, training, loss):
        note("stepped")
"""

TRAIN = """
import json, sys, paceline
job = paceline.Job(model="lenet", global_batch_size=16, virtual_shards=2, epochs=1)
job = job.with_values(data={"name": "digits"})
paceline.train(job, workers=2, max_steps=1, callbacks=["callback:Look"], out="run")
print(json.dumps([name for name in json.loads(sys.argv[1]) if name in sys.modules]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "looking.py").write_text(MODULE)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "callback.py").write_text(CALLBACK)
    return tmp_path


def run(folder: Path, program: str, *arguments: str) -> list[str]:
    """The modules of `LAUNCHER` that a program which starts workers has loaded in the end."""
    result = python("-c", program, *arguments, json.dumps(LAUNCHER), cwd=folder, LOOK_FOR=json.dumps(COMPILER + OTHERS))
    loaded: list[str] = json.loads(succeeded(result).stdout.splitlines()[-1])
    return loaded


def loaded_in(folder: Path, moment: str) -> list[list[str]]:
    """The modules looked for that each worker had loaded by then."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob(f"{moment}.*.json"))]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_of_a_script_load_little_until_torch_makes_an_optimizer(folder: Path, workers: int) -> None:
    assert run(folder, LAUNCH, str(workers)) == []
    assert loaded_in(folder, "ready") == [[]] * workers
    assert loaded_in(folder, "stepped") == [COMPILER] * workers  # as torch does without Paceline


def test_forked_workers_load_only_what_an_optimizer_needs(folder: Path) -> None:
    assert run(folder, TRAIN) == []
    assert loaded_in(folder, "stepped") == [COMPILER] * 2
