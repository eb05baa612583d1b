from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from paceline.plan.forecast import counts_between, forecast
from paceline.plan.inputs import ForecastRequest
from paceline.report.plan_page import render_plan_page
from paceline.report.plan_plots import plan_plots
from paceline.report.plan_table import columns, plan_table, shown_rows
from paceline.spec import Job
from paceline.spec.forecast import Forecast
from tests.old.sample_clusters import gpu_cluster
from tests.old.unit.report.test_page import Outline

JOB = Job(global_batch_size=1024, virtual_shards=1024)
FULL = ForecastRequest(price_per_device_hour=2.5, noise_scale=3000, target_samples=1e8)


@pytest.fixture(scope="module")
def few() -> Forecast:
    return forecast(JOB, gpu_cluster(), [1, 2, 4, 8, 16])


@pytest.fixture(scope="module")
def many() -> Forecast:
    return forecast(JOB, gpu_cluster(), counts_between(1, 1024), FULL)


def shown(found: Forecast, width: int) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, highlight=False).print(plan_table(found, width))
    return stream.getvalue()


def test_the_page_says_the_verdict_and_every_row(many: Forecast) -> None:
    outline = Outline(render_plan_page(many))
    for sentence in (many.verdict, many.reason, many.bend, *many.strategy, *many.assumptions):
        assert sentence in outline.text
    for _, cell in columns(many):
        assert cell(many.recommended) in outline.text
    rows = [attributes for tag, attributes in outline.tags if tag == "tr"]
    shown = {row.devices for row in many.rows if row.devices & (row.devices - 1) == 0} | {many.recommended.devices}
    assert len(rows) == 2 + len(shown) + len(many.rows)  # powers of two with the recommended one, then all
    assert [attributes.get("class") for attributes in rows].count("recommended") == 2


def test_time_and_price_of_the_whole_run_and_where_the_batch_is_uneven() -> None:
    cluster = gpu_cluster()
    sized = dataclasses.replace(cluster, timings=(dataclasses.replace(cluster.timings[0], num_samples=50_000),))
    request = ForecastRequest(price_per_device_hour=2.5, currency="EUR")
    job = Job(global_batch_size=1024, virtual_shards=4, epochs=3)
    found = forecast(job, sized, [1, 2, 3, 4], request)
    one = found.rows[0]
    assert found.run_samples == 150_000
    cost = 2.5 * 150_000 / one.samples_per_s / 3600
    assert dict(columns(found))["cost of run"](one) == f"{cost:.2f} EUR"
    text = Outline(render_plan_page(found)).text
    assert "2.50 EUR a device and hour" in text
    assert "On 3 devices the batch cannot be dealt out evenly" in text
    plots = {plot.key: plot for plot in plan_plots(found)}
    assert [trace["x"] for trace in plots["plan-speedup"].figure["data"] if trace.get("mode") == "text"] == [[3]]
    assert (plots["plan-cost"].title, plots["plan-cost"].caption) == (
        "Cost of the run",
        "All epochs, without failures.",
    )
    a_million = {plot.key: plot for plot in plan_plots(forecast(job, cluster, [1, 2, 3, 4], request))}
    assert (a_million["plan-cost"].title, a_million["plan-cost"].caption) == (
        "Cost of a million samples",
        "Without failures.",
    )
    shared = [dataclasses.replace(row, num_micro_batches=4 * row.num_micro_batches) for row in found.rows]
    assert "dealt out evenly" not in plan_plots(dataclasses.replace(found, rows=tuple(shared)))[2].caption


def test_the_page_reaches_for_nothing_outside_and_can_be_read_aloud(few: Forecast) -> None:
    tags = Outline(render_plan_page(few)).tags
    for tag, attributes in tags:
        for name in ("src", "href", "action"):
            value = attributes.get(name) or ""
            assert value == "" or value.startswith(("#", "data:")), (tag, name, value)
    plots = [attributes for _, attributes in tags if attributes.get("class") == "plot"]
    assert len(plots) == len(plan_plots(few))
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in plots)
    assert all("scope" in attributes for tag, attributes in tags if tag == "th")


