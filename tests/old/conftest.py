"""The suite of the second edition: run nightly, without budgets, until the code that its files test is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

_FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_FOLDER):
            item.add_marker(pytest.mark.budget(processor_s=600))
