from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ClusterError
from paceline.plan.collectives import cost_s
from paceline.plan.forecast import counts_between, forecast
from paceline.plan.forecast_row import STEP_OVERHEAD_S, search_meshes
from paceline.plan.inputs import ForecastRequest, pass_s, plan_inputs, transformer_shape
from paceline.plan.model import Layout, Network
from paceline.plan.network_costs import PER_MESSAGE_S
from paceline.spec import Cluster, Job, JobTiming, MachineLoad, Mesh, MicroBatchTiming, OptimSpec
from paceline.spec.algorithm import AlphaBeta
from paceline.spec.forecast import ForecastRow
from tests.old.sample_clusters import cpu_cluster, gpu_cluster

JOB = Job(global_batch_size=4096, virtual_shards=4096)
SMALL = Job(global_batch_size=64, virtual_shards=64)


def timed(*pairs: tuple[int, float]) -> JobTiming:
    return JobTiming("job", "a device", 10, 1, tuple(MicroBatchTiming(size, seconds) for size, seconds in pairs))


# --- counts and passes ---


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_counts_have_both_ends_ascend_and_stay_few(first: int, more: int) -> None:
    counts = counts_between(first, first + more)
    assert counts[0] == first
    assert counts[-1] == first + more
    assert counts == sorted(set(counts))
    assert len(counts) <= 64 + 4 * 13
    assert counts[: min(64, more + 1)] == list(range(first, first + min(64, more + 1)))


def test_a_range_keeps_powers_of_two() -> None:
    assert {2**power for power in range(13)} <= set(counts_between(1, 4096))


def test_a_pass_is_between_its_neighbours_and_goes_on_as_the_last_two() -> None:
    timing = timed((1, 0.010), (8, 0.012), (64, 0.068))
    assert pass_s(timing, 8) == 0.012
    assert pass_s(timing, 36) == pytest.approx(0.040)
    assert pass_s(timing, 128) == pytest.approx(0.132)
    assert pass_s(timing, 0.5) == 0.010
    assert pass_s(timed((16, 0.1)), 32) == pytest.approx(0.2)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 512), st.floats(1e-4, 1)), min_size=1, max_size=6, unique_by=lambda p: p[0]))
def test_a_pass_of_a_size_that_was_timed_takes_what_it_took(pairs: list[tuple[int, float]]) -> None:
    timing = timed(*pairs)
    for size, seconds in pairs:
        assert pass_s(timing, size) == pytest.approx(seconds)
    assert pass_s(timing, 1024) >= 0.999 * pass_s(timing, 512) > 0


# --- rows ---


def test_the_algorithm_is_the_cheapest_by_the_costs() -> None:
    job, cluster = dataclasses.replace(JOB, global_batch_size=64, virtual_shards=64), gpu_cluster(link_bytes_per_s=1e9)
    (row,) = forecast(job, cluster, [16]).rows
    network = Network(AlphaBeta(5e-6, 1 / 250e9), AlphaBeta(15e-6, 1 / 1e9), PER_MESSAGE_S["cuda"])
    prices = {name: 4 * cost_s(name, 25e6, Layout((8, 8)), network) for name in ("all_reduce", "hierarchical")}
    assert prices["hierarchical"] < 0.9 * prices["all_reduce"]
    assert row.algorithm == "hierarchical"
    assert row.communication_s == pytest.approx(prices["hierarchical"])


def test_a_wire_format_and_rare_meetings_cost_less() -> None:
    def communication_s(**aggregation: object) -> float:
        job = SMALL.with_values(aggregation=aggregation)
        return forecast(job, gpu_cluster(link_bytes_per_s=1e9), [16]).rows[0].communication_s

    plain = communication_s()
    assert communication_s(wire="bfloat16") < 0.7 * plain
    assert communication_s(method="local_sgd", sync_every=10) == pytest.approx(plain / 10)


def test_groups_pay_for_the_sums_that_they_make_in_every_step() -> None:
    def row(**aggregation: object) -> ForecastRow:
        job = SMALL.with_values(aggregation=aggregation)
        return forecast(job, gpu_cluster(link_bytes_per_s=1e9), [16]).rows[0]

    alone = row(method="diloco", sync_every=10)
    plain, nodes, one_group = row(), row(method="diloco", sync_every=10, groups=2), row(method="diloco", groups=1)
    assert alone.communication_s < nodes.communication_s < 0.5 * plain.communication_s  # sums inside a node are fast
    assert one_group.communication_s > plain.communication_s
    short = row(method="diloco", groups=1, wire="bfloat16")  # which travels between groups only
    assert short.communication_s > plain.communication_s
    of_nodes = row(method="diloco", sync_every=10, sync_inside_nodes=True)
    assert nodes.communication_s == of_nodes.communication_s
    assert one_group.exposed_s >= plain.exposed_s


