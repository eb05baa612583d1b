from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import JobError
from paceline.plan.memory import MIXED_ADAM, Activations, StateBytes, TransformerShape, transformer_activations
from paceline.plan.model import Level, Mesh, Network
from paceline.plan.search import Workload, explain, meshes, search

GIB = 2.0**30
FAST = Network(Level(3e-6, 1 / 300e9), Level(10e-6, 1 / 25e9))
SLOW = Network(Level(3e-6, 1 / 300e9), Level(50e-6, 1 / 1e9))

SMALL = Workload(
    num_parameters=25_000_000,
    global_batch_size=256,
    state=StateBytes(),
    activations=Activations(90e6),
    compute_s=lambda samples: 0.01 + 0.001 * samples,
    memory_bytes=40 * GIB,
)
GPT_6B = Workload(
    num_parameters=6_700_000_000,
    global_batch_size=256,
    state=MIXED_ADAM,
    activations=transformer_activations(TransformerShape(32, 4096, 32, 2048), recompute="selective"),
    compute_s=lambda samples: samples * 6 * 6.7e9 * 2048 / 140e12,
    memory_bytes=80 * GIB,
    shape=TransformerShape(32, 4096, 32, 2048),
)


@given(st.integers(1, 96), st.sampled_from([1, 2, 4, 8]))
def test_meshes_use_every_device_once_and_are_all_different(num_workers: int, devices_per_node: int) -> None:
    found = list(meshes(num_workers, devices_per_node, GPT_6B.shape))
    assert len(set(found)) == len(found)
    assert Mesh(dp=num_workers) in found
    for mesh in found:
        assert mesh.num_workers == num_workers
        assert mesh.tp <= devices_per_node
        assert 32 % mesh.pp == 0
        assert 32 % mesh.tp == 0


def test_without_a_shape_only_data_is_shared_out() -> None:
    assert {(mesh.tp, mesh.pp) for mesh in meshes(16, 8, None)} == {(1, 1)}


def test_a_model_that_fits_is_replicated() -> None:
    result = search(SMALL, 8, 8, FAST)
    assert result.winner.mesh == Mesh(dp=8)
    assert result.too_large == ()
    lines = explain(result, SMALL)
    assert len(lines) == 4
    assert lines[0].startswith("dp 8: ")
    assert "GiB" in lines[1]
    assert lines[2].startswith("Then zero1 8: ")


def test_a_model_that_does_not_fit_is_sharded_and_the_reason_says_so() -> None:
    result = search(GPT_6B, 16, 8, FAST)
    assert result.winner.mesh != Mesh(dp=16)
    assert result.winner.memory.fits(GPT_6B.memory_bytes)
    assert Mesh(dp=16) in dict(result.too_large)
    assert "where whole replicas would need 1" in explain(result, GPT_6B)[1]  # 16 bytes x 6.7e9 and activations


def test_a_slow_network_prefers_less_traffic_between_nodes() -> None:
    fast, slow = (search(GPT_6B, 64, 8, network).winner for network in (FAST, SLOW))
    assert slow.step_s > fast.step_s
    assert slow.mesh.tp * slow.mesh.pp >= fast.mesh.tp * fast.mesh.pp
    assert slow.mesh.zero_stage < 3  # it would gather every parameter over the slow link


def test_a_pipeline_without_communication_has_the_bubble_of_the_papers() -> None:
    """(p - 1) / m of the ideal time (Huang et al. 2019; Narayanan et al. 2021, section 2.2.1)."""
    free = Network(Level(0.0, 0.0), Level(0.0, 0.0))
    workload = dataclasses.replace(GPT_6B, memory_bytes=math.inf)
    for candidate in search(workload, 8, 8, free).candidates:
        expected = (candidate.mesh.pp - 1) / candidate.num_micro_batches
        assert candidate.bubble_s == pytest.approx(expected * candidate.compute_s)
        # All meshes do the same work, and nothing else takes time.
        assert candidate.compute_s == pytest.approx(workload.compute_s(256) / 8)
        assert candidate.exposed_s == candidate.tensor_s == 0


@given(st.sampled_from([1, 2, 4, 8, 16, 64]), st.floats(1e9, 1e11), st.sampled_from([FAST, SLOW]))
@settings(max_examples=12, deadline=None)
def test_everything_that_is_offered_fits_and_more_memory_is_never_slower(
    num_workers: int, memory_bytes: float, network: Network
) -> None:
    def best_s(room: float) -> float:
        try:
            result = search(dataclasses.replace(GPT_6B, memory_bytes=room), num_workers, 8, network)
        except JobError:
            return math.inf
        assert all(one.memory.fits(room) for one in result.candidates)
        steps = [one.step_s for one in result.candidates]
        assert result.winner.step_s <= 1.03 * min(steps)
        return min(steps)

    assert best_s(2 * memory_bytes) <= best_s(memory_bytes)


def test_what_fits_nowhere_is_one_sentence_with_numbers() -> None:
    tiny = dataclasses.replace(GPT_6B, memory_bytes=2 * GIB)
    with pytest.raises(JobError, match=r"fits into no mesh of 8 devices: .* a device, and 1\.84 GiB can be used; take"):
        search(tiny, 8, 8, FAST)


def test_more_workers_than_samples() -> None:
    with pytest.raises(JobError, match="512 workers cannot share a global batch of 256 samples"):
        search(SMALL, 512, 8, FAST)


def test_one_device_has_nothing_to_choose() -> None:
    result = search(SMALL, 1, 8, FAST)
    assert result.runner_up is None
    assert explain(result, SMALL)[0].startswith("one device: ")
