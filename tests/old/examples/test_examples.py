"""The ladder of examples: every rung runs, and the higher ones come to the same on two workers."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from pathlib import Path

import pytest

import paceline
from paceline.launch.worker import run_program
from tests.kit.workers import run_ranks
from tests.old.ranks import command_line
from tests.old.ranks.command_line import succeeded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FOLDER = Path(__file__).parents[3] / "examples"
EXAMPLES = sorted(path.name for path in FOLDER.glob("*.py"))
# On one worker these are rung 1: there is nobody to share the model with.
AS_RUNG_1 = ("03_sharded.py", "04_pipeline.py", "05_tensor.py", "07_mesh.py")
MAX_STEPS = {name: 40 for name in EXAMPLES if name != "02_bit_for_bit.py"}
"""Of the 115 of an example, except of that which a reader's command is compared with."""


def said_by(name: str, num_workers: int, max_steps: int | None = None) -> str:
    """What the example prints on so many workers, forked from one process instead of each loading torch anew, to its
    end or after some steps."""
    return "".join(run_ranks(_said, num_workers, str(FOLDER / name), max_steps, timeout_s=900.0))


def _said(path: str, max_steps: int | None) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said, pytest.MonkeyPatch.context() as patch:
        patch.setattr(paceline, "init", functools.partial(paceline.init, max_steps=max_steps))
        run_program([path])
    return said.getvalue()


@pytest.fixture(scope="module")
def alone() -> dict[str, str]:
    """What every example prints on one worker."""
    said = {name: said_by(name, 1, MAX_STEPS.get(name)) for name in EXAMPLES if name not in AS_RUNG_1}
    return said | dict.fromkeys(AS_RUNG_1, said["01_many_devices.py"])


def accuracy(output: str) -> float:
    found = re.findall(r"accuracy (0\.\d+)", output)
    assert len(found) == 1, output  # said once, whatever the number of workers
    return float(found[0])


def test_every_rung_runs_and_learns(alone: dict[str, str]) -> None:
    assert alone.keys() == set(EXAMPLES)
    for name, output in alone.items():
        assert accuracy(output) > 0.5, (name, output)


@pytest.mark.parametrize(
    ("name", "num_workers"),
    [
        ("01_many_devices.py", 2),
        ("03_sharded.py", 2),
        ("04_pipeline.py", 2),
        ("05_tensor.py", 2),
        ("06_two_columns.py", 2),
        ("07_mesh.py", 4),
    ],
)
def test_every_strategy_comes_to_the_same(name: str, num_workers: int, alone: dict[str, str]) -> None:
    output = said_by(name, num_workers, MAX_STEPS[name])
    assert f"on {num_workers} workers" in output
    # Up to rounding, which grows from step to step: a few test images of 359 may tip over.
    assert accuracy(output) == pytest.approx(accuracy(alone[name]), abs=0.02)


def test_02_prints_the_same_on_two_workers(alone: dict[str, str], tmp_path: Path) -> None:
    assert re.search(r"weights [0-9a-f]{64}\n$", alone["02_bit_for_bit.py"])
    launch = ("launch", "-n", "2", "--threads", "1", str(FOLDER / "02_bit_for_bit.py"))  # as its reader would
    assert succeeded(command_line.paceline(*launch, cwd=tmp_path)).stdout == alone["02_bit_for_bit.py"]
