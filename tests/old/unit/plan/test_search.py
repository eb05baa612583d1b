from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import JobError
from paceline.plan.memory import TransformerShape, device_memory, fits, transformer_layers
from paceline.plan.mesh_words import explain
from paceline.plan.model import Network
from paceline.plan.peak_memory import StateBytes
from paceline.plan.search import Backend, MeshCandidate, Workload, best_of, meshes, search
from paceline.spec import Mesh
from paceline.spec.algorithm import AlphaBeta
from paceline.spec.model_cost import Activations, LayerCost

GIB = 2.0**30
FAST = Network(AlphaBeta(3e-6, 1 / 300e9), AlphaBeta(10e-6, 1 / 25e9))
SLOW = Network(AlphaBeta(3e-6, 1 / 300e9), AlphaBeta(50e-6, 1 / 1e9))

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
    state=StateBytes(2.0, 2.0, 12.0),
    activations=Activations(32 * 2048 * 4096 * 34.0),
    compute_s=lambda samples: samples * 6 * 6.7e9 * 2048 / 140e12,
    memory_bytes=80 * GIB,
    layers=transformer_layers(TransformerShape(32, 4096, 32, 2048), 6.7e9),
)


@given(st.integers(1, 96), st.sampled_from([1, 2, 4, 8]))
def test_meshes_use_every_device_once_and_are_all_different(num_workers: int, devices_per_node: int) -> None:
    found = list(meshes(num_workers, devices_per_node, GPT_6B.layers))
    assert len(set(found)) == len(found)
    assert Mesh(dp=num_workers) in found
    for mesh in found:
        assert mesh.num_workers == num_workers
        assert mesh.tp % devices_per_node == 0 or devices_per_node % mesh.tp == 0
        assert mesh.pp <= 32
        assert 32 % mesh.tp == 0


def test_without_a_shape_only_data_is_shared_out() -> None:
    assert {(mesh.tp, mesh.pp) for mesh in meshes(16, 8, ())} == {(1, 1)}


def test_a_model_that_fits_is_replicated() -> None:
    result = search(SMALL, 8, 8, FAST)
    assert result.winner.mesh == Mesh(dp=8)
    assert result.too_large == ()
    lines = explain(result)
    assert len(lines) == 4
    assert lines[0].startswith("dp8: ")
    assert "GiB" in lines[1]
    assert lines[2].startswith("Then dp4 x zero1")


def test_a_model_that_does_not_fit_is_sharded_and_the_reason_says_so() -> None:
    result = search(GPT_6B, 16, 8, FAST)
    assert result.winner.mesh != Mesh(dp=16)
    assert fits(result.winner.memory, GPT_6B.memory_bytes)
    assert Mesh(dp=16) in dict(result.too_large)
    assert "where whole replicas would need 1" in explain(result)[1]  # 16 bytes x 6.7e9 and activations


def test_a_slow_network_prefers_less_traffic_between_nodes() -> None:
    fast, slow = (search(GPT_6B, 64, 8, network).winner for network in (FAST, SLOW))
    assert slow.step_s > fast.step_s
    assert slow.mesh.tp * slow.mesh.pp >= fast.mesh.tp * fast.mesh.pp
    # What gathers parameters all the time stays off the slow link.
    assert slow.mesh.fsdp * slow.mesh.tp <= 8 or slow.mesh.zero_stage == 1


def test_a_pipeline_without_communication_has_the_bubble_of_the_papers() -> None:
    """(p - 1) / m of the ideal time (Huang et al. 2019; Narayanan et al. 2021, section 2.2.1)."""
    free = Network(AlphaBeta(0.0, 0.0), AlphaBeta(0.0, 0.0))
    workload = dataclasses.replace(GPT_6B, memory_bytes=math.inf)
    for candidate in search(workload, 8, 8, free).candidates:
        expected = (candidate.mesh.pp - 1) / candidate.num_micro_batches / candidate.pipeline.stages_per_worker
        assert candidate.bubble_s == pytest.approx(expected * candidate.compute_s)
        # All meshes do the same work, and nothing else takes time.
        assert candidate.compute_s == pytest.approx(workload.compute_s(256) / 8)
        assert candidate.exposed_s == candidate.tensor_s == 0