def test_late_outer_steps_wait_for_less() -> None:
    def exposed_s(overlap_steps: int) -> float:
        aggregation = {"method": "diloco", "sync_every": 10, "overlap_steps": overlap_steps}
        job = SMALL.with_values(aggregation=aggregation)
        return forecast(job, gpu_cluster(link_bytes_per_s=1e7), [16]).rows[0].exposed_s

    assert exposed_s(0) > exposed_s(1) > exposed_s(2) > 0
    assert exposed_s(1) - exposed_s(2) == pytest.approx(exposed_s(2) - exposed_s(3))


def test_bitwise_jobs_sum_by_the_exact_tree_and_pass_shard_by_shard() -> None:
    job = Job(global_batch_size=64, virtual_shards=8, parity="bitwise")
    for row, passes in zip(forecast(job, cpu_cluster(2), [1, 2, 4]).rows, (8, 4, 2), strict=True):
        assert (row.micro_batch_size, row.num_micro_batches) == (8, passes)
        assert row.algorithm == "tree_exact" or row.devices == 1
        assert row.exposed_s == row.communication_s  # it begins when the last shard has been computed
    meshes = search_meshes(plan_inputs(job, gpu_cluster(), ForecastRequest(), 4), 4).candidates
    assert {(one.mesh.tp, one.mesh.pp, one.micro_batch_size) for one in meshes} == {(1, 1, 8)}
    assert meshes[0].mesh == Mesh(dp=4)
    by_stage = {one.mesh.zero_stage: one.exposed_s for one in meshes if one.mesh.fsdp == 4}
    assert meshes[0].exposed_s < by_stage[1] < by_stage[2] == by_stage[3]


def _with_timing(cluster: Cluster, **values: Any) -> Cluster:
    return dataclasses.replace(cluster, timings=(dataclasses.replace(cluster.timings[0], **values),))


def test_cores_that_compute_do_not_add_up_meanwhile() -> None:
    job = Job(global_batch_size=512, virtual_shards=8)
    busy = cpu_cluster(2, num_parameters=25_000_000)
    spare = dataclasses.replace(busy, nodes=tuple(dataclasses.replace(node, num_cores=8) for node in busy.nodes))
    pair, hidden = (forecast(job, cluster, [2]).rows[0] for cluster in (busy, spare))
    assert pair.exposed_s == pytest.approx(pair.communication_s) == pytest.approx(hidden.communication_s)
    assert hidden.exposed_s < hidden.communication_s
    both = forecast(job, busy, [4]).rows[0]
    assert both.exposed_s < both.communication_s  # the link between nodes needs no core


def test_gradient_norms_are_read_where_there_are_several_workers() -> None:
    job = Job(global_batch_size=512, virtual_shards=8, measure_noise=True, optim=OptimSpec(momentum=0.0))
    silent = dataclasses.replace(job, measure_noise=False)
    cluster = _with_timing(cpu_cluster(), update_s=0.06)
    with_norms, without = (forecast(one, cluster, [1, 2]).rows for one in (job, silent))
    assert with_norms[0].step_s == without[0].step_s
    # 4 bytes of 4 + 2 * 4 that the optimizer moves.
    assert with_norms[1].overhead_s - without[1].overhead_s == pytest.approx(0.06 / 3)


def test_an_update_that_was_timed_is_not_assumed() -> None:
    cluster = gpu_cluster(1)
    timed_one = _with_timing(cluster, update_s=0.05)
    assumed, known = (forecast(JOB, c, [1]) for c in (cluster, timed_one))
    assert known.rows[0].step_s - known.rows[0].compute_s == pytest.approx(0.05 + STEP_OVERHEAD_S)
    assert any("The optimizer moves 800 GB/s" in line for line in assumed.assumptions)
    assert not any("optimizer moves" in line for line in known.assumptions)


def test_batches_that_are_made_between_passes_take_their_time() -> None:
    job = Job(global_batch_size=128, virtual_shards=16)
    meanwhile = _with_timing(cpu_cluster(), loader_samples_per_s=40_000.0)
    between = _with_timing(meanwhile, loads_between_passes=True)
    one, other = (forecast(job, cluster, [1]).rows[0] for cluster in (meanwhile, between))
    assert other.step_s - one.step_s == pytest.approx(128 / 40_000)
    assert other.loader_s == one.loader_s


