"""Lists and masks of cores."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.hardware.cpu_list import parse_cpus, parse_mask


def test_lists() -> None:
    assert parse_cpus("0-3,8") == (0, 1, 2, 3, 8)
    assert parse_cpus(" 8, 0-1,1\n") == (0, 1, 8)


@pytest.mark.parametrize("text", ["", "a", "1-", "3-1", "0-65536", "1,,2", "-1", "٣"])
def test_no_list(text: str) -> None:
    with pytest.raises(ValueError, match="numbers"):
        parse_cpus(text)


@given(st.sets(st.integers(0, 400)))
def test_masks(cores: set[int]) -> None:
    digits = f"{sum(1 << core for core in cores):x}"
    groups = [digits[max(0, end - 8) : end] for end in range(len(digits), 0, -8)]
    assert parse_mask(",".join(reversed(groups))) == tuple(sorted(cores))


@pytest.mark.parametrize("text", ["", "0x3", "fffffffff", "3,", "g", ",".join(["f"] * 3000)])
def test_no_mask(text: str) -> None:
    with pytest.raises(ValueError, match="mask"):
        parse_mask(text)
