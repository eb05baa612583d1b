from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from paceline.report.figure import NUM_SERIES, Plot
from paceline.report.page import render_page
from paceline.report.study import Study, analyse
from paceline.report.study_plots import study_plots
from paceline.spec import StepTime
from tests.old.sample_records import ENVIRONMENT, sample_job, sample_record, sample_study_records


class Outline(HTMLParser):
    """The tags with their attributes, and the text outside scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.pieces: list[str] = []
        self._silent = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._silent = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._silent = self._silent and tag not in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.pieces.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.pieces).split())


def keys(plots: list[Plot]) -> list[str]:
    return [plot.key for plot in plots]


@pytest.fixture
def outline(study: Study) -> Outline:
    return Outline(render_page(study))


def test_the_page_says_the_verdict_and_the_numbers(study: Study, outline: Outline) -> None:
    assert study.recommendation.verdict in outline.text
    assert study.recommendation.reason in outline.text
    for row in study.rows:
        assert f"{100 * (row.accuracy or 0):.2f} %" in outline.text
        assert f"{row.speedup:.2f}x" in outline.text
    assert "optim" in outline.text
    assert ENVIRONMENT["git_commit"] in outline.text


def test_the_page_reaches_for_nothing_outside(outline: Outline) -> None:
    for tag, attributes in outline.tags:
        for name in ("src", "href", "action", "data", "srcset"):
            value = attributes.get(name) or ""
            assert value == "" or value.startswith(("#", "data:")), (tag, name, value)
    assert any(
        tag == "meta" and (attributes.get("content") or "").startswith("default-src 'none'")
        for tag, attributes in outline.tags
    )


def test_the_page_is_accessible_by_its_markup(study: Study, outline: Outline) -> None:
    tags = outline.tags
    assert ("html", {"lang": "en"}) in tags
    assert all("scope" in attributes for tag, attributes in tags if tag == "th")
    plots = [attributes for _, attributes in tags if attributes.get("class") == "plot"]
    assert len(plots) == len(study_plots(study))
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in plots)


def test_names_and_notes_cannot_inject_markup() -> None:
    evil = "</script><script>alert(1)</script>"
    record = sample_record(job=sample_job(name=evil), notes=(evil,), environment={"cpu": evil})
    html = render_page(analyse([record], grow="none", tolerance=0.01))
    assert evil not in html
    assert "&lt;script&gt;alert(1)" in html


def test_each_note_stands_once_with_its_holders(grown_study: Study) -> None:
    text = Outline(render_page(grown_study)).text
    assert text.count("Learning rate scaled 4x to 0.2 with the batch.") == 1
    assert "4 devices: Learning rate scaled 4x" in text


def test_bitwise_runs_show_the_hash(bitwise_study: Study, outline: Outline) -> None:
    text = Outline(render_page(bitwise_study)).text
    assert "Same weights bit for bit on 1, 2 and 4 devices." in text
    assert bitwise_study.records[0].weights_sha256 in text
    assert "Same weights bit for bit" not in outline.text


def test_honesty_one_seed_and_other_environments() -> None:
    records = [sample_record(1), sample_record(2, environment=ENVIRONMENT | {"torch": "2.6.0"})]
    text = Outline(render_page(analyse(records, grow="none", tolerance=0.01))).text
    assert "A single seed shows no spread" in text
    assert "differs between runs: 2.13.0+cpu; 2.6.0" in text


def test_honesty_a_missing_seed_is_told() -> None:
    text = Outline(render_page(analyse(sample_study_records()[:-1], grow="none", tolerance=0.01))).text
    assert "4 devices has only 0 and 1" in text


def test_all_plots_people_expect(study: Study) -> None:
    assert keys(study_plots(study)) == [
        "speedup", "efficiency", "accuracy", "train-time", "accuracy-time", "step-time",
        "loss-epochs", "accuracy-epochs",
    ]  # fmt: skip


def test_plots_without_data_are_left_out() -> None:
    bare = analyse([sample_record(accuracy=None, epochs=())], grow="none", tolerance=0.01)
    assert keys(study_plots(bare)) == ["train-time", "step-time"]
    unevaluated = analyse([sample_record(n, accuracy=None) for n in (1, 2)], grow="none", tolerance=0.01)
    assert "eval-loss-epochs" in keys(study_plots(unevaluated))
    assert not any("accuracy" in key for key in keys(study_plots(unevaluated)))


def test_no_plot_leaves_a_hole_beside_it(study: Study) -> None:
    for records in (
        sample_study_records(),
        sample_study_records((1,)),
        [sample_record(accuracy=None, epochs=())],
    ):
        column = 0
        for plot in study_plots(analyse(records, grow="none", tolerance=0.01)):
            assert not (plot.wide and column == 1)
            column = 0 if plot.wide else 1 - column
        assert column == 0


def test_a_device_count_has_one_colour_in_every_plot(study: Study) -> None:
    plots = {plot.key: plot.figure["data"] for plot in study_plots(study)}
    expected = [f"var(--series-{index})" for index in (1, 2, 3)]
    for key in ("efficiency", "train-time"):
        assert plots[key][0]["marker"]["color"] == expected
    for key in ("loss-epochs", "accuracy-epochs", "accuracy-time"):
        assert [trace["line"]["color"] for trace in plots[key] if "name" in trace] == expected


def test_every_colour_name_is_defined_for_light_and_dark() -> None:
    html = render_page(analyse(sample_study_records(tuple(range(1, 11)), (0, 1)), grow="none", tolerance=0.01))
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", html))
    style = html[html.index("<style>") : html.index("</style>")]
    light, dark = style.split("prefers-color-scheme: dark", 1)
    assert {f"--series-{index}" for index in range(1, NUM_SERIES + 1)} <= used
    for name in used:
        assert f"{name}:" in light, name
        assert f"{name}:" in dark, name


def test_parts_of_a_step_that_were_not_measured_are_shown_as_other() -> None:
    record = sample_record(step_time=StepTime(total_s=0.02, data_s=0.001, compute_s=0.01, exposed_comm_s=0.004))
    plots = {plot.key: plot for plot in study_plots(analyse([record], grow="none", tolerance=0.01))}
    assert [trace["name"] for trace in plots["step-time"].figure["data"]][-1] == "other"
    assert plots["step-time"].table[1] == ("1 device", "10.00", "1.00", "4.00", "5.00", "20.00")


def test_figures_are_plain_json(study: Study) -> None:
    for plot in study_plots(study):
        json.dumps(plot.figure, allow_nan=False)
