"""Where this machine cannot play a cluster, the tests that need one say why and are left out.

A module whose tests compare weights with those of one process names that process in `command_alone(run_dir)`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.spec import RunRecord
from tests.kit.nodes.cluster import Cluster, why_not
from tests.old.hosts.forked import forked_python
from tests.old.ranks.command_line import clean_environ, succeeded
from tests.old.ranks.forked_commands import run_forked

TIMEOUT_S = 600.0


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("hosts") and (reason := why_not()):
        pytest.skip(reason)


@pytest.fixture(scope="session")
def loaded_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What `--python` may name, so that agents and workers need not load torch."""
    with forked_python(tmp_path_factory.mktemp("python")) as python:
        yield python


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes with links of 1 Gbit/s."""
    with Cluster(num_nodes=2, rate_bits_per_s=1e9) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def weights_alone(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> str:
    """The fingerprint of the weights that one process trains, forked from one that has loaded torch."""
    folder = tmp_path_factory.mktemp("alone")
    _, *program = request.module.command_alone(folder / "run")
    environ = clean_environ(OMP_NUM_THREADS="1")
    succeeded(run_forked(["python", *program], cwd=folder, environ=environ, timeout_s=TIMEOUT_S))
    weights = RunRecord.load(folder / "run" / "record.json").weights_sha256
    assert weights
    return weights
