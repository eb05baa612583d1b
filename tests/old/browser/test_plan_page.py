"""The page of a plan in a real browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.plan.calibrate import fit
from paceline.plan.forecast import counts_between, forecast
from paceline.plan.inputs import ForecastRequest
from paceline.plan.measured_forecast import compare_placements, forecast_of_steps
from paceline.plan.model import Layout
from paceline.plan.step_constants import Observation, Placement
from paceline.report.plan_page import render_plan_page
from paceline.report.plan_plots import plan_plots
from paceline.spec import Job
from paceline.spec.forecast import Forecast
from tests.kit.chromium import Browser
from tests.old.browser.conftest import Scheme, check_colours, check_page, show
from tests.old.sample_clusters import cpu_cluster, gpu_cluster

pytestmark = pytest.mark.browser

JOB = Job(global_batch_size=1024, virtual_shards=1024)


def _fitted() -> Forecast:
    """Of measured steps, with several placements of as many devices and a warning."""
    measured = [Observation(Placement(Layout((count,)), 64), step_s) for count, step_s in ((2, 0.331), (4, 0.352))]
    asked = [Placement(Layout(nodes), size) for nodes in ((8,), (2, 6), (8, 8)) for size in (16, 256)]
    rows = compare_placements(fit(measured), measured, asked)
    warnings = ("obs.csv, line 3, contradicts the other rows; it was left out, for it looks like milliseconds.",)
    return forecast_of_steps("obs", list(rows.values()), warnings=warnings)


PLANS = {
    "few": forecast(JOB, gpu_cluster(), [1, 2, 4, 8, 16]),
    "many": forecast(
        JOB,
        gpu_cluster(),
        counts_between(1, 1024),
        ForecastRequest(price_per_device_hour=2.5, noise_scale=3000, target_samples=1e8),
    ),
    "stay": forecast(Job(global_batch_size=64, virtual_shards=4), cpu_cluster(4), [1, 2, 4, 8]),
    "alone": forecast(JOB, gpu_cluster(1), [1]),
    "fitted": _fitted(),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plan")
    found = {name: folder / f"{name}.html" for name in PLANS}
    for name, page in found.items():
        page.write_text(render_plan_page(PLANS[name]), encoding="utf-8")
    return found


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("width", [360, 1400])
def test_all_is_drawn_without_network_errors_or_overflow(
    browser: Browser, pages: dict[str, Path], name: str, width: int
) -> None:
    check_page(browser, pages[name], plan_plots(PLANS[name]), width=width)


def test_no_column_of_a_table_is_cut_on_a_wide_screen(browser: Browser, pages: dict[str, Path]) -> None:
    for page in pages.values():
        show(browser, page, width=1400)
        cut = browser.run(
            "return [...document.querySelectorAll('.scroll:has(table)')]"
            ".map((box) => box.scrollWidth - box.clientWidth).filter((more) => more > 0);"
        )
        assert cut == [], page.name


def test_it_prints_on_four_pages_and_plots_fill_their_boxes(browser: Browser, pages: dict[str, Path]) -> None:
    show(browser, pages["many"])
    assert len(re.findall(rb"/Type\s*/Page\b", browser.print())) <= 4
    browser.cdp("Emulation.setEmulatedMedia", media="print")
    heights = browser.run("return [...document.querySelectorAll('.plot')].map((plot) => plot.clientHeight);")
    browser.cdp("Emulation.setEmulatedMedia", media="")
    assert heights and set(heights) == {215}


def test_every_figure_of_a_printed_table_takes_one_line(browser: Browser, pages: dict[str, Path]) -> None:
    show(browser, pages["many"], width=718)  # A4 without its margins
    browser.cdp("Emulation.setEmulatedMedia", media="print")
    wrapped, too_wide = browser.run(
        """
        const lines = (cell) => {
            const range = document.createRange();
            range.selectNodeContents(cell);
            return new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size;
        };
        const table = document.querySelector(".results");
        const cells = [...table.querySelectorAll("tbody td")];
        const wrapped = cells.filter((cell) => lines(cell) > 1).map((cell) => cell.innerText);
        return [wrapped, table.getBoundingClientRect().right - innerWidth];
        """
    )
    browser.cdp("Emulation.setEmulatedMedia", media="")
    assert wrapped == []
    assert too_wide <= 0


def test_the_recommended_row_is_marked(browser: Browser, pages: dict[str, Path]) -> None:
    show(browser, pages["many"])
    marked = browser.run(
        "return [...document.querySelector('.results').querySelectorAll('tr.recommended')].map((row) => row.innerText);"
    )
    assert [row.split()[:2] for row in marked] == [[str(PLANS["many"].recommended_devices), "recommended"]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lines_and_words_are_visible_in_either_scheme(browser: Browser, pages: dict[str, Path], scheme: Scheme) -> None:
    show(browser, pages["many"], scheme=scheme)
    surface, words, lines = browser.run(
        """
        const style = (selector) => [...document.querySelectorAll(selector)].map((e) => getComputedStyle(e));
        return [
            getComputedStyle(document.querySelector("figure")).backgroundColor,
            [...style(".results tbody td").map((s) => s.color), ...style(".xtick text").map((s) => s.fill)],
            style("#plot-plan-speedup .trace path.js-line").map((s) => s.stroke).filter((color) => color !== "none"),
        ];
        """
    )
    assert len(words) > 50
    check_colours(scheme, surface, words, lines)
