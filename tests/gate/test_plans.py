"""Forecasts of counts without one device, of bitwise sums and of processors that share a node; a limit that is none."""

from __future__ import annotations

import dataclasses

import pytest

import paceline
from paceline.errors import PacelineError
from paceline.spec import Job
from tests.unit.plan.clusters import GIB, cpu_cluster, forecast_of, gpu_cluster, with_nodes

JOB = Job(global_batch_size=64, virtual_shards=8)


def test_a_speedup_is_over_one_device_whatever_counts_are_asked_for() -> None:
    cluster = gpu_cluster()
    speedups = [row.speedup for row in forecast_of(JOB, cluster, [1, 2, 4]).rows]
    assert speedups[0] == 1 < speedups[1]
    assert [row.speedup for row in forecast_of(JOB, cluster, [2, 4]).rows] == speedups[1:]


def test_bitwise_sums_begin_when_all_is_computed() -> None:
    numeric, bitwise = (
        forecast_of(dataclasses.replace(JOB, parity=parity), gpu_cluster(), [2]).rows[0]
        for parity in ("numeric", "bitwise")
    )
    assert numeric.exposed_s < numeric.communication_s
    assert bitwise.exposed_s == pytest.approx(bitwise.communication_s, rel=1e-6)


def test_workers_on_processors_share_the_memory_of_their_node() -> None:
    cluster = cpu_cluster(num_parameters=40_000_000)
    passes = tuple(
        dataclasses.replace(one, peak_memory_bytes=10**9 + 2 * 10**7 * one.micro_batch_size)
        for one in cluster.timings[0].steps
    )
    cluster = dataclasses.replace(cluster, timings=(dataclasses.replace(cluster.timings[0], steps=passes),))
    assert (
        not paceline.plan(JOB, cluster=with_nodes(cluster, memory_bytes=8 * GIB), devices=[2])
        .forecast.rows[0]
        .objection
    )
    with pytest.raises(PacelineError, match="GiB"):
        paceline.plan(JOB, cluster=with_nodes(cluster, memory_bytes=int(1.5 * GIB)), devices=[2])


def test_a_floor_of_efficiency_is_at_most_one() -> None:
    with pytest.raises(PacelineError, match=r"efficiency_floor = 1\.5.* 1"):
        paceline.plan(JOB, cluster=gpu_cluster(), devices=[1], efficiency_floor=1.5)