@given(st.sampled_from([1, 2, 4, 8, 16]), st.floats(1e9, 1e11), st.sampled_from([FAST, SLOW]))
@settings(max_examples=5, deadline=None)
def test_everything_that_is_offered_fits_and_more_memory_is_never_slower(
    num_workers: int, memory_bytes: float, network: Network
) -> None:
    def best_s(room: float) -> float:
        try:
            result = search(dataclasses.replace(GPT_6B, memory_bytes=room), num_workers, 8, network)
        except JobError:
            return math.inf
        assert all(fits(one.memory, room) for one in result.candidates)
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
    assert explain(result)[0].startswith("one device: ")


def _convolution(
    num_parameters: float, flops: float, input_bytes: float, output_bytes: float, kept_bytes: float, num_channels: int
) -> LayerCost:
    """A layer as a dry run saw it. Output channels are shared out: each worker computes its own, all gather them, and
    backward sums the gradient of the input.

    Args:
        num_channels: 0: the layer has no output channels with parameters of their own.
    """
    is_shared = num_channels > 1
    return LayerCost(
        parameter_bytes=num_parameters,
        # What has no floating-point operations to speak of still takes the time of touching its memory.
        time_s=flops + input_bytes + output_bytes,
        activation_bytes=kept_bytes,
        output_bytes=output_bytes,
        num_tensor_slices=num_channels if is_shared else 1,
        num_all_reduces=1 if is_shared else 0,
        all_reduce_bytes=input_bytes + output_bytes / 2 if is_shared else 0.0,  # gathering is half of a sum
    )


def _convolutions() -> tuple[LayerCost, ...]:
    """As of a ResNet: ever more channels, ever fewer pixels, a classifier that tensor groups cannot share out."""
    stages = [
        _convolution(4e4 * 4**place, 2e8, 4e5 / 2**place, 4e5 / 2**place, 2e6 / 2**place, 64 * 2**place)
        for place in range(4)
    ]
    return (*stages, _convolution(5e6, 1e7, 2e3, 4e3, 2e3, 1000 - 1))


def test_convolutional_nets_have_pipelines_and_tensor_groups_too() -> None:
    layers = _convolutions()
    found = set(meshes(8, 8, layers))
    assert {mesh.pp for mesh in found} == {1, 2, 4}
    assert {mesh.tp for mesh in found} == {1, 2, 4, 8}
    assert {mesh.tp for mesh in meshes(3, 8, layers)} == {1}  # no channels are a multiple of 3


def test_a_mesh_of_replicas_shards_inside_a_node_where_the_network_is_slow() -> None:
    workload = dataclasses.replace(SMALL, num_parameters=250_000_000, memory_bytes=2.8 * GIB, backend="gloo")
    result = search(workload, 16, 8, SLOW)
    assert Mesh(dp=16) in dict(result.too_large)
    assert result.winner.mesh.dp > 1
    assert 1 < result.winner.mesh.fsdp <= 8


