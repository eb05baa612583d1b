"""The ladder of examples: every rung runs, and the higher ones come to the same on two workers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.ranks.command_line import paceline, python, succeeded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What every example prints on one worker."""
    folder = tmp_path_factory.mktemp("examples")
    return {path.name: succeeded(python(str(path), cwd=folder, OMP_NUM_THREADS="1")).stdout for path in EXAMPLES}


def launched(name: str, folder: Path) -> str:
    """What the example prints on two workers, without the marks of the launcher."""
    (path,) = (path for path in EXAMPLES if path.name == name)
    return succeeded(paceline("launch", "-n", "2", "--threads", "1", str(path), cwd=folder)).stdout


def accuracy(output: str) -> float:
    found = re.findall(r"accuracy (0\.\d+)", output)
    assert len(found) == 1, output  # said once, whatever the number of workers
    return float(found[0])


def test_every_rung_runs_and_learns(alone: dict[str, str]) -> None:
    assert len(alone) >= 3
    for name, output in alone.items():
        assert accuracy(output) > 0.5, (name, output)


def test_01_on_two_workers(alone: dict[str, str], tmp_path: Path) -> None:
    output = launched("01_many_devices.py", tmp_path)
    assert "on 2 workers" in output
    # Up to rounding: a test image or three of 359 may tip over.
    assert accuracy(output) == pytest.approx(accuracy(alone["01_many_devices.py"]), abs=0.01)


def test_02_prints_the_same_on_two_workers(alone: dict[str, str], tmp_path: Path) -> None:
    assert re.search(r"weights [0-9a-f]{64}\n$", alone["02_bit_for_bit.py"])
    assert launched("02_bit_for_bit.py", tmp_path) == alone["02_bit_for_bit.py"]
