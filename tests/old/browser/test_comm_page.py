"""The page of a communication benchmark in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.report.comm_page import write_comm_bench
from paceline.report.comm_plots import comm_plots
from tests.kit.chromium import Browser
from tests.old.browser.conftest import TWO_FRAMES, Scheme, check_colours, check_page, show
from tests.old.sample_timings import CASES, HIERARCHICAL, sample_timings

pytestmark = pytest.mark.browser

BENCHES = {
    "nodes": sample_timings(),
    "node": sample_timings(nodes=((0, 1),), link_rate_bytes_per_s=None, link_bytes=False),
    "alone": sample_timings(nodes=((0,),), cases=[HIERARCHICAL], link_rate_bytes_per_s=None, link_bytes=False),
}
VISIBLE_LINES = "return document.querySelectorAll('#plot-comm-time .trace').length;"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("comm")
    for name, timings in BENCHES.items():
        write_comm_bench(timings, folder / name)
    return {name: folder / name / "comm.html" for name in BENCHES}


@pytest.mark.parametrize("name", BENCHES)
@pytest.mark.parametrize("width", [360, 1400])
def test_all_is_drawn_without_network_errors_or_overflow(
    browser: Browser, pages: dict[str, Path], name: str, width: int
) -> None:
    check_page(browser, pages[name], comm_plots(BENCHES[name]), width=width)


def test_a_key_hides_its_line_and_shows_it_again(browser: Browser, pages: dict[str, Path]) -> None:
    show(browser, pages["nodes"])
    all_lines = browser.run(VISIBLE_LINES)
    assert all_lines == len(CASES) + 1
    press = "document.querySelector('.key[data-case=ring]').click();"
    browser.run(press + TWO_FRAMES)
    assert browser.run(VISIBLE_LINES) == all_lines - 1
    browser.run(press + TWO_FRAMES)
    assert browser.run(VISIBLE_LINES) == all_lines


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lines_and_words_are_visible_in_either_scheme(browser: Browser, pages: dict[str, Path], scheme: Scheme) -> None:
    show(browser, pages["nodes"], scheme=scheme)
    surface, words, lines = browser.run(
        """
        const style = (selector) => [...document.querySelectorAll(selector)].map((e) => getComputedStyle(e));
        return [
            getComputedStyle(document.querySelector("figure")).backgroundColor,
            style(".key, .results td, .results th").map((s) => s.color).concat(style(".xtick text").map((s) => s.fill)),
            style("#plot-comm-time .trace path.js-line").map((s) => s.stroke),
        ];
        """
    )
    assert len(words) > 50
    assert len(lines) == len(CASES) + 1
    check_colours(scheme, surface, words, lines)
