"""Where this machine cannot play a cluster, the tests that need one say why and are left out.

A module whose tests compare weights with those of one process names that process in `command_alone(run_dir)`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.spec import RunRecord
from tests.hosts.cluster import Cluster, why_not

TIMEOUT_S = 600.0


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("hosts") and (reason := why_not()):
        pytest.skip(reason)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes with links of 1 Gbit/s."""
    with Cluster(num_nodes=2, rate_bits_per_s=1e9) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def weights_alone(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> str:
    """The fingerprint of the weights that one process of the first node trains."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    variables = {"OMP_NUM_THREADS": "1", "PACELINE_DEVICE": "cpu"}
    training = cluster.nodes[0].exec(request.module.command_alone(run_dir), env=variables)
    assert training.wait(TIMEOUT_S) == 0, training.output
    weights = RunRecord.load(run_dir / "record.json").weights_sha256
    assert weights
    return weights
