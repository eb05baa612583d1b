"""The processor time of every test with all its processes, beside its budget (a plugin of pytest).

A test that takes more than `DEFAULT_BUDGET_S` fails unless it states a budget, `@pytest.mark.budget(processor_s=20)`,
and one that exceeds its budget fails too. Budgets are seconds of the machine that `REFERENCE_S` was measured on; a
slower one has more. What fixtures of a module or a session need, and loading the fork server of `tests.kit.workers`, is
not charged to the test that happens to come first.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

DEFAULT_BUDGET_S = 5.0
REFERENCE_S = 0.03
"""Processor seconds of `_reference_work` on an Intel Xeon of two cores."""
NUM_SHOWN = 15
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

_spent_s: dict[str, float] = {}


def processor_s(pid: int) -> float:
    """User and system seconds of a process and of its descendants, those that ended and were waited for too."""
    try:
        is_fork_server = b"multiprocessing.forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()
        while True:
            own, waited_for = _ticks(pid)
            of_children_s = sum(map(processor_s, _children(pid)))
            if _ticks(pid)[1] == waited_for:  # else a child ended meanwhile, and would count twice or not at all
                break
    except OSError:  # it has ended
        return 0.0
    counted = waited_for if is_fork_server else own + waited_for
    return counted / _TICKS_PER_S + of_children_s


def _ticks(pid: int) -> tuple[int, int]:
    """Of a process itself, and of its children that ended and were waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # threads end while this looks at them
            found += map(int, (thread / "children").read_text().split())
    return found


def _reference_work() -> float:
    begin = time.process_time()
    total = 0
    for number in range(700_000):
        total += number * number % 7
    return time.process_time() - begin


@cache
def slowness() -> float:
    """How many times slower this machine is than the one of `REFERENCE_S`; at least 1."""
    return max(1.0, min(_reference_work() for _ in range(3)) / REFERENCE_S)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    limit_s = DEFAULT_BUDGET_S
    if budget := item.get_closest_marker("budget"):
        limit_s = float(budget.kwargs["processor_s"])
    before_s = processor_s(os.getpid())
    try:
        yield
    finally:
        spent_s = max(0.0, processor_s(os.getpid()) - before_s)  # a fork server that ends takes its children's along
        item.user_properties.append(("processor_s", round(spent_s, 2)))
    if spent_s > limit_s * slowness():
        pytest.fail(
            f"took {spent_s:.1f} processor seconds; its budget is {limit_s:g}, here {limit_s * slowness():.1f}",
            pytrace=False,
        )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    with contextlib.suppress(KeyError):
        _spent_s[report.nodeid] = float(str(dict(report.user_properties)["processor_s"]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The sums by folder, and the most expensive tests."""
    by_folder: dict[str, float] = defaultdict(float)
    for nodeid, seconds in _spent_s.items():
        by_folder[str(Path(nodeid.partition("::")[0]).parent)] += seconds
    if not by_folder or sum(by_folder.values()) < DEFAULT_BUDGET_S:
        return
    terminalreporter.section(f"processor seconds of tests: {sum(by_folder.values()):.0f}")
    for folder, seconds in sorted(by_folder.items(), key=lambda row: -row[1]):
        terminalreporter.write_line(f"{seconds:7.1f}  {folder}")
    largest = sorted(_spent_s.items(), key=lambda row: -row[1])[:NUM_SHOWN]
    terminalreporter.write_line(f"the {len(largest)} most expensive:")
    for nodeid, seconds in largest:
        terminalreporter.write_line(f"{seconds:7.1f}  {nodeid}")
