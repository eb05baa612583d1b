"""The pages that commands write, in a real browser: drawn without an error, without the network, readable in light and
dark, on a telephone and on paper.

`tests/pages/data` holds what the pages are made of, recorded from real commands:

    paceline train digits-lenet -n 2 --max-steps 40 --out run      # run/record.json
    paceline probe digits-lenet                                     # cluster.json
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.kit.chromium import Browser, open_browser
from tests.kit.commands import forked_paceline, succeeded
from tests.kit.packages import need

pytestmark = [pytest.mark.timeout(900), pytest.mark.budget(processor_s=12)]

RECORDED = Path(__file__).parent / "data"
TOPOLOGY = Path(__file__).parents[1] / "data" / "topologies" / "h100_hgx.txt"
NAMES = ("study", "large study", "plan", "topology")
TELEPHONE, SCREEN, PAPER = 360, 1400, 718
"""Widths in pixels; paper is A4 without its margins."""

# A plot is a figure with an SVG in it; a page that is one drawing has no figures.
WAIT_UNTIL_DRAWN = """
    const drawn = () => [...document.querySelectorAll("figure")].every((figure) => figure.querySelector("svg path"));
    return new Promise((resolve) => {
        const last = Date.now() + 120000;
        const look = () => drawn() || Date.now() > last
            ? requestAnimationFrame(() => requestAnimationFrame(() => resolve(drawn()))) : setTimeout(look, 20);
        look();
    });
"""
TWO_FRAMES = "return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))));"

# What ends right of the window, but for what lies in a box that scrolls.
OUTSIDE = """
    const scrolls = (e) => ["auto", "scroll"].includes(getComputedStyle(e).overflowX);
    const within = (e) => e.parentElement && (scrolls(e.parentElement) || within(e.parentElement));
    return [...document.querySelectorAll("body *, svg, svg > *")].filter((e) => e.checkVisibility()
        && !e.ownerSVGElement && !within(e)
        && e.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5).map((e) => e.outerHTML);
"""
SCROLLED_SIDEWAYS = """
    return [...document.querySelectorAll("body *")].filter((e) => e.querySelector("table")
        && ["auto", "scroll"].includes(getComputedStyle(e).overflowX) && e.scrollWidth > e.clientWidth + 1)
        .map((e) => e.outerHTML);
"""

# WCAG 2.1: the contrast of every visible text, and of every line, with what is drawn under it.
CONTRASTS = """
    const rule = document.createElementNS("http://www.w3.org/1999/xhtml", "style");
    rule.textContent = "* { pointer-events: auto !important } svg * { pointer-events: visiblePainted !important }";
    document.documentElement.append(rule);
    const rgba = (css) => {
        const numbers = (css.match(/[\\d.]+/g) || []).map(Number);
        return numbers.length < 3 ? [0, 0, 0, 0] : [...numbers, 1].slice(0, 4);
    };
    const paint = (e, x, y) => {  // what the element covers this point with: its background or, in a drawing, its fill
        const style = getComputedStyle(e);
        if (!e.isPointInFill) return rgba(style.backgroundColor);
        if (!e.isPointInFill(new DOMPoint(x, y).matrixTransform(e.getScreenCTM().inverse()))) return [0, 0, 0, 0];
        const [r, g, b, alpha] = rgba(style.fill);
        return [r, g, b, alpha * style.fillOpacity * style.opacity];
    };
    const under = (elements, x = 0, y = 0) => {
        let color = [0, 0, 0], rest = 1;
        for (const [r, g, b, alpha] of [...elements.map((e) => paint(e, x, y)), [255, 255, 255, 1]]) {
            color = color.map((value, i) => value + rest * alpha * [r, g, b][i]);
            rest *= 1 - alpha;
        }
        return color;
    };
    const luminance = (color) => color.slice(0, 3).map((v) => v / 255)
        .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const contrast = (one, other) => {
        const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
        return (light + 0.05) / (dark + 0.05);
    };
    const texts = [], marks = [];
    const walker = document.createTreeWalker(document.documentElement, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const node = walker.currentNode, e = node.parentElement, range = document.createRange();
        range.selectNodeContents(node);
        const box = range.getClientRects()[0], style = getComputedStyle(e);
        if (!node.data.trim() || !box || !box.width || style.visibility === "hidden") continue;
        const [x, y] = [box.left + box.width / 2, box.top + box.height / 2];
        const stack = document.elementsFromPoint(x, y);
        if (!stack.includes(e)) continue;
        const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
        const color = rgba(e.ownerSVGElement ? style.fill : style.color);
        const found = contrast(color, under(stack.slice(stack.indexOf(e)), x, y));
        texts.push([node.data.trim(), found, large ? 3 : 4.5]);
    }
    const ancestors = (e) => e ? [e, ...ancestors(e.parentElement)] : [];
    // Parts of a stack are seen beside each other: of plots only free lines are compared with what they lie on.
    for (const e of document.querySelectorAll(".trace:not(:has(.js-fill)) .js-line, .link:not(.sockets)")) {
        const style = getComputedStyle(e), figure = e.closest("figure");
        if (style.stroke === "none" || parseFloat(style.strokeWidth) < 1) continue;
        const surface = under(figure ? ancestors(figure) : [document.querySelector(".surface")]);
        marks.push([e.getAttribute("class"), contrast(rgba(style.stroke), surface), 3]);
    }
    const page = document.querySelector(".surface") || document.documentElement;
    return { texts, marks, page: luminance(under([page])) };
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    need("chromium", "chromedriver")
    with open_browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    cluster = ("--cluster", str(RECORDED / "cluster.json"), "--devices", "1..64", "--link-rate", "1.25e9")
    commands = (
        ("report", *_write_runs(folder / "study", (1, 2, 4)), "--out", "study"),
        ("report", *_write_runs(folder / "large", (1, 2, 4, 8, 16, 32, 64)), "--out", "large"),
        ("plan", "digits-lenet", *cluster, "--set", "virtual_shards=64", "--price", "2.5 USD"),
        ("topo", "--from", str(TOPOLOGY), "--pick", "4", "--svg", "topology.svg"),
    )
    for command in commands:
        succeeded(forked_paceline(*command, cwd=folder))
    files = ("study/report.html", "large/report.html", "plan.html", "topology.svg")
    return {name: folder / file for name, file in zip(NAMES, files, strict=True)}


