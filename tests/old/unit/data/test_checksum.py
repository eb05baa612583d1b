"""Checksums of samples: equal for equal contents alone, whatever holds them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.data.checksum import checksum

SAMPLES: list[Any] = [
    torch.arange(6.0).reshape(2, 3),
    torch.arange(6.0).reshape(2, 3).bfloat16(),
    torch.tensor(1.5, requires_grad=True),
    torch.zeros(0, 3),
    np.arange(4),
    np.float32(2.5),
    {"text": "a", "number": 3},
    ("a", b"b", None, 2.5, True),
    [],
]


@pytest.mark.parametrize("number", range(len(SAMPLES)))
def test_every_sample_has_a_checksum_of_its_own(number: int) -> None:
    sums = [checksum([sample]) for sample in SAMPLES]
    assert sums.count(sums[number]) == 1
    assert checksum([SAMPLES[number]]) == sums[number]


def test_a_checksum_goes_on_from_what_came_before() -> None:
    assert checksum(SAMPLES[1:], checksum(SAMPLES[:1])) == checksum(SAMPLES)
