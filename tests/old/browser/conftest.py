"""The browser of the session, and what tests ask of every page in it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import pytest

from paceline.report.figure import Plot
from tests.kit import chromium
from tests.kit.chromium import Browser

Scheme = Literal["light", "dark"]
Color = tuple[float, float, float]

WAIT_UNTIL_DRAWN = """
    const root = document.documentElement;
    if (root.dataset.plots === "drawn") return true;
    return new Promise((resolve) => {
        new MutationObserver(() => resolve(true)).observe(root, { attributeFilter: ["data-plots"] });
        setTimeout(() => resolve(false), 20000);
    });
"""
TWO_FRAMES = "return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))));"


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One headless Chromium for all tests of the session; skips where there is none."""
    reason = chromium.missing()
    if reason is not None:
        pytest.skip(reason)
    with chromium.open_browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


def show(browser: Browser, page: Path, *, width: int = 1400, scheme: Scheme = "light") -> None:
    browser.look(width=width, scheme=scheme)
    browser.visit("about:blank")  # a live page before it would go on asking its server
    browser.log("browser")
    browser.requested_urls()
    browser.open(page)
    assert browser.run(WAIT_UNTIL_DRAWN), browser.log("browser")


def check_page(browser: Browser, page: Path, plots: Sequence[Plot], *, width: int) -> None:
    """All lines of all plots are drawn, nothing is fetched, nothing fails, nothing is wider than the window."""
    show(browser, page, width=width)
    assert [url for url in browser.requested_urls() if not url.startswith(("file:", "data:", "blob:"))] == []
    assert browser.log("browser") == []
    for plot in plots:
        num_lines, right = browser.run(
            f"const plot = document.getElementById('plot-{plot.key}');"
            "return [plot.querySelectorAll('.trace').length, plot.getBoundingClientRect().right];"
        )
        assert num_lines == len(plot.figure["data"]), plot.key
        assert right <= width, plot.key
    assert browser.run("return document.documentElement.scrollWidth;") <= width


def check_colours(scheme: Scheme, surface: str, words: Sequence[str], lines: Sequence[str]) -> None:
    """The surface is of its scheme, and what lies on it has the contrast that WCAG 2.1 asks of text and of drawings."""
    assert max(rgb(surface)) < 60 if scheme == "dark" else min(rgb(surface)) > 200
    assert words and lines
    assert all(contrast(rgb(word), rgb(surface)) >= 4.5 for word in words)
    assert all(contrast(rgb(line), rgb(surface)) >= 3 for line in lines)


def rgb(css: str) -> Color:
    numbers = [float(number) for number in re.findall(r"[\d.]+", css)]
    return numbers[0], numbers[1], numbers[2]


def contrast(one: Color, other: Color) -> float:
    """WCAG 2.1: (L1 + 0.05) / (L2 + 0.05) with the relative luminances of sRGB colours."""

    def luminance(color: Color) -> float:
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (channel / 255 for channel in color)
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
