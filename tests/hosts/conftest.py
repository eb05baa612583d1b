"""Where this machine cannot play a cluster, the tests that need one say why and are left out."""

from __future__ import annotations

import pytest

from tests.hosts.cluster import why_not


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("hosts") and (reason := why_not()):
        pytest.skip(reason)
