"""Ten scripts as people write them come to the same on 1, 2 and 3 workers, in both parities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.kit.workers import run_ranks
from tests.old.ranks.scripts_of_others import SCRIPTS, Outcome

BITWISE: dict[str, Any] = {"parity": "bitwise"}
NUMERIC: dict[str, Any] = {"precision": "float64"}


def _run_all() -> list[tuple[Outcome, Outcome]]:
    torch.set_num_threads(1)
    return [(script(BITWISE), script(NUMERIC)) for script in SCRIPTS]


@pytest.fixture(scope="module")
def alone() -> list[tuple[Outcome, Outcome]]:
    outcomes: list[tuple[Outcome, Outcome]] = run_ranks(_run_all, 1, timeout_s=250)[0]
    return outcomes


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_number_of_workers_changes_nothing(alone: list[tuple[Outcome, Outcome]], world_size: int) -> None:
    for outcomes in run_ranks(_run_all, world_size, timeout_s=300):
        for script, mine, (bitwise, numeric) in zip(SCRIPTS, alone, outcomes, strict=True):
            name = script.__name__
            expected = mine[0]
            assert bitwise.sha == expected.sha, name
            assert (bitwise.losses, bitwise.metrics) == (expected.losses, expected.metrics), name
            expected = mine[1]
            np.testing.assert_allclose(numeric.losses, expected.losses, rtol=1e-12, err_msg=name)
            assert numeric.metrics == pytest.approx(expected.metrics, rel=1e-12), name
            for key, value in numeric.weights.items():
                wanted = expected.weights[key]
                np.testing.assert_allclose(value, wanted, rtol=1e-12, atol=1e-12, err_msg=f"{name} {key}")
