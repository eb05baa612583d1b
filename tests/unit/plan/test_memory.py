"""How much memory a device needs: the published figures, and laws that any model and mesh obey."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.memory import DeviceMemory, fits
from paceline.spec import Job, Mesh
from paceline.spec.forecast import LayerCost
from tests.unit.plan.calls import memory
from tests.unit.plan.clusters import GIB, forecast_of, gpu_cluster

counts = st.integers(1, 512)
meshes = st.builds(Mesh, st.integers(1, 8), counts, st.integers(1, 8), st.integers(1, 8), st.integers(1, 3))


def mixed_adam(num_parameters: float, mesh: Mesh, num_passes: int = 1) -> DeviceMemory:
    """16-bit parameters and gradients, and float32 copies, momentum and variance: K = 12 of the ZeRO paper."""
    return memory(num_parameters, mesh, num_passes=num_passes, parameter_bytes=2.0, optimizer_bytes=12.0)


# Rajbhandari et al. 2020, "ZeRO", table 1: GB a device by degree of data parallelism, for stages 1, 2 and 3.
ZERO_TABLE = [
    (7.5e9, 1, (120, 120, 120)),
    (7.5e9, 4, (52.5, 41.3, 30)),
    (7.5e9, 16, (35.6, 21.6, 7.5)),
    (7.5e9, 64, (31.4, 16.6, 1.88)),
    (7.5e9, 256, (30.4, 15.4, 0.47)),
    (7.5e9, 1024, (30.1, 15.1, 0.12)),
    (128e9, 4, (896, 704, 512)),
    (128e9, 64, (536, 284, 32)),
    (128e9, 1024, (513, 257, 2)),
    (1e12, 4, (7000, 5500, 4000)),
    (1e12, 64, (4187, 2218, 250)),
    (1e12, 1024, (4011, 2013, 15.6)),
]


@pytest.mark.parametrize(("num_parameters", "dp", "stages_gb"), ZERO_TABLE)
def test_states_are_those_of_the_zero_paper(num_parameters: float, dp: int, stages_gb: tuple[float, ...]) -> None:
    for stage, gb in enumerate(stages_gb, start=1):
        found = mixed_adam(num_parameters, Mesh(fsdp=dp, zero_stage=stage), num_passes=2)
        # The table has two or three digits, some cut instead of rounded.
        assert found.state_bytes / 1e9 == pytest.approx(gb, rel=5e-3, abs=0.006)


@pytest.mark.parametrize("dp", [1, 8, 64])
def test_replicas_hold_sixteen_bytes_a_parameter_however_many_there_are(dp: int) -> None:
    assert mixed_adam(7.5e9, Mesh(dp=dp)).state_bytes == pytest.approx(120e9)


@pytest.mark.parametrize(
    ("optim", "precision", "bytes_a_parameter"),
    [
        ({"name": "sgd", "momentum": 0.0}, "float32", 8),
        ({"name": "sgd"}, "float32", 12),
        ({"name": "rmsprop"}, "float32", 12),
        ({"name": "adam"}, "float32", 16),
        ({"name": "adamw"}, "float32", 16),
        ({"name": "adamw"}, "bfloat16", 16),
        ({"name": "adamw"}, "float64", 32),
    ],
)
def test_the_optimizer_decides_what_a_parameter_takes(
    optim: dict[str, object], precision: str, bytes_a_parameter: int
) -> None:
    """Seen as the difference between a plan with a hundred million parameters more and one without."""
    job = Job.from_mapping({"global_batch_size": 8, "optim": optim, "precision": precision})

    def needed(num_parameters: int) -> float:
        # The peaks of timed steps have all of it; activations are nothing beside them.
        cluster = gpu_cluster(1, num_parameters=num_parameters, sample_bytes=0)
        passes = tuple(
            dataclasses.replace(one, peak_memory_bytes=bytes_a_parameter * num_parameters + one.micro_batch_size)
            for one in cluster.timings[0].steps
        )
        timing = dataclasses.replace(cluster.timings[0], steps=passes)
        found = forecast_of(job, dataclasses.replace(cluster, timings=(timing,)), [1]).rows[0].memory_bytes
        assert found is not None
        return found

    assert (needed(200_000_000) - needed(100_000_000)) / 1e8 == pytest.approx(bytes_a_parameter, rel=0.01)


@given(meshes, st.integers(1, 64))
def test_more_sharding_never_needs_more_state_and_nothing_is_lost(mesh: Mesh, size: int) -> None:
    def state(**degrees: int) -> float:
        one = dataclasses.replace(mesh, **degrees)
        return memory(1e9, one, sample_bytes=1e6, micro_batch_size=size, optimizer_bytes=8.0).state_bytes

    found = [state(fsdp=1, dp=mesh.num_assignments), *(state(zero_stage=stage) for stage in (1, 2, 3))]
    assert found == sorted(found, reverse=True)
    assert found[3] * mesh.num_workers / mesh.dp == pytest.approx(16e9)


@given(meshes, st.integers(1, 64), st.integers(1, 16))
def test_a_larger_micro_batch_never_needs_less(mesh: Mesh, size: int, num_passes: int) -> None:
    one, other = (
        memory(1e8, mesh, sample_bytes=1e6, micro_batch_size=s, num_passes=num_passes) for s in (size, size + 1)
    )
    assert one.total_bytes <= other.total_bytes
    assert one.state_bytes == other.state_bytes
    assert one.total_bytes == pytest.approx(one.state_bytes + one.activation_bytes + one.moving_bytes)


@given(st.integers(1, 16), st.integers(1, 64), st.integers(1, 64))
def test_a_full_pipeline_holds_as_many_activations_as_one_device(pp: int, more: int, size: int) -> None:
    """1F1B (Narayanan et al. 2021, 2.2.1): the first stage keeps one micro-batch for each stage."""
    piped = memory(1e8, Mesh(pp=pp), sample_bytes=1e6, micro_batch_size=size, num_passes=pp + more)
    alone = memory(1e8, Mesh(), sample_bytes=1e6, micro_batch_size=size)
    assert piped.activation_bytes == pytest.approx(alone.activation_bytes)
    assert piped.state_bytes == pytest.approx(alone.state_bytes / pp)


@pytest.mark.parametrize(("num_shards", "copies"), [(1, 2), (2, 3), (4, 4), (8, 5)])
def test_bitwise_parity_holds_partial_sums_of_1_2_4_shards(num_shards: int, copies: int) -> None:
    found = memory(1e8, Mesh(dp=2), num_passes=num_shards, is_bitwise=True)
    assert found.gradient_bytes == pytest.approx(copies * 4e8)


def test_what_tensor_groups_cannot_divide_is_whole_on_every_worker() -> None:
    layers = (
        LayerCost("", 1.0, 1e6, 1.0, 8.0, num_tensor_slices=6),
        LayerCost("", 1.0, 1e6, 1.0, 8.0, num_tensor_slices=4),
    )
    assert memory(2e6, Mesh(tp=4), layers=layers).parameter_bytes == pytest.approx(4 * 1.25e6)


def test_recomputing_keeps_what_layers_are_given_and_one_layer() -> None:
    """Chen et al. 2016."""
    layers = (LayerCost("", 1.0, 1e6, 100.0, 10.0),) * 8
    kept, again = (
        memory(8e6, Mesh(), sample_bytes=800.0, micro_batch_size=3, num_passes=2, layers=layers, recompute=flag)
        for flag in (False, True)
    )
    assert kept.activation_bytes == pytest.approx(3 * 800)
    assert again.activation_bytes == pytest.approx(3 * (70 + 100))


def test_what_stands_in_no_list_of_layers_is_gathered_through_all_of_backward() -> None:
    """An embedding of 8 MB before four layers of 4 MB, of which two are there with their gradients."""
    block = LayerCost("", 1.0, 4e6, 1e6)

    def moving(root_bytes: float, last: LayerCost = block) -> float:
        layers = (LayerCost("", 1.0, 8e6, 0.0, root_bytes=root_bytes), *[block] * 3, last)
        return memory(6e6, Mesh(fsdp=4), sample_bytes=4e6, layers=layers).moving_bytes

    assert moving(8e6) == pytest.approx(8e6 + 4 * 4e6)
    tied = LayerCost("", 1.0, 4e6, 1e6, tied_bytes=8e6)  # two gradients and their sum, beside the last that leave
    assert moving(8e6, tied) == pytest.approx(8e6 + 3 * 8e6 + 4e6)
    assert moving(0.0) == pytest.approx(2 * 8e6 + 4e6)  # while backward is in the embedding, the last gradients leave


def test_a_pipeline_has_a_buffer_for_each_message_of_a_step() -> None:
    """The first of two workers gets a gradient for each micro-batch, as large as what it sends."""
    layers = (LayerCost("", 1.0, 1e6, 100.0, 10.0),) * 2
    some, more = (
        memory(2e6, Mesh(pp=2), sample_bytes=200.0, micro_batch_size=3, num_passes=count, layers=layers)
        for count in (4, 9)
    )
    assert more.activation_bytes - some.activation_bytes == pytest.approx(5 * 3 * 10)


def test_some_memory_of_a_device_is_left_for_the_driver() -> None:
    assert fits(0.9 * GIB, GIB) and not fits(0.97 * GIB, GIB) and not fits(1.01 * GIB, GIB) and fits(1e30, math.inf)
