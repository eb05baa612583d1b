"""Which network interfaces workers of several nodes use."""

from __future__ import annotations

import pytest

from paceline.launch.remote_team import side_by_side

FAST, SLOW = 25e9, 1e9


@pytest.mark.parametrize(
    ("ways", "rates", "chosen"),
    [
        ([("eth0", "eno1")], [0.0], ("eth0", "eno1")),
        ([("eth0", "eth0"), ("eth1", "eth1")], [FAST, FAST], ("eth0,eth1", "eth0,eth1")),
        ([("eth0", "eth0"), ("eth1", "eth1"), ("eth2", "eth2")], [SLOW, FAST, FAST], ("eth1,eth2", "eth1,eth2")),
        ([("eth0", "eth0"), ("eth1", "eth1")], [0.0, 0.0], ("eth0", "eth0")),  # perhaps not equally fast
        ([("eth0", "eth0"), ("eth1", "eth0")], [FAST, FAST], ("eth0", "eth0")),  # both addresses lie behind one
        ([("eth0", "eth0"), ("eth0", "eth0")], [FAST, FAST], ("eth0", "eth0")),  # IPv4 and IPv6
    ],
)
def test_equally_fast_interfaces_are_used_together(
    ways: list[tuple[str, ...]], rates: list[float], chosen: tuple[str, ...]
) -> None:
    assert side_by_side(ways, rates) == chosen
