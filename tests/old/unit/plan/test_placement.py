"""Spreading a job over nodes and their devices, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.errors import JobError
from paceline.plan import place
from paceline.plan.pick import pick
from paceline.plan.placement import spread
from paceline.spec import Cluster, Device, Job, Link, Node, NodePlacement
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
    [(0, "0 workers cannot train"), (9, r"virtual_shards = 8; use at most 8 workers, or virtual_shards = 9")],
)
def test_numbers_of_workers_that_are_refused(workers: int, words: str) -> None:
    with pytest.raises(JobError, match=words):
        place(Job(virtual_shards=8), node(), workers)


def cluster_of(
    *num_devices: int, kind: DeviceKind = "cpu", num_cores: int = 8, busy: frozenset[tuple[int, int]] = frozenset()
) -> Cluster:
    """Remote nodes n0, n1 …; `busy` are pairs of node and device. Each GPU has two cores of its own."""
    return Cluster(
        tuple(
            Node(
                f"n{number}",
                num_cores,
                2**34,
                "",
                tuple(
                    Device(kind, i, "", 2**33, cpus=(2 * i, 2 * i + 1), busy="in use" if (number, i) in busy else "")
                    for i in range(count)
                ),
                is_remote=True,
            )
            for number, count in enumerate(num_devices)
        )
    )


sizes = st.lists(st.integers(1, 8), min_size=1, max_size=5)


@given(sizes, st.integers(1, 40), st.integers(1, 64))
def test_every_worker_has_a_place_on_as_few_nodes_as_hold_them(
    num_devices: list[int], num_workers: int, num_cores: int
) -> None:
    plan = spread(cluster_of(*num_devices, num_cores=num_cores), num_workers)
    counts = [share.num_workers for share in plan.nodes]
    assert sum(counts) == plan.world_size == num_workers
    assert min(counts) >= 1
    assert [share.hostname for share in plan.nodes] == [f"n{number}" for number in range(len(counts))]
    if num_workers <= sum(num_devices):
        assert all(count <= most for count, most in zip(counts, num_devices, strict=False))
        assert sum(num_devices[: len(counts) - 1]) < num_workers  # one node less would not hold them
    else:
        extra = [count - most for count, most in zip(counts, num_devices, strict=True)]
        assert max(extra) - min(extra) <= 1 and extra == sorted(extra, reverse=True)
    assert plan.threads_per_worker == max(1, num_cores // max(counts))
    assert not any(share.devices or share.cpus for share in plan.nodes)  # CPU workers are not pinned


@given(sizes, st.data())
def test_every_worker_has_a_gpu_of_its_own_that_nobody_else_uses(num_devices: list[int], data: st.DataObject) -> None:
    places = [(number, i) for number, count in enumerate(num_devices) for i in range(count)]
    busy = frozenset(data.draw(st.sets(st.sampled_from(places))))
    cluster = cluster_of(*num_devices, kind="cuda", busy=busy)
    num_workers = data.draw(st.integers(1, sum(num_devices)))
    try:
        plan = spread(cluster, num_workers)
    except JobError as error:
        assert busy and " free; GPU " in str(error) and "\n" not in str(error)
        return
    assert plan.device_kind == "cuda"
    assert sum(share.num_workers for share in plan.nodes) == num_workers
    for share in plan.nodes:  # a node without a free GPU gets no worker
        number = int(share.hostname.removeprefix("n"))
        assert len(set(share.devices)) == len(share.devices) == len(share.cpus) == share.num_workers
        assert not busy & {(number, i) for i in share.devices}
        assert share.cpus == tuple((2 * i, 2 * i + 1) for i in share.devices)  # each beside its GPU


def test_the_gpus_are_those_with_the_best_ring() -> None:
    devices = tuple(Device("cuda", i, "", 2**33, cpus=(i,)) for i in range(4))
    wires = {(0, 1): "SYS", (0, 2): "NV2", (0, 3): "SYS", (1, 2): "SYS", (1, 3): "NV1", (2, 3): "NV1"}
    rates = {"SYS": 6e9, "NV1": 25e9, "NV2": 50e9}
    links = tuple(Link((f"GPU{i}", f"GPU{j}"), label, rates[label]) for (i, j), label in wires.items())
    here = Node("here", 8, 2**34, "", devices, links=links)
    assert spread(Cluster((here,)), 2).nodes == (NodePlacement("", 2, (0, 2), ((0,), (2,))),)
    taken = Node("here", 8, 2**34, "", (Device("cuda", 0, "", 2**33, busy="in use"), *devices[1:]), links=links)
    (share,) = spread(Cluster((taken,)), 2).nodes
    assert share.devices in ((1, 3), (2, 3))
    assert share.devices == pick(taken, 2, [1, 2, 3]).ring.devices


def test_busy_gpus_are_named_when_too_few_are_left() -> None:
    cluster = cluster_of(4, kind="cuda", busy=frozenset({(0, 1), (0, 3)}))
    assert set(spread(cluster, 2).nodes[0].devices) == {0, 2}
    with pytest.raises(JobError) as caught:
        spread(cluster, 3)
    assert str(caught.value) == (
        "3 workers need as many GPUs, but this machine has 2 free; GPU 1 is in use; GPU 3 is in use."
    )


def test_more_workers_than_the_gpus_of_all_nodes() -> None:
    assert [share.num_workers for share in spread(cluster_of(2, 3, kind="cuda"), 5).nodes] == [2, 3]
    with pytest.raises(JobError, match="6 workers need as many GPUs, but these 2 nodes have 5"):
        spread(cluster_of(2, 3, kind="cuda"), 6)


def test_one_node_is_named_only_if_it_is_somewhere_else() -> None:
    assert spread(node(), 2).nodes == ()
    assert [share.hostname for share in spread(node("cuda"), 2).nodes] == [""]
    assert [share.hostname for share in spread(cluster_of(4), 2).nodes] == ["n0"]


def test_a_node_without_gpus_makes_all_workers_cpu_workers() -> None:
    gpus, cpus = cluster_of(2, kind="cuda").nodes + cluster_of(2).nodes
    plan = spread(Cluster((gpus, cpus)), 4)
    assert (plan.device_kind, plan.backend) == ("cpu", "gloo")
    assert all(share.devices == () for share in plan.nodes)
