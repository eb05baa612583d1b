"""Which mesh trains a model fastest on so many devices: what is offered fits, and prices are those of the papers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import JobError
from paceline.plan.collectives import Network
from paceline.plan.forecast import choose_mesh
from paceline.plan.memory import fits
from paceline.spec import Job, Mesh
from paceline.spec.forecast import LayerCost, ModelCost
from tests.unit.plan.calls import meshes, transformer
from tests.unit.plan.clusters import GIB, gpu_cluster

FAST = Network(3e-6, 1 / 300e9, 10e-6, 1 / 25e9)
SLOW = Network(3e-6, 1 / 300e9, 50e-6, 1 / 1e9)
FREE = Network()
GPT: dict[str, Any] = {
    "num_parameters": 6_700_000_000,
    "sample_bytes": 32 * 2048 * 4096 * 34.0,
    "fixed_s": 0.0,
    "sample_s": 6 * 6.7e9 * 2048 / 140e12,
    "memory_bytes": 80.0 * GIB,
    "layers": transformer(6.7e9, num_layers=32, width=4096, num_heads=32, tokens=2048),
}


@given(st.sampled_from([1, 2, 4, 6, 8, 12, 16, 24, 32]), st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=20)
def test_meshes_use_every_device_once_and_suit_model_and_nodes(num_workers: int, devices_per_node: int) -> None:
    found = [one.mesh for one in meshes(num_workers, devices_per_node, FAST, **GPT | {"memory_bytes": math.inf})]
    assert len(set(found)) == len(found) and Mesh(dp=num_workers) in found
    for mesh in found:
        assert mesh.num_workers == num_workers
        assert mesh.tp % devices_per_node == 0 or devices_per_node % mesh.tp == 0
        assert mesh.pp <= 32 and 32 % mesh.tp == 0


def test_a_model_that_fits_is_replicated() -> None:
    result = meshes(8, 8, FAST)
    assert result[0].mesh == Mesh(dp=8)


def test_a_model_of_unknown_layers_is_only_replicated_and_sharded() -> None:
    assert {(one.mesh.tp, one.mesh.pp) for one in meshes(8, 8, FAST)} == {(1, 1)}


def test_no_pipeline_has_more_stages_than_layers_at_which_one_may_begin() -> None:
    layers = tuple(dataclasses.replace(one, may_begin=place < 2) for place, one in enumerate(GPT["layers"]))
    found = meshes(8, 8, FREE, **GPT | {"layers": layers, "memory_bytes": math.inf})
    assert {one.mesh.pp for one in found} == {1, 2}


def test_a_model_that_does_not_fit_is_sharded() -> None:
    result = meshes(16, 8, FAST, **GPT)
    assert not any(one.mesh.is_plain for one in result)


@given(st.sampled_from([1, 2, 4, 8, 16]), st.floats(1e9, 1e11), st.sampled_from([FAST, SLOW]))
@settings(max_examples=8)
def test_everything_offered_fits_and_more_memory_is_never_slower(num_workers: int, room: float, links: Network) -> None:
    def best_s(memory_bytes: float) -> float:
        try:
            result = meshes(num_workers, 8, links, **GPT | {"memory_bytes": memory_bytes})
        except JobError:
            return math.inf
        assert all(fits(one.memory.total_bytes, memory_bytes) for one in result)
        steps = [one.step_s for one in result]
        assert result[0].step_s <= 1.03 * min(steps)
        return min(steps)

    assert best_s(2 * room) <= best_s(room)


def test_a_pipeline_without_communication_has_the_bubble_of_the_papers() -> None:
    """(p - 1) / m of the ideal time (Huang et al. 2019; Narayanan et al. 2021, section 2.2.1); all do the same work."""
    for one in meshes(8, 8, FREE, **GPT | {"memory_bytes": math.inf}):
        assert one.compute_s == pytest.approx(256 * GPT["sample_s"] / 8)
        bubble = (one.mesh.pp - 1) / one.num_micro_batches
        assert one.bubble_s == pytest.approx(bubble * one.compute_s)
        assert one.exposed_s == one.tensor_s == 0


def test_a_pipelines_micro_batches_are_the_virtual_shards() -> None:
    for one in meshes(16, 8, FAST, **GPT | {"shard_size": 32, "memory_bytes": math.inf}):
        assert one.num_micro_batches == 8 // one.mesh.num_assignments


def test_a_slow_network_keeps_what_sends_most_inside_a_node() -> None:
    fast, slow = (meshes(64, 8, links, **GPT)[0] for links in (FAST, SLOW))
    assert slow.step_s > fast.step_s
    assert slow.mesh.fsdp * slow.mesh.tp <= 8 or slow.mesh.zero_stage == 1


def test_messages_between_stages_and_sums_of_tensor_groups_take_the_link_between_nodes() -> None:
    """Two nodes of two, and links inside that take no time: one of three boundaries of pp4 lies between the nodes, and
    so does that of dp2 x pp2; a tensor group of two never leaves its node."""
    layers = (LayerCost("", 1.0, 1e6, 1e4, 1e6, True, 4, 2),) * 4
    links = Network(between_beta_s_per_byte=1 / 1e9)
    found = {one.mesh: one.tensor_s for one in meshes(4, 2, links, layers=layers, shard_size=16)}
    message_s = 16 * 1e6 / 1e9
    assert found[Mesh(pp=4)] == pytest.approx((16 + 3) * 2 * message_s)
    assert found[Mesh(dp=2, pp=2)] == pytest.approx((8 + 1) * 2 * 2 * message_s)
    assert found[Mesh(dp=2, tp=2)] == 0 < found[Mesh(tp=4)]


def test_large_layers_of_few_samples_are_divided_over_slow_links_and_large_batches_are_not() -> None:
    """Replicas would sum 100 MB over a link of 25 MB/s, a tensor group two sums of 2 MB."""
    layers = (LayerCost("", 1.0, 12.5e6, 5e4, 3e4, True, 4096, 1),) * 2
    known: dict[str, Any] = {"layers": layers}
    slow, fast = (Network(20e-6, 1 / 1.5e9, 120e-6, 1 / rate) for rate in (25e6, 25e9))
    assert meshes(4, 2, slow, global_batch_size=64, shard_size=32, **known)[0].mesh == Mesh(tp=4)
    many = {"global_batch_size": 1 << 16, "shard_size": 1 << 14, "sample_bytes": 1e5}
    assert meshes(4, 2, fast, **known | many)[0].mesh == Mesh(dp=4)


def test_activations_are_computed_again_only_where_nothing_fits_otherwise() -> None:
    huge = GPT | {"sample_bytes": 60.0 * GIB}
    assert any(one.recompute for one in meshes(4, 8, FAST, **huge))
    assert not any(one.recompute for one in meshes(4, 8, FAST, **huge | {"memory_bytes": math.inf}))


def test_computing_activations_again_is_one_forward_pass_more() -> None:
    """Of three parts, one forward and two backward (Chen et al. 2016)."""
    huge = GPT | {"sample_bytes": 60.0 * GIB}
    again = {one.mesh: one for one in meshes(4, 8, FREE, **huge) if one.recompute}
    plain = {one.mesh: one for one in meshes(4, 8, FREE, **huge | {"memory_bytes": math.inf})}
    assert again
    for mesh, one in again.items():
        assert one.compute_s == pytest.approx(4 / 3 * plain[mesh].compute_s)


@pytest.mark.parametrize(
    ("num_workers", "workload", "words"),
    [(8, GPT | {"memory_bytes": 2.0 * GIB}, ["8 devices", "GiB"]), (512, {}, ["512 devices", "virtual_shards = 256"])],
)
def test_what_fits_nowhere_is_one_sentence_with_numbers(
    num_workers: int, workload: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(JobError) as caught:
        meshes(num_workers, 8, FAST, **workload)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("is_timed", [True, False])
@pytest.mark.parametrize(("num_parameters", "is_plain"), [(1_000_000, True), (2_000_000_000, False)])
def test_auto_takes_replicas_where_they_fit_and_says_why(num_parameters: int, is_plain: bool, is_timed: bool) -> None:
    """24 GB of state do not fit into 16 GiB."""
    cluster = gpu_cluster(1, num_parameters=num_parameters, sample_bytes=1_000_000, memory_bytes=16 * GIB)
    job, model = Job(global_batch_size=64, virtual_shards=64), ModelCost(num_parameters, 1e6)
    found, reason = choose_mesh(job, model, cluster if is_timed else dataclasses.replace(cluster, timings=()), 8)
    assert found.mesh.is_plain == is_plain and found.mesh.num_workers == 8
    assert str(found.mesh) in reason and "iB a worker" in reason
    only_replicas = job.with_values(aggregation={"method": "diloco"})
    if is_plain:
        assert choose_mesh(only_replicas, model, cluster, 8)[0].mesh.is_plain
    else:
        with pytest.raises(JobError, match="dp8 needs the least"):
            choose_mesh(only_replicas, model, cluster, 8)
