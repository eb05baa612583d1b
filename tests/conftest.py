"""Property tests search the same examples every time and are not timed, since the machines that run them are noisy.
Tests that share something of their module stay together when tests run in parallel."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("paceline", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("paceline")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One process runs all tests that use a module's fixture, so that a cluster or a table of results is made once."""
    for item in items:
        fixtures = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
        if any(definition.scope == "module" for found in fixtures.values() for definition in found):
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