@given(st.integers(1, 64), st.sampled_from([2e8, 1e9, 12.5e9]))
@settings(max_examples=10, deadline=None)
def test_more_of_the_same_never_slows_a_link_or_a_device(count: int, rate: float) -> None:
    slow = forecast(JOB, gpu_cluster(link_bytes_per_s=rate), [count]).rows[0]
    fast = forecast(JOB, gpu_cluster(link_bytes_per_s=2 * rate), [count]).rows[0]
    quick = forecast(JOB, gpu_cluster(link_bytes_per_s=rate, sample_s=5e-4), [count]).rows[0]
    assert fast.step_s <= slow.step_s
    assert quick.step_s < slow.step_s
    assert slow.efficiency <= 1.01  # a device beyond the first brings no more than the first


# --- target, price, failures ---


def test_time_and_cost_to_a_target() -> None:
    question = ForecastRequest(price_per_device_hour=2.5, target_samples=1e8)
    for row in forecast(JOB, gpu_cluster(), [1, 16], question).rows:
        assert row.samples_to_target == 1e8
        assert row.time_to_target_s is not None
        assert row.cost_to_target == pytest.approx(2.5 * row.devices * row.time_to_target_s / 3600)
        # Failures and checkpoints cost little on two nodes, but something.
        assert 1 < row.time_to_target_s * row.samples_per_s / 1e8 < 1.01


def test_a_noise_scale_counts_samples_as_mccandlish_does() -> None:
    """Samples to the target grow as 1 + B / B_noise (McCandlish et al. 2018, equation 2.11)."""
    job = Job(global_batch_size=128, virtual_shards=8)
    question = ForecastRequest(grow="batch", noise_scale=1000, target_samples=1e6)
    one, sixteen = forecast(job, gpu_cluster(), [1, 16], question).rows
    assert one.samples_to_target == pytest.approx(1e6)
    assert sixteen.samples_to_target == pytest.approx(1e6 * (1 + 2.048) / (1 + 0.128))


# --- it says no ---


def test_a_batch_beyond_the_noise_scale_takes_fewer_devices() -> None:
    job = Job(global_batch_size=256, virtual_shards=8)
    without = forecast(job, gpu_cluster(), [1, 2, 4, 8, 16], ForecastRequest(grow="batch"))
    assert without.recommended_devices == 16
    found = forecast(job, gpu_cluster(), [1, 2, 4, 8, 16], ForecastRequest(grow="batch", noise_scale=500))
    assert found.recommended_devices < 8
    assert "what they cost makes progress, below the floor of 50 %" in found.reason
    assert "global_batch_size =" not in found.reason  # it follows the devices


def test_a_batch_that_was_too_large_from_the_start_is_told_with_a_better_one() -> None:
    found = forecast(JOB, gpu_cluster(), [1, 2, 4, 8, 16], ForecastRequest(noise_scale=256))
    assert found.recommended_devices == 1
    assert "The global batch of 4,096 is 16x the noise scale of 256: 94 % of its samples are wasted." in found.reason
    assert "global_batch_size =" in found.reason


def test_what_the_job_rules_out_is_not_recommended_but_promised() -> None:
    found = forecast(dataclasses.replace(JOB, virtual_shards=8), gpu_cluster(), [1, 8, 16])
    assert found.recommended_devices == 8
    assert found.rows[2].objection == "it needs virtual_shards = 16, which is part of the job"
    assert "This job does not run on 16 devices; 16 devices would be 1.9" in found.reason
    assert "virtual_shards = 16" in found.reason


def test_a_job_that_cannot_use_more_devices_says_so() -> None:
    found = forecast(Job(global_batch_size=512, virtual_shards=1), gpu_cluster(), [1, 2])
    assert found.verdict == "Stay with 1 device: this job, as it is, runs on no more."
    assert "2 devices would be 1.9" in found.reason


def test_near_the_best_fewer_devices_are_taken() -> None:
    found = forecast(dataclasses.replace(JOB, global_batch_size=256, virtual_shards=8), gpu_cluster(), [1, 4, 5, 6, 7])
    assert found.recommended_devices == 4  # two shards for the busiest worker with 4, 5, 6 and 7


# --- beyond the cluster ---


def test_thousands_of_devices_show_where_scaling_bends_and_what_failures_leave() -> None:
    found = forecast(JOB, gpu_cluster(), counts_between(1, 4096))
    assert found.rows[-1].nodes == 512
    assert found.bend.startswith("Scaling becomes inefficient after ")
    assert "most of it to waiting for gradients" in found.bend
    by_devices = {row.devices: row for row in found.rows}
    assert [row.devices for row in found.simulated] == [16 << power for power in range(9)]
    for simulated in found.simulated:
        # Two ways to the same number: node by node with stragglers, and by formula.
        assert 0.7 < simulated.step_s / by_devices[simulated.devices].step_s < 1.4
    lasting = [row.availability for row in found.simulated]
    assert lasting == sorted(lasting, reverse=True)
    assert any("Llama 3" in sentence for sentence in found.assumptions)


