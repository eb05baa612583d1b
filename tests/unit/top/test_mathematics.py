"""A row of layers is cut into stages with about equally much work."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from paceline.errors import ModelError
from paceline.mathematics import even_cut


@pytest.mark.parametrize("seed", range(8))
def test_every_stage_has_its_part_of_the_work_but_for_a_layer(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(100):
        work = [draw.choice([0.0, 1.0, 2.5, draw.uniform(0, 10)]) for _ in range(draw.randint(4, 30))]
        num_stages = draw.randint(1, 4)
        starts = even_cut(work, [True] * len(work), num_stages)
        assert starts[0] == 0 and all(one < other for one, other in pairwise(starts))
        stages = [sum(work[start:stop]) for start, stop in pairwise((*starts, len(work)))]
        assert len(stages) == num_stages
        assert max(stages) <= sum(work) / num_stages + 2 * max(work)


def test_equal_layers_are_cut_into_equal_stages_and_a_long_one_stands_alone() -> None:
    assert even_cut([1.0] * 12, [True] * 12, 4) == [0, 3, 6, 9]
    assert even_cut([1.0, 1.0, 1.0, 1.0, 9.0], [True] * 5, 2) == [0, 4]


def test_a_stage_begins_where_one_may() -> None:
    assert even_cut([1.0] * 4, [True, False, False, True], 2) == [0, 3]


@pytest.mark.parametrize("may_begin", [[True] * 2, [False] * 5])
def test_more_stages_than_places_to_begin_are_refused_with_what_to_do(may_begin: list[bool]) -> None:
    with pytest.raises(ModelError) as caught:
        even_cut([1.0] * len(may_begin), may_begin, 3)
    assert all(word in str(caught.value) for word in (f"{len(may_begin)} layers", "3", "pp"))
