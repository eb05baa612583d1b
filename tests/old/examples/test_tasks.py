"""What people fine-tune: every example of a task learns, and comes to the same on two workers."""

from __future__ import annotations

import re

import pytest

from tests.old.examples.test_examples import FOLDER, said_by

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

BEFORE_TRAINING = {
    "text_classifier": 0.69,
    "causal_lm": 3.4,
    "lora": 3.4,
    "image_folder": 0.69,
    "streaming_text": 3.37,
    "gan": 0.63,
}
"""The loss of a model that knows nothing: the logarithm of the number of classes, or of words; of the GAN the distance
of what it draws from a circle."""
NAMES = sorted(path.stem for path in (FOLDER / "tasks").glob("*.py"))


def test_no_example_is_left_out() -> None:
    assert sorted(BEFORE_TRAINING) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_it_learns_and_comes_to_the_same_on_two_workers(name: str) -> None:
    alone, together = (said_by(f"tasks/{name}.py", num_workers) for num_workers in (1, 2))
    assert "on 1 workers" in alone and "on 2 workers" in together
    ((lone_loss, *lone_rest), (loss, *rest)) = (re.findall(r"\d+\.\d+", output) for output in (alone, together))
    assert float(lone_loss) < 0.7 * BEFORE_TRAINING[name]
    assert float(loss) == pytest.approx(float(lone_loss), abs=2e-3)  # up to rounding, which grows from step to step
    assert rest == lone_rest
