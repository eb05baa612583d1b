"""The simulated GPU as a fixture."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.sim_gpu import build


@pytest.fixture(scope="session")
def simulated_gpu() -> Path:
    """The compiled device, for `run_on_gpus`; skips the test where it cannot be built."""
    obstacle = build.obstacle()
    if obstacle is not None:
        pytest.skip(obstacle)
    return build.build()
