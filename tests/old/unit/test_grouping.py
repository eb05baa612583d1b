"""Tests that share a module's fixture are run by one process (tests/conftest.py)."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def shared() -> None:
    pass


def test_tests_with_a_fixture_of_the_module_are_one_group(shared: None, request: pytest.FixtureRequest) -> None:
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("tests are not run in parallel here")
    assert request.node.nodeid.endswith(f"@{request.node.path}")
