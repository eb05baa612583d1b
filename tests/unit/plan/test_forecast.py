"""A forecast of a probed job on 1, 2 … N devices: rows that add up, laws of scaling, a recommendation and why."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline
from paceline.cli.commands import COMMANDS
from paceline.cli.options import parse
from paceline.errors import ClusterError, JobError, ModelError, PacelineError
from paceline.plan.step_model import expected_maximum
from paceline.spec import Cluster, Job
from paceline.spec.forecast import Forecast, ForecastRow
from tests.unit.plan.clusters import GIB, cpu_cluster, forecast_of, gpu_cluster, with_nodes

JOB = Job(global_batch_size=4096, virtual_shards=4096)
SMALL = Job(global_batch_size=64, virtual_shards=64)
QUIET = Job(global_batch_size=128, virtual_shards=8, measure_noise=False)


def row_of(job: Job, cluster: Cluster, devices: int, **request: Any) -> ForecastRow:
    (row,) = forecast_of(job, cluster, [devices], **request).rows
    return row


def with_timing(cluster: Cluster, **values: Any) -> Cluster:
    return dataclasses.replace(cluster, timings=(dataclasses.replace(cluster.timings[0], **values),))


# --- rows ---


@given(
    st.sampled_from([64, 256, 4096]),
    st.lists(st.integers(1, 64), min_size=1, max_size=5, unique=True),
    st.sampled_from([2e8, 1e9, 12.5e9]),
    st.sampled_from(["none", "batch"]),
)
@settings(max_examples=25)
def test_every_row_adds_up(batch: int, devices: list[int], rate: float, grow: str) -> None:
    job = Job(global_batch_size=batch, virtual_shards=64)
    found = forecast_of(job, gpu_cluster(link_bytes_per_s=rate), [1, *devices], grow=grow)
    assert [row.devices for row in found.rows] == sorted({1, *devices})
    one = found.rows[0]
    for row in found.rows:
        assert 0 < row.low_s < row.step_s < row.high_s
        assert row.global_batch_size == batch * (row.devices if grow == "batch" else 1)
        assert row.samples_per_s == pytest.approx(row.global_batch_size / row.step_s)
        assert row.step_s == pytest.approx(row.compute_s + row.exposed_s + row.overhead_s)
        assert row.exposed_s >= 0 and row.overhead_s >= 0
        assert row.speedup == pytest.approx(row.samples_per_s / one.samples_per_s)
        assert row.efficiency == pytest.approx(row.speedup / row.devices)
        assert row.nodes == math.ceil(row.devices / 8)
        assert row.micro_batch_size * row.num_micro_batches * row.devices >= row.global_batch_size
        assert row.communication_s > 0 or row.devices == 1
    assert found.recommended in found.rows


def test_the_same_question_has_the_same_answer() -> None:
    assert forecast_of(JOB, gpu_cluster(), [1, 8, 16]) == forecast_of(JOB, gpu_cluster(), [1, 8, 16])


@given(st.integers(1, 16), st.sampled_from([2e8, 1e9, 12.5e9]))
@settings(max_examples=8)
@pytest.mark.budget(processor_s=10)
def test_a_faster_link_or_device_never_makes_a_step_slower(count: int, rate: float) -> None:
    slow = row_of(JOB, gpu_cluster(link_bytes_per_s=rate), count)
    assert row_of(JOB, gpu_cluster(link_bytes_per_s=2 * rate), count).step_s <= 1.03 * slow.step_s  # two fits
    assert row_of(JOB, gpu_cluster(link_bytes_per_s=rate, sample_s=5e-4), count).step_s < slow.step_s
    assert slow.efficiency <= 1.01  # a device beyond the first brings no more than the first


@given(st.integers(4, 11), st.integers(1, 16))
@settings(max_examples=20)
def test_more_samples_are_never_faster(power: int, count: int) -> None:
    fewer, more = (Job(global_batch_size=size, virtual_shards=16) for size in (2**power, 2 ** (power + 1)))
    assert row_of(fewer, gpu_cluster(), count).step_s <= row_of(more, gpu_cluster(), count).step_s


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_a_pass_takes_what_passes_of_its_size_took(count: int) -> None:
    row = row_of(Job(global_batch_size=512, virtual_shards=8), gpu_cluster(), count)
    assert row.compute_s == pytest.approx(row.num_micro_batches * (4e-3 + 1e-3 * row.micro_batch_size), rel=0.03)


def test_larger_passes_than_were_timed_are_extrapolated() -> None:
    found = forecast_of(Job(global_batch_size=600, virtual_shards=1), gpu_cluster(), [1])
    assert found.rows[0].compute_s == pytest.approx(4e-3 + 1e-3 * 600, rel=0.03)


@pytest.mark.parametrize(("count", "expected"), [(2, 0.56419), (4, 1.02938), (8, 1.42360), (16, 1.76599)])
def test_all_wait_for_the_slowest_worker_as_order_statistics_say(count: int, expected: float) -> None:
    """Harter 1961, "Expected values of normal order statistics": the mean of the largest of n normal numbers."""
    assert expected_maximum(count) == pytest.approx(expected, rel=1e-4)
    assert expected_maximum(1) == pytest.approx(0, abs=1e-9)


def test_workers_slow_each_other_as_they_were_seen_to() -> None:
    alone = cpu_cluster()
    slower = (
        dataclasses.replace(row, step_time_s=(1.5 if row.num_workers > 1 else 1.0) * (row.step_time_s or 0.0))
        for row in alone.timings[0].steps
    )
    beside = with_timing(alone, steps=tuple(slower))
    job = Job(global_batch_size=128, virtual_shards=16)
    free, slowed = (forecast_of(job, cluster, [1, 2]).rows for cluster in (alone, beside))
    assert slowed[0].step_s == pytest.approx(free[0].step_s, rel=0.05)
    assert slowed[1].step_s == pytest.approx(1.5 * free[1].step_s, rel=0.1)


def test_rows_of_several_passes_tell_the_optimizer_from_passes() -> None:
    assert row_of(QUIET, gpu_cluster(1, update_s=0.05), 1).overhead_s == pytest.approx(0.05, rel=0.1)


def test_a_slow_loader_bounds_the_step() -> None:
    few, fast = dataclasses.replace(JOB, virtual_shards=16), gpu_cluster()
    waiting = (dataclasses.replace(row, loading_s=0.9 * (row.step_time_s or 0.0)) for row in fast.timings[0].steps)
    bound, free = (row_of(few, cluster, 1) for cluster in (with_timing(fast, steps=tuple(waiting)), fast))
    assert (bound.bound_by, free.bound_by) == ("loader", "compute")
    assert bound.loader_s == pytest.approx(0.9 * bound.step_s, rel=0.05) and free.loader_s == 0


def test_a_slow_network_bounds_the_step_and_a_wire_format_halves_what_it_carries() -> None:
    cluster = gpu_cluster(link_bytes_per_s=1e8)
    plain = row_of(SMALL, cluster, 16)
    assert plain.bound_by == "communication"
    rounded = row_of(SMALL.with_values(aggregation={"wire": "bfloat16"}), cluster, 16)
    assert rounded.exposed_s <= 1.05 * plain.exposed_s / 2 and rounded.communication_s < plain.communication_s


@pytest.mark.parametrize("method", ["local_sgd", "diloco"])
def test_outer_steps_every_ten_steps_cost_a_tenth(method: str) -> None:
    cluster = gpu_cluster(link_bytes_per_s=1e9)
    rare = SMALL.with_values(aggregation={"method": method, "sync_every": 10})
    every_step_s = row_of(SMALL, cluster, 16).communication_s
    assert row_of(rare, cluster, 16).communication_s < every_step_s / 5


def test_a_virtual_shard_is_a_pass_and_bitwise_parity_sums_by_the_fixed_tree() -> None:
    job = Job(global_batch_size=64, virtual_shards=8, parity="bitwise")
    for row, passes in zip(forecast_of(job, cpu_cluster(2), [1, 2, 4]).rows, (8, 4, 2), strict=True):
        assert (row.micro_batch_size, row.num_micro_batches) == (8, passes)
        assert row.algorithm == "tree_exact" or row.devices == 1


@pytest.mark.parametrize("parity", ["numeric", "bitwise"])
def test_bitwise_sums_begin_when_all_is_computed(parity: str) -> None:
    job = Job(global_batch_size=64, virtual_shards=8).with_values(parity=parity)
    row = row_of(job, gpu_cluster(), 2)
    assert (row.exposed_s == pytest.approx(row.communication_s, rel=1e-6)) == (parity == "bitwise")


def test_workers_on_processors_share_the_memory_of_their_node() -> None:
    cluster = cpu_cluster(num_parameters=40_000_000)
    passes = [
        dataclasses.replace(one, peak_memory_bytes=10**9 + 2 * 10**7 * one.micro_batch_size)
        for one in cluster.timings[0].steps
    ]
    small, large = (with_nodes(with_timing(cluster, steps=passes), memory_bytes=int(gib * GIB)) for gib in (1.5, 8))
    job = Job(global_batch_size=64, virtual_shards=8)
    assert not row_of(job, large, 2).objection
    with pytest.raises(PacelineError, match="GiB"):
        forecast_of(job, small, [2])


def test_batches_that_grow_keep_the_batch_of_a_device() -> None:
    rows = forecast_of(Job(global_batch_size=128, virtual_shards=8), gpu_cluster(), [1, 4, 16], grow="batch").rows
    assert [row.global_batch_size for row in rows] == [128, 512, 2048]
    assert [row.micro_batch_size for row in rows] == [16, 16, 16]
    assert rows[2].speedup > 14.5


def test_more_than_was_measured_is_less_sure() -> None:
    """Steps of 1 and of 16 devices were timed."""
    *timed, further = (row.high_s / row.low_s for row in forecast_of(JOB, gpu_cluster(), [1, 16, 256]).rows)
    assert max(timed) < further


def test_a_disturbed_probe_is_named_beside_the_recommendation_and_widens_the_interval() -> None:
    quiet = cpu_cluster()
    noisy = tuple(dataclasses.replace(one, spread=0.3) for one in quiet.timings[0].steps)
    found, other = (forecast_of(SMALL, cluster, [1, 2]) for cluster in (quiet, with_timing(quiet, steps=noisy)))
    assert "30 %" in other.verdict and "idle" in other.verdict and found.verdict in other.verdict
    assert other.rows[1].high_s / other.rows[1].low_s > 2 * found.rows[1].high_s / found.rows[1].low_s


# --- target, price, noise ---


def test_time_and_cost_to_a_target() -> None:
    for row in forecast_of(JOB, gpu_cluster(), [1, 16], price=2.5, target_samples=1e8).rows:
        assert row.samples_to_target == 1e8
        assert row.time_to_target_s is not None
        assert row.cost_to_target == pytest.approx(2.5 * row.devices * row.time_to_target_s / 3600)
        assert row.cost_per_million_samples == pytest.approx(2.5 * row.devices / 3600 * 1e6 / row.samples_per_s)
        assert row.time_to_target_s == pytest.approx(1e8 / row.samples_per_s)


def test_a_noise_scale_counts_samples_as_mccandlish_does() -> None:
    """Samples to a target grow as 1 + B / B_noise (McCandlish et al. 2018, equation 2.11)."""
    job = Job(global_batch_size=128, virtual_shards=8)
    found = forecast_of(job, gpu_cluster(), [1, 16], grow="batch", noise_scale=1000, target_samples=1e6)
    one, sixteen = found.rows
    assert one.samples_to_target == pytest.approx(1e6)
    assert sixteen.samples_to_target == pytest.approx(1e6 * (1 + 2.048) / (1 + 0.128))
    assert sixteen.useful_efficiency is not None and sixteen.useful_efficiency < sixteen.efficiency


def test_the_length_of_the_run_is_that_of_its_epochs() -> None:
    cluster = gpu_cluster(1, num_samples=50_000)
    assert forecast_of(Job(epochs=3), cluster, [1]).run_samples == 150_000
    assert forecast_of(Job(epochs=3), gpu_cluster(1), [1]).run_samples is None


@pytest.mark.parametrize(
    ("price", "amount", "currency"), [(None, None, ""), (2.5, 2.5, ""), ("2.5 USD", 2.5, "USD"), ("3 EUR", 3.0, "EUR")]
)
def test_a_price_may_name_its_currency(price: object, amount: float | None, currency: str) -> None:
    found = forecast_of(JOB, gpu_cluster(1), [1], price=price)
    assert (found.price_per_device_hour, found.currency) == (amount, currency)


def test_past_errors_are_told_as_the_bound_that_nine_of_ten_keep() -> None:
    errors = tuple(percent / 100 for percent in (1, -2, 3, 1, 2, 1, 0, 1, 4, 30))
    found = forecast_of(JOB, dataclasses.replace(gpu_cluster(1), forecast_errors=errors), [1])
    assert "4 %" in found.past_error and "10 runs" in found.past_error
    assert forecast_of(JOB, gpu_cluster(1), [1]).past_error == ""


# --- the recommendation ---


@given(
    st.sampled_from([64, 256, 1024, 4096]),
    st.sampled_from([1e7, 1e8, 1e9, 12.5e9]),
    st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]),
    st.sampled_from([None, 100.0, 10_000.0]),
)
@settings(max_examples=40)
def test_the_recommendation_is_efficient_and_nothing_efficient_is_clearly_faster(
    batch: int, rate: float, floor: float, noise_scale: float | None
) -> None:
    job = Job(global_batch_size=batch, virtual_shards=64)
    found = forecast_of(
        job,
        gpu_cluster(link_bytes_per_s=rate),
        [1, 2, 3, 4, 7, 8, 14, 16, 28, 32],
        efficiency_floor=floor,
        noise_scale=noise_scale,
    )
    possible = [row for row in found.rows if not row.objection]

    def worth(row: ForecastRow) -> tuple[float, float]:
        """Efficiency and useful samples/s."""
        useful = row.useful_efficiency
        return (
            (row.efficiency, row.samples_per_s)
            if useful is None
            else (min(row.efficiency, useful), useful * row.devices)
        )

    efficient = [row for row in possible if worth(row)[0] >= floor - 1e-9] or possible[:1]
    chosen = found.recommended
    assert chosen in efficient
    assert worth(chosen)[1] >= 0.97 * max(worth(row)[1] for row in efficient) * (1 - 1e-9)
    assert all(worth(row)[1] < worth(chosen)[1] for row in efficient if row.devices < chosen.devices)
    assert f"{chosen.devices} device" in found.verdict


def test_a_small_model_on_a_slow_link_stays_on_one_device() -> None:
    cluster = cpu_cluster(4)
    single = with_nodes(cluster, devices=cluster.nodes[0].devices[:1])
    few = dataclasses.replace(SMALL, virtual_shards=4)
    found = forecast_of(few, single, [1, 2, 3, 4])
    assert found.recommended_devices == 1
    assert "1 device" in found.verdict and "communication" in found.reason and "50 %" in found.reason
    fast = with_nodes(cpu_cluster(4, link_bytes_per_s=10e9), devices=cluster.nodes[0].devices[:1])
    assert forecast_of(dataclasses.replace(few, global_batch_size=2048), fast, [1, 2, 4]).recommended_devices == 4


def test_a_batch_beyond_the_noise_scale_takes_fewer_devices() -> None:
    job = Job(global_batch_size=256, virtual_shards=8)
    counts = [1, 2, 4, 8, 16]
    assert forecast_of(job, gpu_cluster(), counts, grow="batch").recommended_devices == 16
    found = forecast_of(job, gpu_cluster(), counts, grow="batch", noise_scale=500)
    assert found.recommended_devices < 8
    assert "useful samples" in found.reason and "50 %" in found.reason
    too_large = forecast_of(JOB, gpu_cluster(), counts, noise_scale=256)
    assert too_large.recommended_devices == 1 and too_large.recommended.useful_efficiency == pytest.approx(1 / 17)


def test_workers_that_outnumber_cores_stay_on_the_node_on_which_they_were_timed() -> None:
    """Once the second of two was planned on another node, of whose links nothing was known."""
    cluster = cpu_cluster(1)
    one_core = with_nodes(cluster, devices=cluster.nodes[0].devices[:1])
    assert row_of(SMALL, one_core, 2).nodes == 1


def test_what_the_job_rules_out_is_not_recommended_but_said_with_its_gain() -> None:
    found = forecast_of(dataclasses.replace(JOB, virtual_shards=8), gpu_cluster(), [1, 8, 16])
    assert found.recommended_devices == 8
    assert "virtual_shards = 16" in found.rows[2].objection
    assert "16 devices" in found.reason and "1.9" in found.reason and "virtual_shards = 16" in found.reason


def test_of_nearly_equal_speeds_the_fewest_devices_are_recommended() -> None:
    """Two shards for the busiest worker with 4, 5, 6 and 7 devices."""
    job = Job(global_batch_size=256, virtual_shards=8)
    assert forecast_of(job, gpu_cluster(), [1, 4, 5, 6, 7]).recommended_devices == 4


def test_a_single_number_of_devices_is_recommended() -> None:
    found = forecast_of(JOB, gpu_cluster(1), [1])
    assert found.recommended_devices == 1 and "samples/s" in found.verdict


def test_speed_ups_are_over_one_device_whatever_counts_are_asked_for() -> None:
    found, all_rows = forecast_of(JOB, gpu_cluster(), [4, 8]), forecast_of(JOB, gpu_cluster(), [1, 4, 8]).rows
    assert found.base_devices == 1 and f"{found.rows[1].speedup:.2f}x the speed of one" in found.verdict
    assert [1, *(row.speedup for row in found.rows)] == [row.speedup for row in all_rows]


def test_a_long_range_has_both_ends_few_rows_and_the_powers_of_two() -> None:
    job = Job(global_batch_size=2**16, virtual_shards=2**12)
    found = forecast_of(job, gpu_cluster(), "1..4096", target_samples=1e9)
    counts = [row.devices for row in found.rows]
    assert counts[:64] == list(range(1, 65)) and counts[-1] == 4096 and len(counts) < 120
    assert {2**power for power in range(13)} <= set(counts)


# --- the plan, and memory ---


def test_the_plan_of_the_recommended_row_can_be_launched() -> None:
    job = Job(global_batch_size=256, virtual_shards=8)
    planned = paceline.plan(job, cluster=gpu_cluster(), devices=[1, 4, 16])
    assert planned.plan is not None
    row = planned.forecast.recommended
    assert planned.plan.world_size == row.devices == 4
    assert planned.plan.device_kind == "cuda"
    assert planned.plan.forecast_samples_per_s == pytest.approx(row.samples_per_s)
    assert planned.plan.nodes[0].devices == (0, 1, 2, 3)
    assert paceline.plan(JOB, cluster=gpu_cluster(1, link_bytes_per_s=1e9), devices=[64], link_rate=1e12).plan is None


def test_what_does_not_fit_is_refused_with_both_numbers_and_smaller_shards_help() -> None:
    job = Job(global_batch_size=64, virtual_shards=8)
    cluster = gpu_cluster(memory_bytes=GIB)  # a shard of eight samples takes 0.7 GB beside 0.5 GB of state
    with pytest.raises(JobError, match=r"8 samples .*1\.\d+ GiB"):
        forecast_of(job, cluster, [1])
    row = row_of(dataclasses.replace(job, virtual_shards=32), cluster, 1)
    assert (row.micro_batch_size, row.objection) == (2, "")


GPT = Job.from_mapping(
    {
        "global_batch_size": 64,
        "virtual_shards": 64,
        "model": {"name": "gpt", "options": {"num_layers": 8, "width": 1024, "num_heads": 16}},
        "data": {"options": {"context": 128}},
        "optim": {"name": "adamw"},
    }
)


def test_a_model_that_does_not_fit_on_a_device_gets_a_mesh_that_does() -> None:
    """16 bytes a parameter make 16 GB of state; a device has 12 GiB."""
    cluster = gpu_cluster(1, num_parameters=1_000_000_000, sample_bytes=10_000_000, memory_bytes=12 * GIB)
    planned = paceline.plan(GPT, cluster=cluster, devices=[1, 8])
    assert planned.forecast.rows[0].objection
    assert planned.forecast.recommended_devices == 8
    assert planned.plan is not None and planned.plan.mesh is not None
    assert planned.plan.mesh.num_workers == 8 and not planned.plan.mesh.is_plain
    memory_bytes = planned.forecast.rows[1].memory_bytes
    assert memory_bytes is not None and memory_bytes < 12 * GIB
    assert str(planned.plan.mesh) in " ".join(planned.forecast.strategy)
    roomy = paceline.plan(SMALL, cluster=gpu_cluster(1), devices=[8])
    assert roomy.plan is not None and roomy.plan.mesh is None


def test_pipelines_and_tensor_parallelism_are_compared_where_the_model_is_traced_or_does_not_fit() -> None:
    """75 million parameters take 0.9 GB, beside 0.2 GB of everything else."""
    job = SMALL.with_values(model={"name": "mlp", "options": {"hidden": 1_000_000}})
    known: dict[str, Any] = {"num_parameters": 75_000_010, "sample_bytes": 1000}
    for room, traces, is_hinted in ((80 * GIB, {}, True), (80 * GIB, {"trace": True}, False), (GIB, {}, False)):
        cluster = gpu_cluster(1, memory_bytes=room, **known)
        strategy = forecast_of(job, cluster, [1, 8], **traces).strategy
        assert len(strategy) > 1 and ("--trace" in strategy[-1]) == is_hinted, strategy
    assert parse("plan", COMMANDS["plan"], ["digits-lenet", "--trace"])["trace"] is True


def mappings(split: str) -> list[dict[str, int]]:
    """A data set of whose samples a trace can take none."""
    return [{"number": 1}]


def test_a_model_that_does_not_fit_and_cannot_be_traced_gets_the_meshes_that_need_no_trace() -> None:
    job = SMALL.with_values(data=f"{__name__}:mappings")
    cluster = gpu_cluster(1, num_parameters=75_000_010, memory_bytes=GIB)
    assert "--trace" in forecast_of(job, cluster, [1, 8]).strategy[-1]
    with pytest.raises(ModelError, match="pairs"):
        forecast_of(job, cluster, [1, 8], trace=True)


def test_the_forecast_that_is_shown_is_that_of_the_plan_and_none_is_checked_of_a_mesh() -> None:
    planned = paceline.plan(GPT, cluster=gpu_cluster(1), devices=[1, 8])
    assert planned.plan is not None and planned.plan.mesh is None
    assert planned.plan.forecast_samples_per_s == planned.forecast.recommended.samples_per_s
    large = gpu_cluster(1, num_parameters=1_000_000_000, sample_bytes=10_000_000, memory_bytes=12 * GIB)
    meshed = paceline.plan(GPT, cluster=large, devices=[8])
    assert meshed.plan is not None and meshed.plan.mesh is not None
    assert meshed.plan.forecast_samples_per_s is None
    assert meshed.forecast.recommended.placement == str(meshed.plan.mesh)
    assert any("nobody timed one" in sentence for sentence in meshed.forecast.assumptions)


# --- what is not known ---


@pytest.mark.parametrize(
    ("cluster", "devices", "error", "words"),
    [
        (dataclasses.replace(gpu_cluster(), timings=()), [1], ClusterError, ["'job'", "probe"]),
        (gpu_cluster(1), [1, 16], ClusterError, ["16 devices", "8", "link_rate"]),
        (Cluster(()), [1], ClusterError, ["no devices"]),
    ],
)
def test_what_was_not_measured_is_named_with_what_to_do(
    cluster: Cluster, devices: list[int], error: type[PacelineError], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        forecast_of(SMALL, cluster, devices)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_rate_that_is_given_stands_for_a_network_and_is_an_assumption() -> None:
    found = forecast_of(JOB, gpu_cluster(1), [1, 16], link_rate=12.5e9, devices_per_node=4)
    assert found.rows[1].nodes == 3  # the eight that there are, and two of four
    assert any("12.5 GB/s" in sentence for sentence in found.assumptions)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "resnet18"}, ["model.name", "'lenet'", "'resnet18'"]),
        ({"data": "cifar10"}, ["data.name", "'digits'", "'cifar10'"]),
        ({"precision": "bfloat16"}, ["precision", "'float32'", "'bfloat16'"]),
        ({"optim": {"name": "adamw"}}, ["optim.name", "'sgd'", "'adamw'"]),
    ],
)
def test_a_job_that_was_probed_with_other_settings_asks_for_a_new_probe(
    changes: dict[str, object], words: list[str]
) -> None:
    timed = JOB.with_values(model="lenet", precision="float32", optim={"name": "sgd"})
    cluster = gpu_cluster(1, settings=timed.timed_settings)
    alike = timed.with_values(precision="auto", global_batch_size=8192, epochs=7, optim={"lr": 3.0})
    assert forecast_of(alike, cluster, [1]).rows
    with pytest.raises(ClusterError) as caught:
        forecast_of(timed.with_values(**changes), cluster, [1])
    assert all(word in str(caught.value) for word in (*words, "probe")), caught.value


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"grow": "nodes"}, ["grow", "'nodes'"]),
        ({"efficiency_floor": 1.5}, ["efficiency_floor"]),
        ({"efficiency_floor": -0.1}, ["efficiency_floor"]),
        ({"price": -1}, ["price"]),
        ({"price": "cheap"}, ["price", "cheap"]),
        ({"noise_scale": 0}, ["noise_scale"]),
        ({"noise_scale": math.nan}, ["noise_scale"]),
        ({"target_samples": -1}, ["target_samples"]),
        ({"link_rate": 0}, ["link_rate"]),
        ({"devices_per_node": 0}, ["devices_per_node"]),
        ({"devices": [0]}, ["devices", "0"]),
        ({"devices": "3..1"}, ["devices", "3..1"]),
        ({"devices": "one"}, ["devices", "one"]),
        ({"devices": []}, ["devices"]),
    ],
)
def test_an_invalid_request_is_refused(request_: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(JobError) as caught:
        paceline.plan(JOB, cluster=gpu_cluster(1), **{"devices": [1], **request_})
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_plan_is_written_as_files_that_read_back(tmp_path: Any) -> None:
    planned = paceline.plan(JOB, cluster=gpu_cluster(), devices=[1, 8], out=tmp_path / "plan")
    assert sorted(path.name for path in (tmp_path / "plan").iterdir()) == ["forecast.json", "plan.html", "plan.json"]
    assert Forecast.load(tmp_path / "plan" / "forecast.json") == planned.forecast
    assert paceline.Plan.load(tmp_path / "plan" / "plan.json") == planned.plan
