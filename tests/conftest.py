"""What holds for every test: properties search the same examples, tests that share a fixture of their module run in one
process, expensive ones begin first, and in CI nothing is skipped but for the reasons named here."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.kit.stage import Stage, open_stage

settings.register_profile("landing", deadline=None, derandomize=True, max_examples=60)
settings.register_profile("nightly", deadline=None, max_examples=300, print_blob=True)
settings.load_profile(os.environ.get("PACELINE_TEST_PROFILE", "landing"))

SKIPS_ALLOWED_IN_CI = (
    "needs a CUDA device",
    "needs PACELINE_TEST_DATA",
    "this machine lets nobody make a memory control group",
)

# Where several processes share the cores, threads that compute together mostly wait for each other, and busily. Read
# when NumPy and torch are loaded; not for the programs that tests start.
_THREADS = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
os.environ.update(dict.fromkeys(_THREADS, "1"))
gc.disable()  # hardly anything that modules make is garbage

_forbidden_skips: list[str] = []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that use a module's fixture run in one process, so that a cluster or a table of results is made once; the
    most expensive files begin first, so that none is left alone at the end."""
    for item in items:
        fixtures = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
        if any(definition.scope == "module" for found in fixtures.values() for definition in found):
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
    largest_budget: dict[str, float] = {}
    for item in items:
        budget = item.get_closest_marker("budget")
        budget_s = float(budget.kwargs["processor_s"]) if budget else 0.0
        largest_budget[str(item.path)] = max(budget_s, largest_budget.get(str(item.path), 0.0))
    items.sort(key=lambda item: -largest_budget[str(item.path)])


def pytest_collection_finish() -> None:
    """All modules of tests are loaded."""
    for name, value in _THREADS.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    gc.freeze()  # what they have made need not be looked through again and again
    gc.enable()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail") and "CI" in os.environ:
        _, _, reason = report.longrepr if isinstance(report.longrepr, tuple) else ("", 0, str(report.longrepr))
        if not reason.removeprefix("Skipped: ").startswith(SKIPS_ALLOWED_IN_CI):
            _forbidden_skips.append(f"{report.nodeid}: {reason}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _forbidden_skips and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for skip in _forbidden_skips:
        terminalreporter.write_line(f"SKIPPED in CI, which counts as a failure: {skip}", red=True)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with open_stage(tmp_path) as stage:
        yield stage