def test_names_cannot_inject_markup(few: Forecast) -> None:
    evil = "</script><script>alert(1)</script>"
    html = render_plan_page(dataclasses.replace(few, job=evil, device=evil, assumptions=(evil,)))
    assert evil not in html
    assert "&lt;script&gt;alert(1)" in html


def test_plots_are_plain_finite_json_with_all_counts(many: Forecast) -> None:
    plots = plan_plots(many)
    assert [plot.key for plot in plots] == [
        "plan-step", "plan-throughput", "plan-speedup", "plan-efficiency", "plan-time", "plan-cost",
    ]  # fmt: skip
    for plot in plots:
        json.dumps(plot.figure, allow_nan=False)
    line = next(trace for trace in plots[1].figure["data"] if trace["name"] == "forecast")
    assert line["x"] == [row.devices for row in many.rows]


def test_failures_are_drawn_where_they_matter(many: Forecast) -> None:
    failing = tuple(dataclasses.replace(row, availability=0.9) for row in many.simulated)
    plot = plan_plots(dataclasses.replace(many, simulated=failing))[-1]
    assert plot.key == "plan-lasting"
    assert plot.figure["data"][0]["y"] == [90.0] * len(many.simulated)


def test_the_band_is_the_interval_and_the_ideal_is_one_device(few: Forecast) -> None:
    band, ideal, line, *_ = plan_plots(few)[1].figure["data"]
    low, high = band["y"][: len(few.rows)], band["y"][len(few.rows) :][::-1]
    assert all(one < value < other for one, value, other in zip(low, line["y"], high, strict=True))
    assert ideal["y"][0] == pytest.approx(few.rows[0].samples_per_s)
    assert ideal["y"][1] == pytest.approx(16 * few.rows[0].samples_per_s)


def test_the_simulation_stands_beside_the_forecast(few: Forecast, many: Forecast) -> None:
    names = [trace["name"] for trace in plan_plots(many)[1].figure["data"]]
    assert "simulated" in names
    assert many.simulated
    assert "Diamonds are simulated" in plan_plots(many)[1].caption


def test_what_was_not_asked_for_has_no_column(few: Forecast, many: Forecast) -> None:
    few_names, many_names = ([name for name, _ in columns(found)] for found in (few, many))
    assert "time to target" not in few_names
    assert "useful" not in few_names
    assert {"useful", "time to target", "cost to target", "memory"} <= set(many_names)
    priced = forecast(JOB, gpu_cluster(), [1], ForecastRequest(price_per_device_hour=1.0))
    assert "cost / million" in [name for name, _ in columns(priced)]


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_the_table_fits_and_marks_the_recommended_row(many: Forecast, width: int) -> None:
    text = shown(many, width)
    assert max(map(len, text.splitlines())) <= width
    table = text.split("\n\n")[0]
    assert "…" not in table
    marked = [line for line in table.splitlines() if line.startswith("►")]
    assert [line.split()[1] for line in marked] == [f"{many.recommended_devices:,}"]
    assert "efficiency" in table


def test_many_counts_are_thinned_to_powers_of_two(many: Forecast) -> None:
    kept = [row.devices for row in shown_rows(many)]
    assert {2**power for power in range(11)} | {many.recommended_devices} == set(kept)
    assert f"{len(kept)} of {len(many.rows)} counts" in shown(many, 160)


def test_rows_that_cannot_run_say_why() -> None:
    found = forecast(Job(global_batch_size=64, virtual_shards=4), gpu_cluster(), [1, 4, 8])
    text = Outline(render_plan_page(found)).text
    assert "Not possible, and grey in the table:" in text
    assert "it needs virtual_shards = 8" in text
    assert "Grey rows" in shown(found, 120)


def test_one_row_alone() -> None:
    found = forecast(JOB, gpu_cluster(1), [1])
    assert found.verdict.startswith("1 device: ")
    assert render_plan_page(found)
    assert shown(found, 100)


def test_past_errors_are_told(few: Forecast) -> None:
    found = dataclasses.replace(few, past_error="within 4 % on the last 12 runs")
    assert "were right within 4 % on the last 12 runs." in shown(found, 160)
    assert "were right within 4 % on the last 12 runs." in Outline(render_plan_page(found)).text
    assert "were right" not in shown(few, 160)