def test_without_a_network_there_is_one_node_unless_a_rate_is_given() -> None:
    alone = gpu_cluster(1)
    assert forecast(JOB, alone, [1, 8]).recommended_devices == 8
    with pytest.raises(ClusterError, match=r"16 devices need several nodes, .* \(one node has 8\); .* link_rate = "):
        forecast(JOB, alone, [1, 16])
    found = forecast(JOB, alone, [1, 16], ForecastRequest(link_bytes_per_s=12.5e9, devices_per_node=4))
    assert found.rows[1].nodes == 3  # the eight that there are, and two of four
    assert any("12.5 GB/s as given" in sentence for sentence in found.assumptions)


# --- what is not known ---


def test_a_job_that_was_not_probed() -> None:
    with pytest.raises(
        ClusterError, match=r"no timing of the job 'other' \(it has timings of job\); run paceline probe"
    ):
        forecast(dataclasses.replace(JOB, name="other"), gpu_cluster(), [1])
    with pytest.raises(ClusterError, match="timings of no job"):
        forecast(JOB, dataclasses.replace(gpu_cluster(), timings=()), [1])


def test_a_job_that_was_probed_as_another_one() -> None:
    cluster = gpu_cluster()
    (timing,) = cluster.timings
    timed_job = JOB.with_values(model="lenet", precision="float32", optim={"name": "sgd"})
    known = dataclasses.replace(cluster, timings=(dataclasses.replace(timing, settings=timed_job.timed_settings),))
    alike = timed_job.with_values(precision="auto", global_batch_size=8192, epochs=7, optim={"lr": 3.0})
    assert forecast(alike, known, [1]).rows
    for changes, words in (
        ({"model": "resnet18"}, "model.name = 'lenet', now 'resnet18'"),
        ({"data": "cifar10"}, "data.name = 'digits', now 'cifar10'"),
        ({"precision": "bfloat16"}, "precision = 'float32', now 'bfloat16'"),
        ({"optim": {"name": "adamw"}}, "optim.name = 'sgd', now 'adamw'"),
    ):
        with pytest.raises(ClusterError, match=f"was timed with other settings: {words}; run paceline probe"):
            forecast(timed_job.with_values(**changes), known, [1])


def test_links_that_nobody_measured() -> None:
    cluster = cpu_cluster()
    unlinked = Cluster(tuple(dataclasses.replace(node, links=()) for node in cluster.nodes), (), cluster.timings)
    assert forecast(SMALL, unlinked, [1]).recommended_devices == 1
    with pytest.raises(
        ClusterError, match="The links between the devices of node0 were not measured; run paceline probe"
    ):
        forecast(SMALL, unlinked, [1, 2])


def test_a_cluster_without_devices() -> None:
    with pytest.raises(ClusterError, match="no devices"):
        forecast(JOB, Cluster(()), [1])


def test_the_shape_of_a_transformer_is_what_the_job_says_or_nothing() -> None:
    options = {"num_layers": 4, "width": 128, "num_heads": 4}
    whole = JOB.with_values(model={"name": "gpt", "options": options}, data={"options": {"context": 64}})
    shape = transformer_shape(whole)
    assert shape is not None
    assert (shape.num_layers, shape.width, shape.num_heads, shape.sequence) == (4, 128, 4, 64)
    assert transformer_shape(JOB) is None
    lines = forecast(whole, gpu_cluster(), [8]).strategy
    assert len(lines) == 4


def test_a_disturbed_probe_is_marked_where_the_recommendation_stands_and_spread_opens_the_interval() -> None:
    quiet = cpu_cluster()
    timing = quiet.timings[0]
    noisy = tuple(dataclasses.replace(row, spread=0.3) for row in timing.micro_batches)
    disturbed = dataclasses.replace(timing, micro_batches=noisy, load=MachineLoad(2, 1.0, 0.0))
    found, other = (forecast(SMALL, dataclasses.replace(quiet, timings=(one,)), [1, 2]) for one in (timing, disturbed))
    assert other.verdict.startswith("These figures may be wrong: other programs used 1.0 of 2")
    assert other.verdict.endswith(found.verdict)
    assert other.rows[1].high_s / other.rows[1].low_s > 2.2 * found.rows[1].high_s / found.rows[1].low_s
