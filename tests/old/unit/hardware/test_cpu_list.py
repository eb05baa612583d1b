"""Lists of cores."""

from __future__ import annotations

import pytest

from paceline.hardware.cpu_list import parse_cpus


def test_lists() -> None:
    assert parse_cpus("0-3,8") == (0, 1, 2, 3, 8)
    assert parse_cpus(" 8, 0-1,1\n") == (0, 1, 8)


@pytest.mark.parametrize("text", ["", "a", "1-", "3-1", "0-65536", "1,,2", "-1", "٣"])
def test_no_list(text: str) -> None:
    with pytest.raises(ValueError, match="numbers"):
        parse_cpus(text)