def test_a_pipelines_micro_batches_are_the_virtual_shards_and_shares_are_no_more_than_them() -> None:
    workload = dataclasses.replace(GPT_6B, shard_size=32, memory_bytes=math.inf)  # 8 shards
    result = search(workload, 16, 8, FAST)
    assert all(one.mesh.num_assignments <= 8 for one in result.candidates)
    for one in result.candidates:
        assert one.micro_batch_size % 32 == 0
        assert one.mesh.pp == 1 or (one.micro_batch_size, one.num_micro_batches) == (32, 8 // one.mesh.num_assignments)


def test_bitwise_parity_has_pipelines_and_no_tensor_groups() -> None:
    """A stage's whole gradients, in partial sums, and the tree's price of those of a stage alone."""
    bitwise = dataclasses.replace(GPT_6B, state=dataclasses.replace(GPT_6B.state, is_bitwise=True), shard_size=8)
    found = search(bitwise, 16, 8, FAST).candidates
    assert {candidate.mesh.tp for candidate in found} == {1}
    assert {candidate.mesh.pp for candidate in found} > {1, 2, 4}
    alone, halved = (best_of(bitwise, Mesh(dp=dp, pp=pp), 8, FAST) for dp, pp in ((2, 8), (1, 16)))
    assert isinstance(alone, MeshCandidate) and isinstance(halved, MeshCandidate)
    assert alone.memory.gradient_bytes == pytest.approx((1 + 5) * 2 * 6.7e9 / 8)
    assert alone.exposed_s > 0 == halved.exposed_s


def test_gloo_pays_for_sharding_what_nccl_hides() -> None:
    nccl, gloo = (
        {one.mesh: one.exposed_s for one in search(dataclasses.replace(SMALL, backend=backend), 4, 4, FAST).candidates}
        for backend in ("nccl", "gloo")
    )
    assert nccl[Mesh(dp=4)] == gloo[Mesh(dp=4)]
    for stage in (1, 2, 3):
        assert gloo[Mesh(fsdp=4, zero_stage=stage)] > nccl[Mesh(fsdp=4, zero_stage=stage)]


def test_activations_are_computed_again_only_where_nothing_fits_otherwise() -> None:
    layers = transformer_layers(TransformerShape(32, 4096, 32, 2048), 6.7e9)
    huge = dataclasses.replace(GPT_6B, activations=Activations(60 * GIB), layers=layers, memory_bytes=80 * GIB)
    assert any(one.recompute for one in search(huge, 4, 8, FAST).candidates)
    assert not any(
        one.recompute for one in search(dataclasses.replace(huge, memory_bytes=math.inf), 4, 8, FAST).candidates
    )


def test_a_pipeline_over_nodes_sends_over_their_links() -> None:
    """Two nodes of two: one of the three boundaries of pp4 lies between them, and so do both of dp2 x pp2."""
    layers = (LayerCost("", 1.0, 1e6, 1e4, 1e6),) * 4
    workload = dataclasses.replace(SMALL, layers=layers, shard_size=16)  # 16 shards
    free_inside = Network(AlphaBeta(0.0, 0.0), AlphaBeta(0.0, 1 / 1e9))
    found = {one.mesh: one for one in search(workload, 4, 2, free_inside).candidates}
    message_s = 16 * 1e6 / 1e9
    assert found[Mesh(pp=4)].tensor_s == pytest.approx((16 + 3) * 2 * message_s)
    assert found[Mesh(dp=2, pp=2)].tensor_s == pytest.approx((8 + 1) * 2 * 2 * message_s)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_tensor_group_over_nodes_sums_over_their_links(backend: Backend) -> None:
    """Two nodes of two, and links inside that take no time: over the others a ring of four sends 2 * 3/4 of a sum,
    and leaders of nodes send a whole one. Two groups of two never leave their nodes."""
    layers = (LayerCost("", 1.0, 1e6, 1e4, 1e4, True, 4, 2, 1e5),) * 2
    workload = dataclasses.replace(SMALL, layers=layers, backend=backend)
    free_inside = Network(AlphaBeta(0.0, 0.0), AlphaBeta(0.0, 1 / 1e9))
    found = {one.mesh: one for one in search(workload, 4, 2, free_inside).candidates}
    over_nodes = found[Mesh(tp=4)]
    sent = 2 * 256 * 2 * 1e5
    assert over_nodes.tensor_s == pytest.approx(sent * {"gloo": 2 * 3 / 4, "nccl": 1.0}[backend] / 1e9, rel=1e-3)
    assert found[Mesh(dp=2, tp=2)].tensor_s == 0.0


def test_plain_replicas_do_not_fit_by_recomputing_which_training_does_on_meshes_only() -> None:
    layers = transformer_layers(TransformerShape(32, 4096, 32, 2048), 6.7e9)
    room = 1.2 * (GPT_6B.num_parameters * GPT_6B.state.total + 15 * GIB)
    workload = dataclasses.replace(
        GPT_6B, activations=Activations(60 * GIB), layers=layers, shard_size=1, memory_bytes=room
    )
    assert not isinstance(best_of(workload, Mesh(dp=8), 8, FAST), MeshCandidate)
    needed = device_memory(
        GPT_6B.num_parameters, GPT_6B.state, Mesh(dp=8), workload.activations, 1, layers=layers, recompute=True
    )
    assert fits(needed, room)
