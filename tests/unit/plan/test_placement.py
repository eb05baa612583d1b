"""Workers are spread over nodes and devices: each has a place of its own, cores are shared, what cannot be is said."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.errors import JobError
from paceline.plan.placement import place, spread
from paceline.spec import Cluster, Device, Job, Link, Mesh, Node
from paceline.spec.cluster import DeviceKind
from paceline.spec.plan import NodePlacement
from tests.data import topologies


def node(kind: DeviceKind = "cpu", num_devices: int = 8, num_cores: int = 8) -> Cluster:
    return Cluster((Node("here", num_cores, 2**34, "", tuple(Device(kind, i, "", 2**33) for i in range(num_devices))),))


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
                    Device(kind, i, "", 2**33, cpus=(2 * i, 2 * i + 1), busy="in use" * ((number, i) in busy))
                    for i in range(count)
                ),
                is_remote=True,
            )
            for number, count in enumerate(num_devices)
        )
    )


sizes = st.lists(st.integers(1, 8), min_size=1, max_size=5)


@given(st.integers(1, 64), st.integers(1, 128), st.integers(1, 64))
def test_cores_are_shared_evenly_and_never_oversubscribed(workers: int, cores: int, shards: int) -> None:
    assume(workers <= shards)
    plan = place(Job(global_batch_size=64, virtual_shards=shards), node(num_cores=cores), workers)
    assert plan.world_size == workers
    assert plan.threads_per_worker == max(1, cores // workers)


@given(sizes, st.integers(1, 40), st.integers(1, 64))
def test_every_worker_has_a_place_on_as_few_nodes_as_hold_them(
    num_devices: list[int], num_workers: int, num_cores: int
) -> None:
    plan = spread(cluster_of(*num_devices, num_cores=num_cores), num_workers)
    counts = [one.num_workers for one in plan.nodes]
    assert sum(counts) == plan.world_size == num_workers and min(counts) >= 1
    assert [one.hostname for one in plan.nodes] == [f"n{number}" for number in range(len(counts))]
    if num_workers <= sum(num_devices):
        assert all(count <= most for count, most in zip(counts, num_devices, strict=False))
        assert sum(num_devices[: len(counts) - 1]) < num_workers  # one node less would not hold them
    else:  # CPU workers may outnumber cores: the rest is dealt out in turn
        extra = [count - most for count, most in zip(counts, num_devices, strict=True)]
        assert max(extra) - min(extra) <= 1 and extra == sorted(extra, reverse=True)
    assert plan.threads_per_worker == max(1, num_cores // max(counts))


@given(sizes, st.data())
def test_every_worker_has_a_gpu_of_its_own_that_nobody_else_uses(num_devices: list[int], data: st.DataObject) -> None:
    places = [(number, i) for number, count in enumerate(num_devices) for i in range(count)]
    busy = frozenset(data.draw(st.sets(st.sampled_from(places))))
    num_workers = data.draw(st.integers(1, sum(num_devices)))
    cluster = cluster_of(*num_devices, kind="cuda", busy=busy)
    if num_workers > len(places) - len(busy):
        with pytest.raises(JobError) as caught:
            spread(cluster, num_workers)
        assert "in use" in str(caught.value) and str(len(places) - len(busy)) in str(caught.value)
        return
    plan = spread(cluster, num_workers)
    assert (plan.device_kind, plan.backend) == ("cuda", "nccl")
    assert sum(one.num_workers for one in plan.nodes) == num_workers
    for one in plan.nodes:  # a node without a free GPU gets no worker
        number = int(one.hostname.removeprefix("n"))
        assert len(set(one.devices)) == len(one.devices) == len(one.cpus) == one.num_workers
        assert not busy & {(number, i) for i in one.devices}
        assert one.cpus == tuple((2 * i, 2 * i + 1) for i in one.devices)  # each beside its GPU


def wired(labels: dict[tuple[int, int], str], num_devices: int) -> Node:
    """GPUs joined by the labels given, the others by PIX."""
    rates = {"SYS": 6e9, "PIX": 12e9, "NV1": 25e9, "NV2": 50e9}
    pairs = {pair: labels.get(pair, "PIX") for pair in combinations(range(num_devices), 2)}
    links = tuple(Link((f"GPU{i}", f"GPU{j}"), label, rates[label]) for (i, j), label in pairs.items())
    devices = tuple(Device("cuda", i, "", 2**33, cpus=(i,)) for i in range(num_devices))
    return Node("here", 8, 2**34, "", devices, links=links)


def test_the_gpus_are_those_with_the_best_ring() -> None:
    machine = wired({(0, 1): "SYS", (0, 2): "NV2", (0, 3): "SYS", (1, 2): "SYS", (1, 3): "NV1", (2, 3): "NV1"}, 4)
    assert spread(Cluster((machine,)), 2).nodes == (NodePlacement("", 2, (0, 2), ((0,), (2,))),)


PAIRS = wired({(0, 3): "NV2", (1, 2): "NV2"}, 4)


@pytest.mark.parametrize(
    ("mesh", "order"), [(Mesh(tp=2, dp=2), (0, 3, 1, 2)), (Mesh(fsdp=4), spread(Cluster((PAIRS,)), 4).nodes[0].devices)]
)
def test_tensor_groups_get_the_fast_pairs_and_one_axis_gets_the_ring(mesh: Mesh, order: tuple[int, ...]) -> None:
    assert place(Job(), Cluster((PAIRS,)), 4, mesh=mesh).nodes[0].devices == order


@given(st.lists(st.sampled_from(["NV2", "NV1", "PIX", "SYS"]), min_size=15, max_size=15), st.sampled_from([2, 3]))
def test_no_order_has_a_tensor_group_with_a_faster_slowest_link(labels: list[str], degree: int) -> None:
    """Against every way to part six GPUs into groups of two or three, whose rings use all of their links."""
    machine = wired(dict(zip(combinations(range(6), 2), labels, strict=True)), 6)

    def slowest(group: tuple[int, ...]) -> float:
        pairs = [machine.link(f"GPU{i}", f"GPU{j}") for i, j in combinations(sorted(group), 2)]
        return min(link.bytes_per_s or 0.0 for link in pairs if link is not None)

    def best(left: frozenset[int]) -> float:
        if not left:
            return float("inf")
        first, *others = sorted(left)
        groups = ((first, *rest) for rest in combinations(others, degree - 1))
        return max(min(slowest(group), best(left - set(group))) for group in groups)

    order = place(Job(), Cluster((machine,)), 6, mesh=Mesh(tp=degree, dp=6 // degree)).nodes[0].devices
    assert sorted(order) == list(range(6))
    assert min(slowest(order[start : start + degree]) for start in range(0, 6, degree)) == best(frozenset(range(6)))


def test_replicas_of_a_tensor_group_face_each_other_on_a_dgx1() -> None:
    """The hybrid cube: two quads, each device joined with one of the other quad."""
    machine = topologies.load("dgx1").nodes[0]
    order = place(Job(), Cluster((machine,)), 8, mesh=Mesh(tp=4, dp=2)).nodes[0].devices
    assert set(order[:4]) in ({0, 1, 2, 3}, {4, 5, 6, 7})
    for one, other in zip(order[:4], order[4:], strict=True):
        link = machine.link(f"GPU{one}", f"GPU{other}")
        assert link is not None and link.label.startswith("NV")


def test_parity_decides_how_gradients_are_summed_and_bits_need_one_thread() -> None:
    numeric = place(Job(), node(), 2)
    assert (numeric.algorithm, numeric.threads_per_worker, numeric.backend) == ("auto", 4, "gloo")
    assert place(Job(), node(), 2, threads_per_worker=3).threads_per_worker == 3
    bitwise = place(Job(parity="bitwise"), node(), 2, threads_per_worker=3)
    assert (bitwise.algorithm, bitwise.threads_per_worker) == ("tree_exact", 1)


def test_a_node_is_named_only_if_it_is_somewhere_else() -> None:
    assert spread(node(), 2).nodes == ()
    assert [one.hostname for one in spread(node("cuda"), 2).nodes] == [""]
    assert [one.hostname for one in spread(cluster_of(4), 2).nodes] == ["n0"]


def test_a_node_without_gpus_makes_all_workers_cpu_workers() -> None:
    plan = spread(Cluster(cluster_of(2, kind="cuda").nodes + cluster_of(2).nodes), 4)
    assert (plan.device_kind, plan.backend) == ("cpu", "gloo")
    assert all(one.devices == () for one in plan.nodes)


@pytest.mark.parametrize(
    ("cluster", "workers", "words"),
    [
        (node(), 0, ["0 workers"]),
        (node(), 9, ["virtual_shards = 8", "9"]),
        (node("cuda", 2), 3, ["3 workers", "2"]),
        (cluster_of(2, 3, kind="cuda"), 6, ["6 workers", "2 nodes", "5"]),
        (cluster_of(4, kind="cuda", busy=frozenset({(0, 1), (0, 3)})), 3, ["2 free", "GPU 1", "GPU 3"]),
    ],
)
def test_a_number_of_workers_that_cannot_be_is_refused(cluster: Cluster, workers: int, words: list[str]) -> None:
    with pytest.raises(JobError) as caught:
        place(Job(virtual_shards=8), cluster, workers)
    assert all(word in str(caught.value) for word in words), caught.value


def test_bitwise_parity_refuses_another_sum() -> None:
    with pytest.raises(JobError, match="tree_exact"):
        place(Job(parity="bitwise"), node(), 2, algorithm="ring")
