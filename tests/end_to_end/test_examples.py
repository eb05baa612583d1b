"""The examples run as their first lines say, learn, and come to the same on several workers as each does on one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kit.commands import paceline, python, succeeded
from tests.kit.markdown import ROOT

pytestmark = [pytest.mark.timeout(1800), pytest.mark.budget(processor_s=90)]

FOLDER = ROOT / "examples"
nightly = pytest.mark.nightly
LADDER = [
    pytest.param("01_many_devices.py", 2, marks=nightly),
    pytest.param("02_bit_for_bit.py", 3),
    pytest.param("03_sharded.py", 2, marks=nightly),
    pytest.param("04_pipeline.py", 2, marks=nightly),
    pytest.param("05_tensor.py", 2, marks=nightly),
    pytest.param("06_mesh.py", 4, marks=nightly),
]
"""Every rung but the first, which knows nothing of workers, and the workers that its first lines name."""
LOSS_BEFORE = {
    "text_classifier": 0.69,
    "causal_lm": 3.4,
    "lora": 3.4,
    "image_folder": 0.69,
    "streaming_text": 3.37,
    "gan": 0.63,
}
"""The loss of a model that knows nothing: the logarithm of the number of classes, or of words; of the GAN the distance
of what it draws from a circle."""


def said_by(name: str, workers: int, folder: Path) -> str:
    """What an example prints by `python` or, on several workers, by `paceline launch`."""
    environ = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if workers == 1:
        return succeeded(python(str(FOLDER / name), cwd=folder, timeout_s=900, **environ)).stdout
    command = ("launch", "-n", str(workers), "--threads", "1", str(FOLDER / name))
    return succeeded(paceline(*command, cwd=folder, timeout_s=900, **environ)).stdout


def accuracy(output: str) -> float:
    found = re.findall(r"accuracy (0\.\d{4})", output)
    assert len(found) == 1, output  # said once, whatever the number of workers
    return float(found[0])


def test_no_example_is_left_out() -> None:
    ladder = {str(row.values[0]) for row in LADDER}
    assert {path.name for path in FOLDER.glob("*.py")} == ladder | {"00_one_device.py"}
    assert {path.stem for path in (FOLDER / "tasks").glob("*.py")} == set(LOSS_BEFORE)


@pytest.mark.nightly
def test_plain_torch_learns(tmp_path: Path) -> None:
    assert accuracy(said_by("00_one_device.py", 1, tmp_path)) > 0.9


@pytest.mark.parametrize(("name", "workers"), LADDER)
def test_a_rung_learns_and_comes_to_the_same_on_several_workers(name: str, workers: int, tmp_path: Path) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert f"paceline launch -n {workers} examples/{name}" in text
    alone, together = (said_by(name, count, tmp_path) for count in (1, workers))
    assert accuracy(alone) > 0.9
    if 'parity="bitwise"' in text:
        assert re.search(r"weights [0-9a-f]{64}$", alone, re.MULTILINE) and together == alone
    else:
        assert "on 1 workers" in alone and f"on {workers} workers" in together
        # Rounding grows from step to step: two of the 359 test images may tip over.
        assert accuracy(together) == pytest.approx(accuracy(alone), abs=2.5 / 359)


@pytest.mark.nightly
@pytest.mark.parametrize("name", LOSS_BEFORE)
def test_a_task_learns_and_comes_to_the_same_on_two_workers(name: str, tmp_path: Path) -> None:
    alone, together = (said_by(f"tasks/{name}.py", count, tmp_path) for count in (1, 2))
    assert "on 1 workers" in alone and "on 2 workers" in together
    (lone_loss, *lone_rest), (loss, *rest) = (re.findall(r"\d+\.\d+", output) for output in (alone, together))
    assert float(lone_loss) < 0.7 * LOSS_BEFORE[name]
    assert float(loss) == pytest.approx(float(lone_loss), abs=2e-3)  # rounding grows from step to step
    assert rest == lone_rest
