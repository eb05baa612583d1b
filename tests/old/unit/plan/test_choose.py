"""What `--strategy auto` takes, and the sentence for it."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.errors import JobError
from paceline.plan import place
from paceline.plan.collectives import cost_s, ring
from paceline.plan.forecast_row import search_meshes
from paceline.plan.gradient_sums import network_in_steps
from paceline.plan.inputs import ForecastRequest, plan_inputs
from paceline.plan.memory import worker_memory_bytes, workers_on_fullest_node
from paceline.plan.mesh_selection import check_fits, choose_mesh
from paceline.plan.model import Layout
from paceline.spec import Cluster, Device, Job, Mesh, Plan, ShardingTiming, SumTiming
from paceline.spec.model_cost import Activations, LayerCost, ModelCost
from tests.old.sample_clusters import GIB, cpu_cluster, gpu_cluster

JOB = Job(global_batch_size=64, virtual_shards=16)
SMALL = ModelCost(60_000, Activations(1e4))
LARGE_LAYERS = ModelCost(
    300_000_000,
    Activations(1e5),
    (LayerCost("", 1.0, 6e8, 5e4, 4e4, True, 4096, 1, 4e4),) * 2,
    flops_per_sample=1.8e9,
)


def _untimed(cluster: Cluster) -> Cluster:
    return dataclasses.replace(cluster, timings=())


def test_a_model_that_fits_is_replicated() -> None:
    for cluster in (cpu_cluster(2), _untimed(cpu_cluster(2))):
        choice = choose_mesh(JOB, SMALL, cluster, 4)
        assert choice.mesh == Mesh(dp=4)
        assert choice.reason.startswith("dp4: a replica needs ")
        plan = place(JOB, cluster, 4)
        assert choice.applied(plan) == plan


def test_a_model_three_times_too_large_is_shared_out_and_dp_is_refused_with_both_numbers() -> None:
    """12 bytes a parameter for SGD with momentum: 3.35 GiB, where a worker has 1.2."""
    cluster = _untimed(cpu_cluster(2))
    choice = choose_mesh(JOB, LARGE_LAYERS, cluster, 4, memory_bytes=1.2 * GIB)
    assert not choice.mesh.is_plain
    assert choice.mesh.num_workers == 4
    assert "1.1 GiB can be used and a whole replica needs 3.35 GiB" in choice.reason
    with pytest.raises(JobError, match=r"whole replicas need 3\.35 GiB on each worker .* where 1\.1 GiB can be used"):
        check_fits(JOB, LARGE_LAYERS, 4, 1.2 * GIB)
    plan = choice.applied(Plan(world_size=4))
    assert (plan.mesh, plan.pipeline, plan.recompute) == (choice.mesh, choice.pipeline, choice.recompute)
    assert Plan.from_mapping(plan.to_mapping()) == plan


def test_a_mesh_that_is_clearly_faster_is_taken_where_it_was_timed() -> None:
    """Large layers over a slow network: tensor groups tell each other far less than replicas do."""
    cluster = cpu_cluster(2, num_parameters=LARGE_LAYERS.num_parameters, link_bytes_per_s=25e6)
    choice = choose_mesh(JOB, LARGE_LAYERS, cluster, 4, memory_bytes=64 * GIB)
    assert choice.mesh == Mesh(tp=4)
    assert "and whole replicas need" in choice.reason


def test_meshes_are_priced_at_what_collectives_took_while_all_workers_were_busy() -> None:
    """Four workers on two cores: a link that was timed alone says nothing about gathers in every micro-batch."""
    cluster = cpu_cluster(1, num_parameters=LARGE_LAYERS.num_parameters)
    devices = tuple(Device("cpu", index, "a core", 4 * GIB) for index in range(4))
    cluster = dataclasses.replace(cluster, nodes=(dataclasses.replace(cluster.nodes[0], devices=devices),))
    known = plan_inputs(JOB, cluster, ForecastRequest(), 4, LARGE_LAYERS)
    alone = known.network(known.layout(4)).inside.beta_s_per_byte
    assert network_in_steps(known, known.layout(4)).inside.beta_s_per_byte == pytest.approx(4 * alone)

    price_s = cost_s("all_reduce", 4.0 * LARGE_LAYERS.num_parameters, known.layout(4), known.network(known.layout(4)))
    timing = dataclasses.replace(
        cluster.timings[0],
        workers_together=4,
        workers_together_on_node=4,
        together_micro_batch_size=16,
        sums=(SumTiming("all_reduce", "float32", 7 * price_s),),
    )
    timed = dataclasses.replace(known, timing=timing)
    assert network_in_steps(timed, known.layout(4)).inside.beta_s_per_byte == pytest.approx(7 * alone, rel=0.02)
    found = {one.mesh: one for one in search_meshes(timed, 4, 64 * GIB).candidates}
    assert found[Mesh(dp=4)].exposed_s == pytest.approx(7 * price_s, rel=0.02)
    # A gather each for forward and backward and a sum of half the model, in each of eight passes, and what they copy.
    sharded = found[Mesh(fsdp=2, pp=2)]
    assert sharded.exposed_s > 8 * 7 * 2 / 3 * price_s / 2

    # Each of these 24 moves half of the model, and its copies take what the timed exchange takes beyond its messages.
    all_reduce_s = ring(1e6, Layout((4,)), network_in_steps(timed, known.layout(4)))
    quick, slow = (
        {
            one.mesh: one.exposed_s
            for one in search_meshes(
                dataclasses.replace(
                    known, timing=dataclasses.replace(timing, sharding=ShardingTiming(10**6, gather_s, all_reduce_s))
                ),
                4,
                64 * GIB,
            ).candidates
        }
        for gather_s in (all_reduce_s / 2, all_reduce_s / 2 + 4e-3)
    )
    half_bytes = 4.0 * LARGE_LAYERS.num_parameters / 2
    difference_s = slow[Mesh(fsdp=2, pp=2)] - quick[Mesh(fsdp=2, pp=2)]
    assert difference_s == pytest.approx(24 * half_bytes / 1e6 * 2e-3, rel=0.02)
    assert slow[Mesh(dp=4)] == quick[Mesh(dp=4)]


def test_jobs_that_need_replicas_get_them_or_a_refusal() -> None:
    half = JOB.with_values(precision="float16")
    assert choose_mesh(half, SMALL, cpu_cluster(2), 4).mesh == Mesh(dp=4)
    with pytest.raises(JobError, match=r"does not fit: whole replicas need 3\.35 GiB"):
        choose_mesh(half, LARGE_LAYERS, cpu_cluster(2), 4, memory_bytes=GIB)


def test_bitwise_jobs_are_divided_where_replicas_with_all_their_sums_do_not_fit() -> None:
    """Of 1.12 GiB each: parameters, momentum, the gradients of a shard and sums of 1, 2 and 4 shards."""
    bitwise = JOB.with_values(parity="bitwise")
    assert choose_mesh(bitwise, SMALL, cpu_cluster(2), 4).mesh == Mesh(dp=4)
    cluster = _untimed(cpu_cluster(2))
    with pytest.raises(JobError, match=r"whole replicas need 6\.71 GiB on each worker .* 4\.47 GiB gradients"):
        check_fits(bitwise, LARGE_LAYERS, 4, 7 * GIB)
    choice = choose_mesh(bitwise, LARGE_LAYERS, cluster, 4, memory_bytes=7 * GIB)
    assert choice.mesh == Mesh(dp=2, pp=2), "a stage has half of the gradients"
    assert choose_mesh(JOB, LARGE_LAYERS, cluster, 4, memory_bytes=7 * GIB).mesh == Mesh(dp=4)


def test_one_worker_has_nothing_to_choose() -> None:
    choice = choose_mesh(JOB, SMALL, cpu_cluster(), 1)
    assert (choice.mesh, choice.reason) == (Mesh(), "one device: a single worker needs no mesh.")


def test_workers_share_the_memory_of_their_node() -> None:
    assert worker_memory_bytes(gpu_cluster(), 8) == 80 * GIB
    cluster = cpu_cluster(2)  # nodes with two cores: both workers on the first one
    assert worker_memory_bytes(cluster, workers_on_fullest_node(cluster, 2)) == 4 * GIB
    assert worker_memory_bytes(cluster, workers_on_fullest_node(cluster, 8)) == 2 * GIB
