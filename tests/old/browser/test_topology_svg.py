"""The drawing of a node in a real browser."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from paceline.plan.pick import pick
from paceline.report.topology_svg import draw_topology
from tests.data import topologies
from tests.kit.chromium import Browser
from tests.old.browser.conftest import Scheme, check_colours

pytestmark = pytest.mark.browser

PICKS = {"dgx1": 8, "dgx2": 16, "a100_hgx": 8, "h100_hgx": 4, "h100_lost_tabs": 8, "l40s_8gpu": 3, "workstation_nv4": 2}

BOXES = """
return [...document.querySelectorAll("g > rect, svg > text")].map((e) => {
    const box = e.getBoundingClientRect();
    return [box.left, box.top, box.right, box.bottom];
});
"""
TEXTS_IN_BOXES = """
return [...document.querySelectorAll("g")].flatMap((g) => {
    const outer = g.querySelector("rect").getBoundingClientRect();
    return [...g.querySelectorAll("text")].map((t) => {
        const inner = t.getBoundingClientRect();
        return inner.left >= outer.left && inner.right <= outer.right
            && inner.top >= outer.top && inner.bottom <= outer.bottom;
    });
});
"""
COLOURS = """
const style = (selector) => [...document.querySelectorAll(selector)].map((e) => getComputedStyle(e));
return [
    getComputedStyle(document.querySelector(".surface")).fill,
    style("text").map((s) => s.fill),
    style(".link:not(.sockets)").map((s) => s.stroke).concat(style(".device.chosen rect").map((s) => s.stroke)),
];
"""


@pytest.fixture(scope="module")
def drawings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("topology")
    for name, num_devices in PICKS.items():
        node = topologies.load(name).nodes[0]
        drawing = draw_topology(node, pick(node, num_devices).ring.devices)
        (folder / f"{name}.svg").write_text(drawing, encoding="utf-8")
    return {name: folder / f"{name}.svg" for name in PICKS}


def show(browser: Browser, drawing: Path, scheme: Scheme = "light") -> None:
    browser.look(width=1000, scheme=scheme)
    browser.log("browser")
    browser.requested_urls()
    browser.open(drawing)


def overlap(one: list[float], other: list[float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


@pytest.mark.parametrize("name", PICKS)
def test_nothing_covers_anything_and_all_is_inside(browser: Browser, drawings: dict[str, Path], name: str) -> None:
    show(browser, drawings[name])
    assert browser.log("browser") == []
    assert [url for url in browser.requested_urls() if not url.startswith("file:")] == []
    width, height = browser.run(
        "const s = document.documentElement; return [s.width, s.height].map(v => v.baseVal.value);"
    )
    boxes: list[list[float]] = [box for box in browser.run(BOXES) if box[2] > box[0]]
    assert len(boxes) > PICKS[name]
    assert all(left >= 0 and top >= 0 and right <= width and bottom <= height for left, top, right, bottom in boxes)
    if name != "workstation_nv4":  # its one link carries its label
        assert [pair for pair in combinations(boxes, 2) if overlap(*pair)] == []
    assert all(browser.run(TEXTS_IN_BOXES))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["dgx1", "h100_hgx"])
def test_words_and_links_are_visible_in_either_scheme(
    browser: Browser, drawings: dict[str, Path], name: str, scheme: Scheme
) -> None:
    show(browser, drawings[name], scheme)
    found: list[Any] = browser.run(COLOURS)
    surface, words, lines = found
    assert len(words) > 10 and len(lines) > 10
    check_colours(scheme, surface, words, lines)


def test_the_ring_is_drawn_along_its_devices(browser: Browser, drawings: dict[str, Path]) -> None:
    show(browser, drawings["dgx1"])
    corners, middles = browser.run(
        """
        const middle = (r) => ["x", "y"].map((axis) => (
            r[axis].baseVal.value + r[axis === "x" ? "width" : "height"].baseVal.value / 2
        ));
        const devices = [...document.querySelectorAll(".device")];
        return [
            [...document.querySelector("polygon.ring").points].map((p) => [p.x, p.y]),
            Object.fromEntries(
                devices.map((g) => [g.querySelector("text").textContent, middle(g.querySelector("rect"))])
            ),
        ];
        """
    )
    expected = [middles[f"GPU {index}"] for index in (0, 3, 2, 1, 5, 6, 7, 4)]
    assert all(corner == pytest.approx(middle, abs=0.2) for corner, middle in zip(corners, expected, strict=True))


@pytest.mark.parametrize(("width", "expected"), [(1000, 920), (700, 700)])
def test_a_drawing_shrinks_with_its_window(
    browser: Browser, drawings: dict[str, Path], width: int, expected: int
) -> None:
    browser.look(width=width)
    browser.open(drawings["dgx1"])
    shown, height, ratio = browser.run(
        "const s = document.documentElement, box = s.getBoundingClientRect(), whole = s.viewBox.baseVal;"
        "return [box.width, box.height, whole.width / whole.height];"
    )
    assert shown == pytest.approx(expected, abs=1)
    assert shown / height == pytest.approx(ratio, rel=0.01)
