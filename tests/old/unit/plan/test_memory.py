from __future__ import annotations

import dataclasses
import math
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.memory import (
    TransformerShape,
    device_memory,
    fits,
    measured_activations,
    state_bytes,
    transformer_layers,
)
from paceline.plan.peak_memory import USABLE_FRACTION, StateBytes
from paceline.spec import Job, Mesh, MicroBatchTiming, PipelineSpec
from paceline.spec.model_cost import Activations, DeviceMemory, LayerCost, Layers

NOTHING = Activations(0.0)
GPT3 = TransformerShape(num_layers=96, width=12288, num_heads=96, sequence=2048)
MIXED_ADAM = StateBytes(2.0, 2.0, 12.0)
"""Adam over 16-bit parameters: a float32 copy, momentum and variance (Rajbhandari et al. 2020, K = 12)."""

counts = st.integers(1, 512)
meshes = st.builds(Mesh, st.integers(1, 8), counts, st.integers(1, 8), st.integers(1, 8), st.integers(1, 3))


# Rajbhandari et al. 2020, table 1: GB a device by degree of data parallelism, for stages 1, 2 and 3.
@pytest.mark.parametrize(
    ("num_parameters", "dp", "stages_gb"),
    [
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
    ],
)
def test_states_are_those_of_the_zero_paper(num_parameters: float, dp: int, stages_gb: tuple[float, ...]) -> None:
    for stage, gb in enumerate(stages_gb, start=1):
        mesh = Mesh(fsdp=dp, zero_stage=stage)
        found = device_memory(num_parameters, MIXED_ADAM, mesh, NOTHING, 1, num_micro_batches=2)
        # The table has two or three digits, some cut instead of rounded.
        assert found.state_bytes / 1e9 == pytest.approx(gb, rel=5e-3, abs=0.006)


def test_plain_data_parallelism_holds_sixteen_bytes_a_parameter() -> None:
    assert device_memory(7.5e9, MIXED_ADAM, Mesh(dp=64), NOTHING, 1).state_bytes == pytest.approx(120e9)


def test_a_transformers_layers_keep_what_the_paper_counts() -> None:
    """Korthikanti et al. 2022, table 2: s h (34 + 5 a s / h) bytes a sample; GPT-3 has 34 + 80."""
    layers = transformer_layers(GPT3, 175e9)
    assert len(layers) == 96
    assert layers[0].activation_bytes == 2048 * 12288 * (34 + 80)
    assert sum(layer.parameter_bytes for layer in layers) == pytest.approx(175e9)


@given(meshes, st.integers(1, 64))
def test_more_sharding_never_needs_more_state(mesh: Mesh, size: int) -> None:
    def state(**degrees: int) -> float:
        one = dataclasses.replace(mesh, **degrees)
        return device_memory(1e9, MIXED_ADAM, one, Activations(1e6), size).state_bytes

    found = [state(fsdp=1, dp=mesh.num_assignments), *(state(zero_stage=stage) for stage in (1, 2, 3))]
    assert found == sorted(found, reverse=True)
    # Nothing is lost: the workers of a replica hold the whole state.
    assert found[3] * mesh.num_workers / mesh.dp == pytest.approx(16e9)


def test_the_stage_with_the_largest_layers_is_the_fullest() -> None:
    small, large = LayerCost("", 1.0, 1e6, 1.0, 8.0), LayerCost("", 1.0, 9e6, 1.0, 8.0)
    found = device_memory(20e6, StateBytes(), Mesh(pp=2), NOTHING, 1, layers=(small, small, large, large))
    assert found.state_bytes == pytest.approx(12 * 18e6)
    gathered = device_memory(20e6, StateBytes(), Mesh(fsdp=2), NOTHING, 1, layers=(small, small, large, large))
    # Backward is in the first of the large ones: its parameters are there, and those of the one before it.
    assert gathered.gathered_bytes == pytest.approx(4 * 10e6)
    # Its gradients too, and those of the last one on their way; of 11 million there are none yet.
    assert gathered.transit_bytes == pytest.approx(4 * (18e6 - 11e6 / 2))


def test_a_worker_with_two_stages_has_those_that_are_apart() -> None:
    """Four layers on two workers: the first has the first and the third, and of the first keeps more micro-batches."""
    kept = (100.0, 1.0, 10.0, 1.0)
    layers = tuple(LayerCost(str(place), 1.0, 0.0, one, 0.0) for place, one in enumerate(kept))
    pipeline = PipelineSpec(schedule="interleaved", stages_per_worker=2)
    memory = device_memory(
        0.0, StateBytes(), Mesh(pp=2), Activations(sum(kept)), 1, num_micro_batches=4, layers=layers, pipeline=pipeline
    )
    assert [[layer.name for layer in stage] for stage in memory.stages] == [["0"], ["1"], ["2"], ["3"]]
    # Five passes at once: of the first layer's at most four, and one of the third's, where its backward begins.
    assert memory.activation_bytes == 4 * 100 + 10


