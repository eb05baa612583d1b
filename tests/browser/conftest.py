from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser import chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Browser]:
    """One headless Chromium for all tests of the session; skips where there is none."""
    reason = chromium.missing()
    if reason is not None:
        pytest.skip(reason)
    with chromium.open_browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened
