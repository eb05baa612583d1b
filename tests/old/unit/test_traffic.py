from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.spec import Mesh
from paceline.spec.mesh import AxisName
from tests.old.traffic import gather_bytes, node_bytes, sent_bytes, sharding_bytes, sum_bytes

NOTHING: dict[AxisName, float] = {"dp": 0.0, "fsdp": 0.0, "tp": 0.0}


@pytest.mark.parametrize(("zero_stage", "gathers", "scatters"), [(1, 1, 1), (2, 3, 3), (3, 6, 3)])
def test_gloo_scatters_a_sum_as_it_sums(zero_stage: int, gathers: int, scatters: int) -> None:
    mesh = Mesh(fsdp=4, zero_stage=zero_stage)
    assert sharding_bytes(1e6, mesh, 3, "nccl") == (gathers + scatters) * gather_bytes(1e6, 4)
    assert sharding_bytes(1e6, mesh, 3, "gloo") == gathers * gather_bytes(1e6, 4) + scatters * sum_bytes(1e6, 4)
    assert sent_bytes(mesh, 1e6, 0, 0, 3, "gloo")["fsdp"] == sharding_bytes(1e6, mesh, 3, "gloo")


def test_a_ring_of_all_workers_leaves_each_node_once() -> None:
    for mesh in (Mesh(dp=4), Mesh(fsdp=4), Mesh(tp=4)):
        axis: AxisName = "dp" if mesh.dp > 1 else "tp" if mesh.tp > 1 else "fsdp"
        assert node_bytes(mesh, [NOTHING | {axis: 5.0}], (), 2) == 5.0
        assert node_bytes(mesh, [NOTHING | {axis: 5.0}], (), 4) == 0.0


def test_the_outer_axis_crosses_once_for_each_worker_of_a_node_and_the_inner_one_never() -> None:
    sent: list[dict[AxisName, float]] = [NOTHING | {"dp": 3.0, "fsdp": 100.0}]
    assert node_bytes(Mesh(dp=2, fsdp=2), sent, (), 2) == 2 * 3.0


def test_messages_between_stages_cross_both_ways_where_a_boundary_is_one_of_nodes() -> None:
    alone = [NOTHING] * 4
    assert node_bytes(Mesh(pp=4), alone, (1.0, 10.0, 100.0), 2) == 10.0
    assert node_bytes(Mesh(pp=2, tp=2), alone, (7.0,), 2) == 2 * 7.0
    # Two stages a worker: from the last worker back to the first one, too.
    assert node_bytes(Mesh(dp=2, pp=2), alone, (1.0, 10.0, 100.0), 2) == 2 * 111.0


@given(st.sampled_from([Mesh(dp=8), Mesh(dp=2, fsdp=4), Mesh(fsdp=2, tp=4), Mesh(pp=2, dp=2, tp=2), Mesh(pp=8)]))
def test_one_node_sends_nothing_and_nodes_of_one_worker_send_what_the_busiest_worker_does(mesh: Mesh) -> None:
    sent: list[dict[AxisName, float]] = [{"dp": 1.0, "fsdp": 2.0, "tp": 4.0}] * mesh.pp
    messages = (8.0,) * (mesh.pp - 1)
    assert node_bytes(mesh, sent, messages, 8) == 0.0
    own = (mesh.dp > 1) + 2 * (mesh.fsdp > 1) + 4 * (mesh.tp > 1)
    assert node_bytes(mesh, sent, messages, 1) == own + 8 * ((mesh.pp > 1) + (mesh.pp > 2))
