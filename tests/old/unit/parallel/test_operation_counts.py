"""How many operations a step asks torch for, beside a plain loop over the same layers."""

from __future__ import annotations

import pytest

from tests.old.operations import CASES, count, our_steps, plain_step


@pytest.mark.parametrize(
    ("name", "parity", "most"),
    [
        ("lenet", "bitwise", 9.6),
        ("gpt", "bitwise", 8.75),
    ],
)
def test_a_step_asks_for_hardly_more_than_a_plain_loop(name: str, parity: str, most: float) -> None:
    case = CASES[name]
    plain, ours = count([plain_step(case)] * 2), count(our_steps(case, parity))
    assert ours.num_calls <= most * plain.num_calls, ours.table()