@pytest.mark.parametrize(("kept_bytes", "moment_of_peak"), [(1e3, "the last backward pass"), (1e7, "full")])
def test_replicas_of_a_pipeline_copy_gradients_when_it_runs_empty(kept_bytes: float, moment_of_peak: str) -> None:
    """Stages of two layers; the first keeps two micro-batches, and the copies of gradients come with its last one."""
    layers = (LayerCost("", 1.0, 4e6, kept_bytes, 0.0, largest_parameter_bytes=4e6),) * 4
    memory = device_memory(
        4e6, StateBytes(), Mesh(dp=2, pp=2), Activations(4 * kept_bytes), 1, num_micro_batches=4, layers=layers
    )
    if moment_of_peak == "full":
        assert memory.activation_bytes == pytest.approx(4 * kept_bytes)
        assert memory.transit_bytes == pytest.approx(4e6)  # a gradient that is added to that of the passes before
    else:
        assert memory.activation_bytes <= 2 * kept_bytes
        assert memory.transit_bytes == pytest.approx(8e6)  # copies of both; what was added is gone when it is copied


def test_what_tensor_groups_cannot_share_out_is_whole_on_every_worker() -> None:
    layers = (
        LayerCost("", 1.0, 1e6, 1.0, 8.0, num_tensor_slices=6),
        LayerCost("", 1.0, 1e6, 1.0, 8.0, num_tensor_slices=4),
    )
    found = device_memory(2e6, StateBytes(), Mesh(tp=4), NOTHING, 1, layers=layers)
    assert found.parameter_bytes == pytest.approx(4 * 1.25e6)


def test_recomputing_keeps_the_outputs_of_layers_and_one_layer() -> None:
    layers = (LayerCost("", 1.0, 1e6, 100.0, 10.0),) * 8
    kept, again = (
        device_memory(
            8e6, StateBytes(), Mesh(), Activations(800.0), 3, num_micro_batches=2, layers=layers, recompute=flag
        ).activation_bytes
        for flag in (False, True)
    )
    assert kept == pytest.approx(3 * 800)
    assert again == pytest.approx(3 * (80 + 100))


@given(meshes, st.integers(1, 64), st.integers(1, 16))
def test_a_larger_micro_batch_needs_more(mesh: Mesh, size: int, num_micro_batches: int) -> None:
    one, other = (
        device_memory(1e8, StateBytes(), mesh, Activations(1e6, 1e5), s, num_micro_batches=num_micro_batches)
        for s in (size, size + 1)
    )
    assert one.total_bytes <= other.total_bytes
    assert one.state_bytes == other.state_bytes
    # Where the end of a step, with all gradients and copies of them, does not need more than activations do.
    is_at_the_end = one.activation_bytes == other.activation_bytes and one.transit_bytes == other.transit_bytes
    assert one.total_bytes < other.total_bytes or is_at_the_end


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(fsdp=4), Mesh(fsdp=4, zero_stage=2), Mesh(tp=4)])
def test_in_a_step_of_one_pass_activations_are_gone_when_the_last_gradients_come(mesh: Mesh) -> None:
    layers = (LayerCost("", 1.0, 4e6, 8e6, 1e6),) * 4
    one, two = (
        device_memory(4e6, StateBytes(), mesh, Activations(32e6), 1, num_micro_batches=number, layers=layers)
        for number in (1, 2)
    )
    to_come = (two.total_bytes - two.transit_bytes) - (one.total_bytes - one.transit_bytes)
    # At the last of four layers, where all activations are kept, the gradients of three are to come; where they are
    # sharded, of the last one too.
    assert to_come == pytest.approx(4e6 if mesh.fsdp == 4 else 12e6)


@given(st.integers(1, 64), st.integers(64, 200))
def test_a_full_pipeline_holds_as_many_activations_as_one_device(pp: int, num_micro_batches: int) -> None:
    piped = device_memory(1e8, StateBytes(), Mesh(pp=pp), Activations(1e6), 4, num_micro_batches=num_micro_batches)
    alone = device_memory(1e8, StateBytes(), Mesh(), Activations(1e6), 4)
    assert piped.activation_bytes == pytest.approx(alone.activation_bytes)


@given(st.floats(1e5, 1e8), st.integers(1, 10**8), st.floats(0, 1e9))
def test_a_line_of_peaks_is_found_again(per_sample: float, num_parameters: int, fixed: float) -> None:
    state = StateBytes()
    held = num_parameters * (state.parameter + state.gradient)
    timings = [MicroBatchTiming(size, 1.0, int(held + fixed + per_sample * size)) for size in (1, 2, 4, 8, 16)]
    found = measured_activations(timings, num_parameters, state)
    assert found is not None
    assert found.bytes_per_sample == pytest.approx(per_sample, rel=1e-3)
    assert found.fixed_bytes == pytest.approx(fixed, rel=1e-3, abs=100)


