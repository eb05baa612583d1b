"""The report in a real browser: nothing fetched, no errors, all plots drawn, light, dark, narrow, wide."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from paceline.report.files import write_study
from paceline.report.study import Study, analyse
from paceline.report.study_plots import study_plots
from tests.kit.chromium import Browser
from tests.old.browser.conftest import TWO_FRAMES, Scheme, contrast, rgb, show
from tests.old.sample_records import sample_grown_records, sample_job, sample_study_records

pytestmark = pytest.mark.browser

STUDIES = {
    "strong": analyse(sample_study_records(), grow="none", tolerance=0.01),
    "grown": analyse(sample_grown_records(), grow="batch", tolerance=0.01),
    "bitwise": analyse(sample_study_records(job=sample_job(parity="bitwise")), grow="none", tolerance=0.01),
    "many": analyse(sample_study_records((2, 4, 8, 16, 32, 64)), grow="none", tolerance=0.01),
    "single": analyse(sample_study_records((1,), (0,)), grow="none", tolerance=0.01),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("report")
    for name, study in STUDIES.items():
        write_study(study, folder / name)
    return {name: folder / name / "report.html" for name in STUDIES}


@pytest.mark.parametrize("name", STUDIES)
def test_it_opens_without_network_and_without_errors(browser: Browser, pages: dict[str, Path], name: str) -> None:
    show(browser, pages[name])
    urls = browser.requested_urls()
    assert pages[name].resolve().as_uri() in urls
    assert [url for url in urls if not url.startswith(("file:", "data:", "blob:"))] == []
    assert browser.log("browser") == []
    outside = browser.run(
        "return [...document.querySelectorAll('[src], [href]')]"
        ".map((element) => element.getAttribute('src') || element.getAttribute('href'))"
        ".filter((address) => /^(https?:)?\\/\\//.test(address));"
    )
    assert outside == []


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("width", [360, 1400])
def test_every_plot_is_drawn_and_nothing_sticks_out(
    browser: Browser, pages: dict[str, Path], name: str, width: int
) -> None:
    study: Study = STUDIES[name]
    show(browser, pages[name], width=width)
    plots = study_plots(study)
    assert browser.run("return document.querySelectorAll('svg.main-svg').length;") >= len(plots)
    for plot in plots:
        drawn = browser.run(
            f"const plot = document.getElementById('plot-{plot.key}');"
            "const svg = plot.querySelector('svg.main-svg');"
            "return [plot.querySelectorAll('.trace').length, svg.clientWidth, plot.clientWidth,"
            " plot.getBoundingClientRect().right];"
        )
        assert drawn[0] > 0, plot.key
        assert 0 < drawn[1] <= drawn[2], plot.key
        assert drawn[3] <= width, plot.key
    scroll, inner = browser.run("return [document.documentElement.scrollWidth, innerWidth];")
    assert inner == width
    assert scroll <= inner


def test_narrow_is_one_column_and_wide_is_two(browser: Browser, pages: dict[str, Path]) -> None:
    columns = """
        const figures = [...document.querySelectorAll("figure")];
        return new Set(figures.map((figure) => figure.getBoundingClientRect().left)).size;
    """
    show(browser, pages["strong"], width=1400)
    assert browser.run(columns) == 2
    show(browser, pages["strong"], width=360)
    assert browser.run(columns) == 1


def test_all_columns_of_the_table_fit_on_any_screen(browser: Browser, pages: dict[str, Path]) -> None:
    widths = (
        "return [...document.querySelectorAll('.scroll:has(table)')].map((box) => [box.scrollWidth, box.clientWidth]);"
    )
    for name, width in product(("strong", "grown", "many"), (1400, 360)):
        show(browser, pages[name], width=width)
        assert all(content <= box for content, box in browser.run(widths)), (name, width)
    show(browser, pages["many"], width=360)
    # On a narrow screen a row is a card, and every cell of it names its column.
    named = browser.run(
        "const cell = document.querySelector('.results tbody td');"
        "return [getComputedStyle(cell, '::before').content, cell.getBoundingClientRect().width];"
    )
    assert "Training time" in named[0].replace("\\a ", " ").replace("\n", " ")
    assert named[1] > 100


def test_it_is_small_and_prints_on_four_pages(browser: Browser, pages: dict[str, Path]) -> None:
    for page in pages.values():
        assert page.stat().st_size < 1_000_000
    show(browser, pages["strong"])
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", browser.print())) <= 4


def test_the_recommended_row_is_marked(browser: Browser, pages: dict[str, Path]) -> None:
    show(browser, pages["grown"])
    marked = browser.run(
        "return [...document.querySelectorAll('.results tr.recommended')].map((row) => row.innerText);"
    )
    assert len(marked) == 1
    assert marked[0].split()[:2] == ["2", "recommended"]


COLORS = """
    const all = (selector) => [...document.querySelectorAll(selector)];
    const one = (selector) => getComputedStyle(document.querySelector(selector));
    const fill = (element) => getComputedStyle(element).fill;
    const fills = (...selectors) => selectors.flatMap(all).map(fill);
    const labelled = all("#plot-step-time .point").filter((point) => point.querySelector("text"));
    return {
        page: one("html").backgroundColor,
        surface: one("figure").backgroundColor,
        plots: fills(".xtick text", ".ytick text", ".xtitle", ".legendtext", ".annotation-text"),
        on_page: [".verdict", ".kind", "h2", ".meaning dd"].map((selector) => one(selector).color),
        on_surface: ["figcaption", ".results td", ".results th", ".facts dt", "pre"].map((s) => one(s).color),
        bars: fills("#plot-train-time .point path"),
        badge: [one(".badge").color, one(".badge").backgroundColor],
        step: labelled.map((point) => [fill(point.querySelector("text")), fill(point.querySelector("path"))]),
    };
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_meets_aa_and_marks_are_visible(browser: Browser, pages: dict[str, Path], scheme: Scheme) -> None:
    show(browser, pages["many"], scheme=scheme)
    found = browser.run(COLORS)
    page, surface = rgb(found["page"]), rgb(found["surface"])
    assert len(found["plots"]) > 50
    for text in found["plots"] + found["on_surface"]:
        assert contrast(rgb(text), surface) >= 4.5, text
    for text in found["on_page"]:
        assert contrast(rgb(text), page) >= 4.5, text
    assert contrast(*map(rgb, found["badge"])) >= 4.5
    assert found["step"]
    for text, part in found["step"]:
        assert contrast(rgb(text), rgb(part)) >= 4.5, (text, part)
    assert len(found["bars"]) == 6
    for bar in found["bars"]:
        assert contrast(rgb(bar), surface) >= 3, bar


def test_dark_is_dark_light_is_light_and_plots_follow_a_change(browser: Browser, pages: dict[str, Path]) -> None:
    show(browser, pages["strong"], scheme="light")
    light = browser.run(COLORS)
    browser.look(width=1400, scheme="dark")
    browser.run(TWO_FRAMES)
    dark = browser.run(COLORS)
    assert min(rgb(light["page"])) > 200
    assert max(rgb(dark["page"])) < 60
    assert set(light["plots"]).isdisjoint(dark["plots"])
    assert set(light["bars"]).isdisjoint(dark["bars"])
