"""The fixed tree: the sum over leaves has the same bits however the leaves are dealt to workers and nodes. The
oracle is the definition of the tree, written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.comm.fixed_tree import TreeSum
from paceline.comm.tree_exact import tree_all_reduce
from tests.comm.link import MemoryLink, Network, nodes_by_name


def tree_of(leaves: Tensor) -> Tensor:
    """tree[a, b) = tree[a, a + p) + tree[a + p, b), p the largest power of two below b - a."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1
    while 2 * half < len(leaves):
        half *= 2
    return tree_of(leaves[:half]) + tree_of(leaves[half:])


def sum_dealt(leaves: Tensor, cuts: list[int], node_names: list[int]) -> list[Tensor]:
    """What each worker has of the sum of all leaves, if they are dealt out between these cuts."""
    runs = list(zip([0, *cuts], [*cuts, len(leaves)], strict=True))
    nodes, network = nodes_by_name(node_names), Network(len(runs))

    def work(rank: int) -> Tensor:
        tree = TreeSum[torch.Tensor](runs[rank][0])
        for leaf in leaves[slice(*runs[rank])]:
            for free in tree.push(leaf.clone()):
                free.fill_(torch.nan)  # whoever pushed it may use it again
            assert len(tree.partials) <= 2 * len(leaves).bit_length()
        link = MemoryLink(network, rank, nodes).links if len(runs) > 1 else None
        return tree_all_reduce(tree.partials, runs, torch.empty_like(leaves[0]), link)

    return network.run(work)


@given(num_leaves=st.integers(1, 24), length=st.integers(0, 50), seed=st.integers(0, 2**31), data=st.data())
def test_the_bits_do_not_depend_on_how_leaves_are_dealt(
    num_leaves: int, length: int, seed: int, data: st.DataObject
) -> None:
    leaves = torch.randn(num_leaves, length, generator=torch.Generator().manual_seed(seed))
    cuts = sorted(data.draw(st.lists(st.integers(0, num_leaves), max_size=8)))
    names = data.draw(st.lists(st.integers(0, 3), min_size=len(cuts) + 1, max_size=len(cuts) + 1))
    for found in sum_dealt(leaves, cuts, names):
        assert torch.equal(found, tree_of(leaves))


def test_a_long_vector_in_many_chunks_has_the_bits_of_one_worker() -> None:
    leaves = torch.randn(8, 200_003, generator=torch.Generator().manual_seed(5))
    for cuts, names in (([4], [0, 1]), ([3, 5], [0, 0, 1]), ([1, 4, 6], [0, 1, 0, 2])):
        for found in sum_dealt(leaves, cuts, names):
            assert torch.equal(found, tree_of(leaves))


@pytest.mark.parametrize("names", [[0, 0, 0, 1, 1], [0] * 4 + [1] * 4], ids=str)
def test_nodes_of_several_workers_have_the_bits_of_one_worker(names: list[int]) -> None:
    leaves = torch.randn(8, 100, generator=torch.Generator().manual_seed(5))
    for found in sum_dealt(leaves, list(range(1, len(names))), names):
        assert torch.equal(found, tree_of(leaves))
