"""Property tests search the same examples every time and are not timed, since the machines that run them are noisy.
Tests that share something of their module stay together when tests run in parallel."""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import settings

settings.register_profile("paceline", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("paceline")

# Where several processes share the cores, threads that compute together mostly wait for each other, and busily. Read
# when numpy and torch are loaded; not for the programs that tests start.
_THREADS = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
os.environ.update(dict.fromkeys(_THREADS, "1"))
gc.disable()  # hardly anything that modules make is garbage


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One process runs all tests that use a module's fixture, so that a cluster or a table of results is made once."""
    for item in items:
        fixtures = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
        if any(definition.scope == "module" for found in fixtures.values() for definition in found):
            item.add_marker(pytest.mark.xdist_group(str(item.path)))


def pytest_collection_finish() -> None:
    """All modules of tests are loaded."""
    for name, value in _THREADS.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    gc.freeze()  # what they have made need not be looked through again and again
    gc.enable()
