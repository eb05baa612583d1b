"""Parts of tensors, and what shares of a model are gathered together: pure, or on a mesh of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from paceline.dtensor_type import local_shard
from paceline.parallel.dtensor import clip_gradients, full_tensor, is_sharded, local_bytes, shard_like
from paceline.parallel.sharded import block_groups, blocks, independent_blocks


@pytest.fixture(params=[0, 3])
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    """Of 2 x 2 workers that are not there, seen by each of them."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=4)
    try:
        yield DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("fsdp", "tp"))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "placements", [(Shard(0), Replicate()), (Shard(0), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Replicate())]
)
def test_a_part_of_a_whole_tensor_is_the_workers_own(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
    full = torch.arange(35.0).view(5, 7)
    rank = mesh.get_coordinate()
    assert rank is not None
    expected = full
    for place, placement in zip(rank, placements, strict=True):
        if isinstance(placement, Shard):
            chunks = expected.chunk(2, placement.dim)
            expected = chunks[place]
    like = DTensor.from_local(
        torch.zeros_like(expected), mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )
    part = shard_like(full, like)
    assert torch.equal(local_shard(part), expected)
    assert local_shard(part).untyped_storage().nbytes() == local_bytes([part])  # no view of the whole
    assert is_sharded(part, "fsdp") == isinstance(placements[0], Shard)
    assert is_sharded(part, "tp") == isinstance(placements[1], Shard)


def test_a_plain_tensor_is_all_there_is() -> None:
    tensor = torch.randn(3, requires_grad=True)
    assert torch.equal(full_tensor(tensor), tensor) and not full_tensor(tensor).requires_grad
    assert shard_like(tensor, torch.zeros(3)) is tensor
    assert not is_sharded(tensor, "fsdp")


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clipping_is_torchs(max_norm: float) -> None:
    mine, theirs = nn.Linear(4, 3), nn.Linear(4, 3)
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        one.grad = torch.randn_like(one)
        other.grad = one.grad.clone()
    clip_gradients(
        mine.parameters(), max_norm, nn.utils.get_total_norm([p.grad for p in mine.parameters() if p.grad is not None])
    )
    nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.allclose(one.grad, other.grad, rtol=1e-6)


def test_blocks_that_share_parameters_are_left_to_the_whole_model() -> None:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    twice = nn.Linear(4, 4)
    inside = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inside[1].weight = inside[0].weight
    model = nn.Sequential(first, nn.Tanh(), nn.ModuleList([twice, nn.ReLU(), twice]), inside, last)
    found = blocks(model)
    assert first in found and last in found
    left = independent_blocks(model, found)
    assert first not in left and last not in left and twice in left
    assert {id(p) for block in left for p in block.parameters()} & {id(first.weight)} == set()
    assert [len(group) for group in block_groups(left, min_bytes=1)] == [1] * len(left)
