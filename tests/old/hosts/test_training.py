"""Training across nodes: the weights of the one-process run, however the workers are spread."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from paceline.spec import Job, Plan, RunRecord
from paceline.spec.plan import RunLimit
from paceline.workflows.run_folder import write_run
from tests.kit.nodes.cluster import Cluster
from tests.kit.workers import run_ranks
from tests.old.hosts.forked import fork_on_nodes
from tests.old.hosts.relay import Trouble, relay_at

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(180)]

MAX_STEPS = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(num_nodes=4, rate_bits_per_s=1e9) as cluster:
        yield cluster


def _job(**values: Any) -> Job:
    return Job.from_mapping({"global_batch_size": 64, "virtual_shards": 8, "model": "lenet", "data": "digits"} | values)


def _alone(job: Job, run_dir: Path) -> RunRecord:
    run_ranks(_train_alone, 1, job, run_dir)
    return RunRecord.load(run_dir / "record.json")


def _train_alone(job: Job, run_dir: Path) -> None:
    from paceline.train.loop import RunOutput, train

    run_dir.mkdir()
    train(job, Plan(), RunOutput(run_dir, None), max_steps=MAX_STEPS)


def _spread(cluster: Cluster, workers: list[int], job: Job, run_dir: Path, **plan: Any) -> RunRecord:
    spread = Plan(world_size=sum(workers), timeout_s=60, **plan)
    program = write_run(job, spread, run_dir, RunLimit(MAX_STEPS), quiet=True)
    fork_on_nodes(cluster, workers, program, timeout_s=90)
    return RunRecord.load(run_dir / "record.json")


@pytest.fixture(scope="module")
def bitwise_alone(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """The run on one worker in bitwise parity."""
    return _alone(_job(parity="bitwise"), tmp_path_factory.mktemp("bitwise") / "alone")


@pytest.mark.parametrize("workers", [[2, 2], [1, 1, 1, 1]], ids=json.dumps)
def test_bitwise_parity_between_nodes(
    cluster: Cluster, workers: list[int], bitwise_alone: RunRecord, tmp_path: Path
) -> None:
    spread = _spread(cluster, workers, _job(parity="bitwise"), tmp_path / "spread", algorithm="tree_exact")
    assert spread.weights_sha256 == bitwise_alone.weights_sha256
    assert spread.accuracy == bitwise_alone.accuracy


def test_packets_that_are_lost_repeated_and_late_change_no_bit(
    cluster: Cluster, bitwise_alone: RunRecord, tmp_path: Path
) -> None:
    with relay_at(cluster, cluster.nodes[1]) as relay:
        relay.behave(Trouble(loss=0.01, duplicates=0.05, late=0.05))
        spread = _spread(cluster, [1, 1], _job(parity="bitwise"), tmp_path / "spread", algorithm="tree_exact")
    assert spread.weights_sha256 == bitwise_alone.weights_sha256


def test_the_algorithm_chosen_at_the_start_keeps_the_result(cluster: Cluster, tmp_path: Path) -> None:
    job = _job(precision="float64")
    _alone(job, tmp_path / "alone")
    record = _spread(cluster, [2, 1], job, tmp_path / "spread")
    assert record.plan.algorithm != "auto"
    assert any("gradients are summed by" in note and "ring" in note for note in record.notes)
    expected = load_file(tmp_path / "alone" / "model.safetensors")
    for name, values in load_file(tmp_path / "spread" / "model.safetensors").items():
        assert abs(values - expected[name]).max() < 1e-9, name


@pytest.mark.parametrize("sync_inside_nodes", [False, True])
def test_asynchronous_servers_between_nodes(cluster: Cluster, sync_inside_nodes: bool, tmp_path: Path) -> None:
    alone = _alone(_job(parity="bitwise"), tmp_path / "alone")
    aggregation = {"method": "parameter_server_async", "staleness": 0, "sync_inside_nodes": sync_inside_nodes}
    spread = _spread(cluster, [2, 2], _job(aggregation=aggregation), tmp_path / "spread", num_servers=2)
    assert spread.weights_sha256 == alone.weights_sha256
    assert spread.accuracy == alone.accuracy


def test_nodes_that_meet_after_every_step_of_plain_sgd_train_synchronously(cluster: Cluster, tmp_path: Path) -> None:
    plain = {"precision": "float64", "optim": {"lr": 0.1, "momentum": 0.0}}
    aggregation = {"method": "local_sgd", "sync_every": 1, "sync_inside_nodes": True}
    _alone(_job(**plain), tmp_path / "alone")
    _spread(cluster, [2, 1], _job(**plain, aggregation=aggregation), tmp_path / "spread", algorithm="hierarchical")
    expected = load_file(tmp_path / "alone" / "model.safetensors")
    for name, values in load_file(tmp_path / "spread" / "model.safetensors").items():
        assert abs(values - expected[name]).max() < 1e-9, name
