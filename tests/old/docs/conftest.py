from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.old.ranks.forked_commands import paceline_on_path


@pytest.fixture(scope="session")
def forked_paceline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a `paceline` for shells that need not load torch."""
    with paceline_on_path(tmp_path_factory.mktemp("commands")) as bin_folder:
        yield bin_folder
