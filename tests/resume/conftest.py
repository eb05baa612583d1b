from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.kit.workers import run_ranks
from tests.resume.training import TIMEOUT_S, Undisturbed, samples_seen, train


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("undisturbed")
    (outcome,) = run_ranks(train, 1, folder, timeout_s=TIMEOUT_S)
    return Undisturbed(outcome, samples_seen(folder))


@pytest.fixture(scope="session")
def stopped_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two workers that ended after 7 steps, with two checkpoints."""
    folder = tmp_path_factory.mktemp("stopped")
    run_ranks(partial(train, max_steps=7), 2, folder, timeout_s=TIMEOUT_S)
    return folder


@pytest.fixture
def stopped(stopped_once: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(stopped_once, tmp_path / "stopped"))
