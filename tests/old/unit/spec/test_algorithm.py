"""What is known of algorithms and wire formats without tensors is complete, and right."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from paceline.comm import WIRE_FORMATS
from paceline.spec.algorithm import ALGORITHM_FACTS, AlgorithmName, automatic_candidates
from paceline.spec.wire import WIRE_FACTS


def test_every_algorithm_has_facts() -> None:
    assert set(ALGORITHM_FACTS) == set(get_args(AlgorithmName)) - {"auto"}


@pytest.mark.parametrize(
    ("workers_per_node", "shares_memory", "candidates"),
    [
        ([4], False, ["all_reduce"]),
        ([4], True, ["all_reduce", "hierarchical"]),
        ([1, 1], True, ["all_reduce", "ring"]),
        ([2, 1], False, ["all_reduce", "hierarchical", "ring"]),
    ],
)
def test_candidates_of_auto(workers_per_node: list[int], shares_memory: bool, candidates: list[str]) -> None:
    assert automatic_candidates(workers_per_node, shares_memory=shares_memory) == candidates


@pytest.mark.parametrize("name", sorted(WIRE_FORMATS))
def test_a_wire_format_takes_and_loses_what_its_row_says(name: str) -> None:
    wire, facts = WIRE_FORMATS[name], next(facts for known, facts in WIRE_FACTS.items() if known == name)
    values = torch.linspace(-1, 1, 4096)
    message, decoded = wire.encode(values), torch.empty_like(values)
    assert message.nbytes == facts.bytes_per_value * len(values)
    wire.decode(message, decoded)
    assert ((decoded - values).abs() <= facts.rounding * values.abs() * (1 + 1e-5)).all()
    assert bool(facts.loss) == (not wire.is_exact)
