"""The tree's shape depends on its leaves alone."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.fixed_tree import TreeSum, aligned_blocks, blocks_of_runs, finish_tree


@given(st.integers(0, 200), st.integers(0, 200))
def test_blocks_tile_their_run_and_are_aligned(start: int, length: int) -> None:
    blocks = aligned_blocks(start, start + length)
    position = start
    for first, size in blocks:
        assert first == position
        assert size & (size - 1) == 0
        assert first % size == 0
        position += size
    assert position == start + length
    assert len(blocks) <= 2 * max(1, length).bit_length()


@given(st.integers(1, 24), st.data())
def test_any_cut_of_the_leaves_gives_the_same_bits(num_leaves: int, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, num_leaves), max_size=5)))
    leaves = torch.randn(num_leaves, 7, generator=torch.Generator().manual_seed(num_leaves))
    runs = list(zip([0, *cuts], [*cuts, num_leaves], strict=True))
    blocks: dict[tuple[int, int], torch.Tensor] = {}
    for start, stop in runs:
        tree = TreeSum(start)
        for leaf in range(start, stop):
            for free in tree.push(leaves[leaf].clone()):
                free.fill_(torch.nan)  # whoever pushed it may use it again
        assert tree.blocks == aligned_blocks(start, stop)
        blocks.update(zip(tree.blocks, tree.partials, strict=True))
    whole = TreeSum(0)
    for leaf in leaves:
        whole.push(leaf.clone())
    alone = finish_tree(dict(zip(whole.blocks, whole.partials, strict=True)), num_leaves)
    assert torch.equal(finish_tree(blocks, num_leaves), alone)
    torch.testing.assert_close(alone, leaves.sum(0))


@given(st.integers(1, 40), st.data())
def test_blocks_of_neighbours_join_to_those_of_their_union(num_leaves: int, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, num_leaves), max_size=6)))
    runs = list(zip([0, *cuts], [*cuts, num_leaves], strict=True))
    chosen = data.draw(st.sets(st.sampled_from(range(len(runs)))))  # those of a node, which need not be neighbours
    tree = TreeSum()
    for number in sorted(chosen):
        for block in aligned_blocks(*runs[number]):
            tree.push_block(block, torch.tensor(float(sum(range(block[0], sum(block))))))
    assert tree.blocks == blocks_of_runs(runs[number] for number in chosen)
    assert [float(one) for one in tree.partials] == [sum(range(start, start + size)) for start, size in tree.blocks]
