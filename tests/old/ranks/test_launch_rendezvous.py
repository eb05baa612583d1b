"""Jobs that start in the same instant do not meet each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.old.ranks.launching import PATIENCE_S, Stage, open_stage

SIGN_IN = """
from paceline import env

store = Path(env.worker_facts().init_method.removeprefix("file://"))
job = os.environ["PACELINE_RUN_DIR"]
assert not store.exists()  # torch makes it; a leftover would be read as another job's

# Everybody signs in where the store will be, and finds the workers of its own job and nobody else.
(store.parent / f"signed-{RANK}").write_text(job)
tell(f"{Path(job).name}.{RANK}.in")
for name in (f"{letter}.{rank}.in" for letter in "ab" for rank in range(WORLD_SIZE)):
    await_mark(name)
signatures = {path.name: path.read_text() for path in store.parent.glob("signed-*")}
assert signatures == {f"signed-{rank}": job for rank in range(WORLD_SIZE)}, signatures
"""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with open_stage(tmp_path) as stage:
        yield stage


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(20))
def test_two_launchers_in_the_same_instant(stage: Stage, attempt: int) -> None:
    launchers = [stage.launch(SIGN_IN, world_size=2, run_dir=stage.folder / job) for job in "ab"]
    for launcher in launchers:
        assert launcher.wait(PATIENCE_S) == 0, launcher.communicate()
    assert not list(stage.folder.glob("paceline-*"))