def test_without_two_peaks_nothing_is_said() -> None:
    assert measured_activations([MicroBatchTiming(1, 1.0), MicroBatchTiming(2, 1.0, 5)], 1, StateBytes()) is None


@pytest.mark.parametrize(
    ("optim", "num_bytes"),
    [({"name": "sgd", "momentum": 0}, 8), ({"name": "sgd"}, 12), ({"name": "adam"}, 16), ({"name": "adamw"}, 16)],
)
def test_the_optimizer_decides_what_a_parameter_takes(optim: dict[str, object], num_bytes: int) -> None:
    assert state_bytes(Job().with_values(optim=optim)).total == num_bytes
    assert state_bytes(Job().with_values(optim=optim, precision="float64")).total == 2 * num_bytes


_rows = st.lists(
    st.builds(
        LayerCost,
        parameter_bytes=st.integers(1, 100).map(float),
        time_s=st.integers(1, 10).map(float),
        activation_bytes=st.integers(0, 100).map(float),
        moment_bytes=st.integers(0, 50).map(float),
        largest_parameter_bytes=st.integers(0, 100).map(float),
        output_bytes=st.integers(0, 60).map(float),
    ),
    min_size=3,
    max_size=7,
).map(tuple)


@given(_rows, st.integers(2, 3), st.integers(1, 4), st.sampled_from([1500.0, 2500.0, 4000.0]))
def test_stages_are_the_fastest_that_fit(layers: Layers, pp: int, num_micro_batches: int, room: float) -> None:
    """Against every cut there is; where none fits, the fastest of all says what would be needed."""
    num_parameters = sum(layer.parameter_bytes for layer in layers)
    kept = accumulate(layer.activation_bytes for layer in layers)
    activations = Activations(max(before + layer.moment_bytes for before, layer in zip(kept, layers, strict=True)))

    def needed(stages: tuple[Layers, ...]) -> float:
        """With a layer's gradient that is added to those of micro-batches before, beside what is still kept then, and a
        message from each stage beside it."""
        found = []
        for place, stage in enumerate(stages):
            kept = [2 * layer.activation_bytes for layer in stage]
            waiting = min(pp - place, num_micro_batches) - 1
            backward = max(
                sum(kept[: number + 1])
                + layer.moment_bytes * 2
                + 4 * layer.largest_parameter_bytes * (num_micro_batches > 1)
                for number, layer in enumerate(stage)
            )
            arriving = 2 * (
                (stages[place - 1][-1].output_bytes if place else 0) + stage[-1].output_bytes * (place < pp - 1)
            )
            parameters = sum(layer.parameter_bytes for layer in stage)
            found.append(12 * parameters + waiting * sum(kept) + backward + arriving)
        return max(found)

    def slowest(stages: tuple[Layers, ...]) -> float:
        return max(sum(layer.time_s for layer in stage) for stage in stages)

    every = [
        tuple(layers[start:stop] for start, stop in pairwise((0, *inner, len(layers))))
        for inner in combinations(range(1, len(layers)), pp - 1)
    ]
    fitting = [stages for stages in every if needed(stages) <= USABLE_FRACTION * room]
    memory = device_memory(
        num_parameters,
        StateBytes(),
        Mesh(pp=pp),
        activations,
        2,
        num_micro_batches=num_micro_batches,
        layers=layers,
        memory_bytes=room,
    )
    assert memory.total_bytes == pytest.approx(needed(memory.stages))
    assert fits(memory, room) == bool(fitting)
    assert slowest(memory.stages) == min(map(slowest, fitting or every))


@pytest.mark.parametrize("mesh", [Mesh(pp=2, fsdp=2), Mesh(pp=2, fsdp=2, zero_stage=1), Mesh(pp=2, tp=2)])
def test_stages_that_are_shared_out_fit_too(mesh: Mesh) -> None:
    """Time alone would put half of the layers into the first stage, which keeps the most micro-batches."""
    layers = tuple(LayerCost("", 1.0, 10.0, 100.0, 20.0, num_tensor_slices=2) for _ in range(8))

    def found(memory_bytes: float) -> DeviceMemory:
        return device_memory(
            80.0,
            StateBytes(),
            mesh,
            Activations(800.0),
            1,
            num_micro_batches=8,
            layers=layers,
            memory_bytes=memory_bytes,
        )

    fastest = found(math.inf)
    assert found(0.9 * fastest.total_bytes / USABLE_FRACTION).total_bytes <= 0.9 * fastest.total_bytes
