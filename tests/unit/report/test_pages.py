"""Tables, pages and drawings show the numbers they are given, need nothing beside them, and take no markup."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import paceline
from paceline.report.plan_page import plan_page, plan_table
from paceline.report.study import Study
from paceline.report.study_page import study_table
from paceline.report.topology import choice_lines, node_view, topology_mapping
from paceline.spec import Cluster, Device, Job, Link, Node
from paceline.spec.forecast import Forecast
from tests.data import topologies
from tests.kit.html import Page
from tests.unit.plan.clusters import forecast_of, gpu_cluster
from tests.unit.report.showing import (
    ENVIRONMENT,
    grown_records,
    job_of,
    record_of,
    records_of,
    study_of,
    terminal,
)

EVIL = "</script><script>alert(1)</script>"
JOB = Job(global_batch_size=1024, virtual_shards=1024)
STUDIES: dict[str, Callable[[], Study]] = {
    "fixed batch": lambda: study_of(records_of()),
    "grown batch": lambda: study_of(grown_records()),
    "bitwise": lambda: study_of(records_of(job=job_of(parity="bitwise"))),
    "one count": lambda: study_of(records_of((1,), (0,))),
    "not evaluated": lambda: study_of([record_of(count, accuracy=None) for count in (1, 2)]),
    "diverged": lambda: study_of([record_of(1), record_of(2, loss=math.nan, train_loss=math.inf, accuracy=0.1)]),
    "no epochs": lambda: study_of([record_of(accuracy=None, epochs=())]),
    "ten counts": lambda: study_of(records_of(tuple(range(1, 11)), (0,))),
}
FORECASTS: dict[str, Callable[[], Forecast]] = {
    "few": lambda: forecast_of(JOB, gpu_cluster(), [1, 2, 4, 8, 16]),
    "many": lambda: forecast_of(JOB, gpu_cluster(), "1..1024", price="2.5 EUR", noise_scale=3000, target_samples=1e8),
    "run": lambda: forecast_of(
        Job(global_batch_size=1024, virtual_shards=4, epochs=3),
        gpu_cluster(num_samples=50_000),
        [1, 2, 3, 4],
        price="2.5 EUR",
    ),
    "refused": lambda: forecast_of(Job(global_batch_size=64, virtual_shards=4), gpu_cluster(), [1, 4, 8]),
    "one": lambda: forecast_of(JOB, gpu_cluster(1), [1]),
}
PAGES = (*STUDIES, *FORECASTS)


@functools.cache
def study_named(name: str) -> Study:
    return STUDIES[name]()


@functools.cache
def forecast_named(name: str) -> Forecast:
    return FORECASTS[name]()


@functools.cache
def page_of(name: str) -> str:
    return study_named(name).page() if name in STUDIES else plan_page(forecast_named(name))


@pytest.mark.parametrize("name", PAGES)
def test_a_page_needs_nothing_but_itself(name: str) -> None:
    page = Page(page_of(name))
    assert page.outside() == []
    policies = [attributes.get("content") or "" for tag, attributes in page.tags if tag == "meta"]
    assert any(policy.startswith("default-src 'none'") for policy in policies)
    assert not re.search(r"@import|url\((?!#|data:|\"data:)", page_of(name))
    assert len(page_of(name).encode()) < 700_000


@pytest.mark.parametrize("name", PAGES)
def test_a_page_can_be_read_aloud_and_is_for_small_screens_too(name: str) -> None:
    page = Page(page_of(name))
    assert ("html", {"lang": "en"}) in page.tags
    assert all("scope" in attributes for tag, attributes in page.tags if tag == "th")
    plots = [attributes for _, attributes in page.tags if attributes.get("class") == "plot"]
    assert all(attributes.get("role") == "img" and attributes.get("aria-label") for attributes in plots)
    assert any(attributes.get("name") == "viewport" for tag, attributes in page.tags if tag == "meta")
    assert "@media print" in page.html and "prefers-color-scheme: dark" in page.html


@pytest.mark.parametrize("name", PAGES)
def test_every_colour_is_defined_for_light_and_dark(name: str) -> None:
    html = page_of(name)
    style = html[html.index("<style>") : html.index("</style>")]
    light, dark = style.split("prefers-color-scheme: dark", 1)
    for colour in set(re.findall(r"var\((--[a-z0-9-]+)\)", html)):
        assert f"{colour}:" in light and f"{colour}:" in dark, colour


@pytest.mark.parametrize("name", STUDIES)
def test_the_study_page_says_its_verdict_and_every_number(name: str) -> None:
    study, text = study_named(name), Page(page_of(name)).text
    assert study.recommendation.verdict in text and study.recommendation.reason in text
    assert ENVIRONMENT["git_commit"] in text and study.name in text
    for row in study.rows:
        assert row.accuracy is None or f"{100 * row.accuracy:.2f} %" in text
        assert row.speedup is None or f"{row.speedup:.2f}x" in text
        assert f"{row.samples_per_s:,.0f}" in text
    for sentence in study.recommendation.rejected.values():
        assert sentence in text


def test_the_study_page_says_what_limits_its_verdict() -> None:
    one_seed = study_of([record_of(1), record_of(2, environment=ENVIRONMENT | {"torch": "2.6.0"})])
    text = Page(one_seed.page()).text
    assert "single seed" in text and "2.13.0+cpu" in text and "2.6.0" in text
    assert "4 devices has only 0 and 1" in Page(study_of(records_of()[:-1]).page()).text
    bitwise = Page(page_of("bitwise")).text
    assert "Same weights" in bitwise and study_named("bitwise").records[0].weights_sha256 in bitwise
    assert "Same weights" not in Page(page_of("fixed batch")).text
    grown = Page(page_of("grown batch")).text
    assert grown.count("Learning rate scaled 4x to 0.2 with the batch.") == 1


@pytest.mark.parametrize("name", FORECASTS)
def test_the_plan_page_says_its_verdict_every_row_and_every_assumption(name: str) -> None:
    forecast, text = forecast_named(name), Page(page_of(name)).text
    for sentence in (forecast.verdict, forecast.reason, *forecast.strategy, *forecast.assumptions):
        assert " ".join(sentence.split()) in text, sentence
    for row in forecast.rows:
        for figure in (f"{row.devices:,}", f"{row.speedup:.2f}x", f"{100 * row.efficiency:.0f} %"):
            assert figure in text, (row.devices, figure)
        assert row.objection in text
    assert (plan_page(forecast).count('class="recommended"') >= 1) or len(forecast.rows) == 1


def test_the_plan_page_has_the_price_of_the_run() -> None:
    forecast = forecast_named("run")
    cost = 2.5 * forecast.rows[0].devices * 150_000 / forecast.rows[0].samples_per_s / 3600
    text = Page(plan_page(forecast)).text
    assert f"{cost:.2f} EUR" in text and "2.50 EUR" in text


def test_a_page_says_how_accurate_earlier_forecasts_were() -> None:
    found = replace(forecast_named("few"), past_error="within 4 % on the last 12 runs")
    for shown in (Page(plan_page(found)).text, terminal(plan_table(found), 160)):
        assert "within 4 % on the last 12 runs" in shown
    assert "were right" not in Page(page_of("few")).text


def test_names_and_notes_cannot_become_markup() -> None:
    record = record_of(job=job_of(name=EVIL), notes=(EVIL,), environment={"cpu": EVIL})
    forecast = replace(forecast_named("few"), job=EVIL, device=EVIL, assumptions=(EVIL,), verdict=EVIL)
    for html in (study_of([record]).page(), plan_page(forecast)):
        assert EVIL not in html and "&lt;script&gt;alert(1)" in html


@pytest.mark.parametrize("name", PAGES)
def test_figures_have_no_numbers_that_json_lacks(name: str) -> None:
    assert not re.search(r"\b(NaN|Infinity)\b", page_of(name))


def numbers_drawn(html: str) -> list[float]:
    """All numbers in a page's scripts, ascending; the plotting library is packed and has none."""
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    return sorted({float(number) for script in scripts for number in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", script)})


@pytest.mark.parametrize("name", ["few", "one", "refused"])
def test_the_interval_and_the_parts_of_a_step_are_drawn_as_they_are_forecast(name: str) -> None:
    drawn = numbers_drawn(page_of(name))
    rows = forecast_named(name).rows
    for row in rows:
        low, high = row.global_batch_size / row.high_s, row.global_batch_size / row.low_s
        for value in (low, row.samples_per_s, high, row.compute_s):
            place = bisect.bisect_left(drawn, value * (1 - 1e-3))
            assert place < len(drawn) and drawn[place] <= value * (1 + 1e-3), (row.devices, value)


@pytest.mark.parametrize("name", ["fixed batch", "grown batch"])
def test_what_a_study_measured_is_drawn(name: str) -> None:
    drawn = numbers_drawn(page_of(name))
    for row in study_named(name).rows:
        for value in (
            row.speedup,
            row.step_time.compute_s,
            *(fraction and 100 * fraction for fraction in (row.accuracy, row.accuracy_min, row.accuracy_max)),
        ):
            assert value is not None
            place = bisect.bisect_left(drawn, value * (1 - 1e-3))
            assert place < len(drawn) and drawn[place] <= value * (1 + 1e-3), (row.devices, value)


# --- tables in the terminal ---


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("width", [80, 120])
def test_the_study_table_in_a_pipe_is_plain_and_cuts_no_number(name: str, width: int) -> None:
    study = study_named(name)
    text = terminal(study_table(study), width)
    assert "\x1b" not in text and "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for row in study.rows:
        assert row.accuracy is None or f"{100 * row.accuracy:.2f} %" in text
    assert ("accuracy" in text.splitlines()[0]) == any(row.accuracy is not None for row in study.rows)
    marked = [
        line.split()[1] for line in text.splitlines() if line.strip().startswith("* ") and "recommended" not in line
    ]
    assert marked == ([str(study.recommendation.devices)] if len(study.rows) > 1 else [])
    assert study.recommendation.verdict in " ".join(text.split())


@pytest.mark.parametrize("name", FORECASTS)
@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_the_plan_table_fits_and_marks_the_recommended_row(name: str, width: int) -> None:
    forecast = forecast_named(name)
    text = terminal(plan_table(forecast), width)
    table = text.split("\n\n")[0]
    assert max(map(len, text.splitlines())) <= width and "…" not in table
    marked = [line for line in table.splitlines() if line.startswith("* ")]
    assert [line.split()[1] for line in marked] == [f"{forecast.recommended_devices:,}"]
    assert "efficiency" in table
    if len(forecast.rows) > 100:  # powers of two and the recommended one stand for all
        assert f"of {len(forecast.rows)} counts" in " ".join(text.split())


def test_a_forecast_and_a_study_show_themselves_in_notebooks() -> None:
    planned = paceline.plan(JOB, cluster=gpu_cluster(1), devices=[1, 2])
    for html, figure in (
        (planned._repr_html_(), f"{planned.forecast.rows[1].speedup:.2f}x"),
        (study_named("fixed batch")._repr_html_(), f"{study_named('fixed batch').rows[1].speedup:.2f}x"),
    ):
        assert html.startswith("<") and figure in html
    assert paceline.topo(topologies.path_of("dgx1"))._repr_html_().startswith("<svg")


# --- a node: its table and its drawing ---

RECORDED = topologies.names()
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("width", [60, 400])
def test_the_table_of_a_node_has_every_label_where_it_belongs(name: str, width: int) -> None:
    node = topologies.load(name).nodes[0]
    lines = terminal(node_view(node, width), width).splitlines()
    assert all(len(line) <= width for line in lines) and not any("…" in line for line in lines)
    columns = [device.label for device in node.devices] + list(node.nics)
    found: dict[tuple[str, str], str] = {}
    heads: Sequence[str] = ()
    for line in lines:
        words = line.split()
        if len(words) > 0 and set(words) <= set(columns):
            heads = words
        elif heads and words and words[0] in columns and len(words) == len(heads) + 1:
            found |= {(words[0], head): cell for head, cell in zip(heads, words[1:], strict=True)}
    for device in node.devices:
        for column in columns:
            link = node.link(device.label, column)
            expected = "X" if device.label == column else link.label if link else "\N{EN DASH}"
            assert found[device.label, column] == expected, (device.label, column)


def test_links_of_the_ring_are_marked_without_colours() -> None:
    node = topologies.load("dgx1").nodes[0]
    assert terminal(node_view(node, 200, (0, 3, 2, 1, 5, 6, 7, 4)), 200).count("NV2*") == 16
    assert "*" not in terminal(node_view(node, 200), 200)


def test_a_node_without_gpus_and_what_is_busy_are_shown() -> None:
    cards = {"NIC0": "eth0"}
    laptop = Node("laptop", 2, 2**34, "a processor", tuple(Device("cpu", i, "a processor", 0) for i in range(2)), cards)
    text = terminal(node_view(laptop, 100), 100)
    assert all(words in text for words in ("2 cores", "16 GiB", "a processor", "eth0", "No GPU"))
    busy = (Device("cuda", 0, "", 0, busy="62 % busy [python]"), Device("cuda", 1, "", 0))
    node = Node("n", 8, 0, "", busy, {}, (Link(("GPU0", "GPU1"), "NV4", 1e11),), ("GPU9 is left out.",))
    text = terminal(node_view(node, 100), 100)
    assert "62 % busy [python]" in text and "GPU9 is left out." in text  # brackets are no markup


def drawing_of(node: Node, tmp_path: Path) -> ET.Element:
    paceline.topo(Cluster((node,)), svg=tmp_path / "node.svg")
    return ET.fromstring((tmp_path / "node.svg").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", RECORDED)
def test_every_device_and_card_is_drawn_once(name: str, tmp_path: Path) -> None:
    node = topologies.load(name).nodes[0]
    texts = [text.text for text in drawing_of(node, tmp_path).iter(f"{SVG}text")]
    for device in node.devices:
        assert texts.count(f"GPU {device.index}") == 1
    for label in node.nics:
        assert texts.count(label) == 1


@pytest.mark.parametrize("num_devices", [0, 1, 2, 17, 40])
def test_any_number_of_gpus_can_be_drawn(num_devices: int, tmp_path: Path) -> None:
    node = Node("n", 4, 0, "", tuple(Device("cuda", i, "", 0) for i in range(num_devices)))
    drawing = drawing_of(node, tmp_path)
    assert drawing.get("viewBox") and not list(drawing.iter(f"{SVG}script"))


def test_names_from_a_file_do_not_become_markup(tmp_path: Path) -> None:
    node = dataclasses.replace(topologies.load("dgx1").nodes[0], hostname='a"<script>&')
    drawing = drawing_of(node, tmp_path)
    title = drawing.find(f"{SVG}title")
    assert title is not None and title.text is not None and 'a"<script>&' in title.text
    assert drawing.find(f".//{SVG}script") is None


def test_a_choice_is_told_with_the_line_to_copy() -> None:
    found = paceline.topo(topologies.path_of("dgx1"), pick=2)
    assert found.choice is not None
    lines = choice_lines(found.choice)
    assert lines[-1] == "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0,3"
    said = " ".join(lines)
    assert all(
        words in said for words in ("GPUs 0 and 3", "NV2", "50 GB/s", "GPUs 0 and 1", "40.0 ms", "20.0 ms", "2.00x")
    )
    mapping = topology_mapping(found.node, found.choice)
    assert (mapping["devices"], mapping["pairs"]) == ([0, 3], {"0-3": "NV2"})
    assert mapping["bottleneck"] == {"label": "NV2", "bytes_per_s": 50e9}
    assert mapping["environment"] == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0,3"}
