"""Spreading a job over one node, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.errors import JobError
from paceline.plan import place
from paceline.spec import Cluster, Device, Job, Node
from paceline.spec.cluster import DeviceKind


def node(kind: DeviceKind = "cpu", num_devices: int = 8, num_cores: int = 8) -> Cluster:
    return Cluster((Node("here", num_cores, 2**34, "", tuple(Device(kind, i, "", 2**33) for i in range(num_devices))),))


@given(st.integers(1, 64), st.integers(1, 128), st.integers(1, 64))
def test_cores_are_shared_evenly_and_never_oversubscribed(workers: int, cores: int, shards: int) -> None:
    assume(workers <= shards)
    job = Job(global_batch_size=64, virtual_shards=shards)
    plan = place(job, node(num_cores=cores), workers)
    assert plan.world_size == workers
    assert plan.threads_per_worker >= 1
    assert plan.threads_per_worker == 1 or plan.threads_per_worker * workers <= cores


def test_numeric_and_bitwise() -> None:
    numeric = place(Job(), node(), 2)
    assert (numeric.algorithm, numeric.threads_per_worker, numeric.backend) == ("auto", 4, "gloo")
    assert place(Job(), node(), 2, threads_per_worker=3).threads_per_worker == 3
    # The number of threads would change how sums are split, so bitwise parity has one, whatever was asked for.
    bitwise = place(Job(parity="bitwise"), node(), 2, threads_per_worker=3)
    assert (bitwise.algorithm, bitwise.threads_per_worker) == ("tree_exact", 1)


def test_cpu_workers_may_outnumber_cores_but_gpu_workers_not_gpus() -> None:
    assert place(Job(), node("cpu", 2, num_cores=2), 8).threads_per_worker == 1
    assert place(Job(), node("cuda", 2), 2).backend == "nccl"
    with pytest.raises(JobError, match="3 workers need as many GPUs, but this machine has 2"):
        place(Job(), node("cuda", 2), 3)


@pytest.mark.parametrize(
    ("workers", "words"),
    [(0, "0 workers cannot train"), (9, r"virtual_shards = 8; use at most 8 workers, or --set virtual_shards=9")],
)
def test_numbers_of_workers_that_are_refused(workers: int, words: str) -> None:
    with pytest.raises(JobError, match=words):
        place(Job(virtual_shards=8), node(), workers)


def test_a_micro_batch_holds_a_shard() -> None:
    job = Job(global_batch_size=100, virtual_shards=8)  # shards of 13 and 12
    assert place(job, node(), 2, micro_batch_size=13).micro_batch_size == 13
    with pytest.raises(JobError, match=r"of 12 is smaller than a virtual shard of 13 .*virtual_shards=9") as caught:
        place(job, node(), 2, micro_batch_size=12)
    # What the sentence proposes works.
    assert "\n" not in str(caught.value)
    assert place(job.with_values(virtual_shards=9), node(), 2, micro_batch_size=12).micro_batch_size == 12