def _write_runs(folder: Path, device_counts: Sequence[int], seeds: Sequence[int] = (0, 1)) -> list[str]:
    """Run folders of a study: the recorded run as it might have been on other numbers of devices."""
    recorded = json.loads((RECORDED / "record.json").read_text())
    runs = []
    for devices in device_counts:
        for seed in seeds:
            record: dict[str, Any] = copy.deepcopy(recorded)
            record["job"]["seed"], record["plan"]["world_size"] = seed, devices
            record["accuracy"] += 0.001 * seed
            factor = 1 / devices + 0.01 * (devices - 1)
            for key, part in record["step_time"].items():
                record["step_time"][key] = part * factor
            for key in ("train_s", "wall_s"):
                record[key] *= factor
            record["samples_per_s"] /= factor
            run = folder / f"devices{devices}-seed{seed}"
            run.mkdir(parents=True)
            (run / "record.json").write_text(json.dumps(record))
            runs.append(str(run))
    return runs


def show(
    browser: Browser, page: Path, width: int, height: int = 900, scheme: Literal["light", "dark"] = "light"
) -> None:
    browser.look(width=width, height=height, scheme=scheme)
    browser.log("browser")
    browser.requested_urls()
    browser.open(page)
    assert browser.run(WAIT_UNTIL_DRAWN), browser.log("browser")


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_drawn_without_errors_or_network_and_fits_any_screen(
    browser: Browser, pages: dict[str, Path], name: str
) -> None:
    for width in (SCREEN, TELEPHONE):
        show(browser, pages[name], width)
        urls = browser.requested_urls()
        assert pages[name].resolve().as_uri() in urls
        assert [url for url in urls if not url.startswith(("file:", "data:", "blob:"))] == []
        assert browser.log("browser") == []
        assert browser.run(OUTSIDE) == [], width
        assert width == SCREEN or browser.run(SCROLLED_SIDEWAYS) == []
        drawn = browser.run("return document.querySelectorAll('.trace path, .link').length;")
        assert drawn > 5


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", NAMES)
def test_every_text_and_line_of_a_page_is_readable(
    browser: Browser, pages: dict[str, Path], name: str, scheme: Literal["light", "dark"]
) -> None:
    show(browser, pages[name], SCREEN, scheme=scheme)
    height = browser.run("return Math.ceil(document.documentElement.getBoundingClientRect().height);")
    show(
        browser, pages[name], SCREEN, height=height + 100, scheme=scheme
    )  # only what is in the window can be asked for
    found = browser.run(CONTRASTS)
    assert found["page"] < 0.05 if scheme == "dark" else found["page"] > 0.7
    assert len(found["texts"]) > 20 and len(found["marks"]) >= 2
    assert [shown for shown in found["texts"] + found["marks"] if shown[1] < shown[2]] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_page_prints_on_a_few_sheets_with_nothing_cut_off(
    browser: Browser, pages: dict[str, Path], name: str
) -> None:
    show(browser, pages[name], PAPER)
    sheets = re.findall(rb"/Type\s*/Page\b", browser.print())
    assert len(sheets) == 1 if name == "topology" else 2 <= len(sheets) <= 5
    browser.cdp("Emulation.setEmulatedMedia", media="print")
    try:
        browser.run("window.dispatchEvent(new Event('beforeprint'));" + TWO_FRAMES)
        assert browser.run(OUTSIDE) + browser.run(SCROLLED_SIDEWAYS) == []
    finally:
        browser.cdp("Emulation.setEmulatedMedia", media="")
