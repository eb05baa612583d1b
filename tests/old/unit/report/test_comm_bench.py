from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from paceline.errors import PacelineError
from paceline.report.comm_bench import BASELINE, comm_mapping, comm_rows, left_out_sentences, minimum_s, verdict
from paceline.report.comm_page import load_timings, render_comm_page, write_comm_bench
from paceline.report.comm_plots import comm_plots
from paceline.report.comm_table import comm_markdown, comm_table
from paceline.report.formats import rate_text, size_text, time_text
from paceline.spec.comm_timing import CommCase, CommRequest, CommTimings, UntimedCases
from tests.old.sample_timings import ALL_REDUCE, HIERARCHICAL, SIZES, sample_timings
from tests.old.unit.report.test_page import Outline


def shown(timings: CommTimings, width: int) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(comm_table(timings, width))
    return stream.getvalue()


def test_bandwidths_are_those_of_nccl_tests() -> None:
    timings = sample_timings(nodes=((0, 1, 2, 3),))
    for row in comm_rows(timings):
        assert row.algbw_bytes_per_s == pytest.approx(row.size_bytes / row.timing.median_s)
        assert row.busbw_bytes_per_s == pytest.approx(row.algbw_bytes_per_s * 1.5)


@pytest.mark.parametrize(
    ("nodes", "bytes_a_link"),
    [
        (((0, 1), (2, 3)), 100e6),  # two nodes: the message once
        (((0,), (1,), (2,), (3,)), 150e6),
        (((0, 1, 2, 3),), 150e6),  # on one node every worker has a link of its own
        (((0, 1), (2,), (3,)), 400e6 / 3),
    ],
)
def test_the_minimum_is_what_links_allow(nodes: tuple[tuple[int, ...], ...], bytes_a_link: float) -> None:
    assert minimum_s(sample_timings(nodes=nodes), BASELINE, 100_000_000) == pytest.approx(bytes_a_link / 25e6)


def test_a_format_has_a_minimum_of_its_own() -> None:
    timings = sample_timings()
    exact = minimum_s(timings, BASELINE, 2**20)
    assert exact is not None
    assert minimum_s(timings, CommCase("ring", "bfloat16"), 2**20) == pytest.approx(exact / 2)
    assert minimum_s(timings, CommCase("ring", "bfloat16"), 2**20) == pytest.approx(exact / 2)
    half = replace(timings, request=replace(timings.request, dtype="bfloat16"))
    assert minimum_s(half, BASELINE, 2**20) == pytest.approx(2 * exact)  # widened to float32


def test_without_a_rate_or_a_peer_there_is_no_minimum() -> None:
    assert minimum_s(sample_timings(link_rate_bytes_per_s=None), BASELINE, 8) is None
    assert minimum_s(sample_timings(nodes=((0,),)), BASELINE, 8) is None


def test_json_is_plain_finite_and_says_units() -> None:
    mapping = json.loads(json.dumps(comm_mapping(sample_timings()), allow_nan=False))
    assert (mapping["world_size"], mapping["num_nodes"]) == (4, 2)
    (row,) = [row for row in mapping["rows"] if row["algorithm"] == "hierarchical" and row["wire"] == "float32"][-1:]
    assert row["size_bytes"] == 100_000_000
    assert row["median_s"] == pytest.approx(1.1 * 4.001)
    assert row["min_s"] == pytest.approx(4.001)
    assert row["link_share"] == pytest.approx(4 / row["median_s"])
    assert row["link_bytes"] == pytest.approx(105e6)
    assert row["speedup_over_all_reduce"] > 1
    assert mapping["left_out"] == [
        {
            "algorithm": "tree_exact",
            "wire": "float32",
            "order": "by_node",
            "sizes_bytes": [100_000_000],
            "reason": "about 90 s a call; the budget is 60 s for all",
        }
    ]


def test_the_table_fits_and_loses_nothing() -> None:
    timings = sample_timings()
    for width in (80, 100):
        text = shown(timings, width)
        assert max(map(len, text.splitlines())) <= width
        for case in {timing.case.algorithm for timing in timings.timings}:
            assert re.search(rf"^{case}\b", text, re.MULTILINE)
        assert "100 MB" in text
        assert left_out_sentences(timings)[0].split(":")[0] in text
    assert "algbw" in shown(timings, 100)


def test_a_figure_that_was_not_measured_is_not_printed() -> None:
    text = shown(sample_timings(), 100)
    first, last = text.split("At 100 MB")[:2]
    (line,) = [line for line in first.splitlines() if line.startswith("tree_exact")]
    assert line.rstrip().endswith("\N{EN DASH}")
    assert not any(line.startswith("tree_exact") for line in last.splitlines())
    assert re.search(r"busbw +link +ratio", text)
    assert re.search(r"busbw +ratio", shown(sample_timings(link_rate_bytes_per_s=None), 100))


def test_markdown_has_every_case_and_the_links() -> None:
    text = comm_markdown(sample_timings())
    for case in sample_timings().request.cases:
        assert f"| {case} |" in text
    assert "MB a link" in text
    assert "| 105 |" in text
    assert "MB a link" not in comm_markdown(sample_timings(link_bytes=False))
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 2  # two tables, neither with a ragged line


def test_verdicts() -> None:
    assert verdict(sample_timings()) == (
        "At 100 MB hierarchical is the fastest exact sum: 1.5 times as fast as all_reduce."
    )
    assert "backend's own all_reduce is the fastest" in verdict(sample_timings(cases=[ALL_REDUCE, CommCase("ring")]))
    assert verdict(sample_timings(cases=[HIERARCHICAL])) == "hierarchical sums 100 MB in 4.40 s."
    assert "only rounded formats" in verdict(sample_timings(cases=[CommCase("ring", "float16")]))


def test_what_is_left_out_is_said_once() -> None:
    lossy = [UntimedCases(CommCase("tree_exact", wire), SIZES, "why") for wire in ("bfloat16", "float16")]
    slow = UntimedCases(CommCase("ring"), SIZES[1:], "slow")
    assert left_out_sentences(replace(sample_timings(), left_out=(*lossy, slow))) == [
        "Left out: tree_exact in bfloat16 and tree_exact in float16: why.",
        "Left out: ring at 1 MiB and more: slow.",
    ]


def test_the_page_has_all_of_it_and_asks_nobody() -> None:
    timings = sample_timings()
    html = render_comm_page(timings)
    outline = Outline(html)
    assert verdict(timings) in outline.text
    assert left_out_sentences(timings)[0] in outline.text
    assert "a <processor> & more" in outline.text
    assert "4.40 s" in outline.text
    assert "default-src 'none'" in html
    addresses = [value for _, attrs in outline.tags for key, value in attrs.items() if key in ("src", "href")]
    assert [address for address in addresses if address and not address.startswith(("#", "data:"))] == []
    pressed = [attrs["data-case"] for tag, attrs in outline.tags if tag == "button"]
    assert pressed == [*map(str, timings.request.cases), "physical limit"]


def test_plots_show_what_there_is() -> None:
    full = {plot.key: plot for plot in comm_plots(sample_timings())}
    assert list(full) == ["comm-time", "comm-busbw", "comm-relative"]
    (limit,) = [line for line in full["comm-time"].figure["data"] if line["name"] == "physical limit"]
    assert limit["y"] == pytest.approx([size / 25e6 for size in SIZES])
    for line in full["comm-relative"].figure["data"]:
        if line["name"] == "all_reduce":
            assert line["y"] == [1.0, 1.0, 1.0]
    styles = [
        (line["line"]["color"], line["line"]["dash"], line["marker"]["symbol"])
        for line in full["comm-time"].figure["data"]
        if "marker" in line
    ]
    assert len(set(styles)) == len(styles)
    assert [plot.key for plot in comm_plots(sample_timings(nodes=((0,),), cases=[HIERARCHICAL]))] == ["comm-time"]


@pytest.mark.parametrize("nodes", [((0,),), ((0, 1),), ((0,), (1,))])
@pytest.mark.parametrize("cases", [[ALL_REDUCE], [CommCase("ring", "float16")]])
def test_the_least_that_can_be_measured_is_shown(nodes: tuple[tuple[int, ...], ...], cases: list[CommCase]) -> None:
    timings = sample_timings(nodes, cases, link_rate_bytes_per_s=None, link_bytes=False)
    assert "100 MB" in shown(timings, 100)
    assert "100 MB" in comm_markdown(timings)
    assert "100 MB" in Outline(render_comm_page(timings)).text


def test_files_and_their_damage(tmp_path: Path) -> None:
    timings = sample_timings()
    timings.save(tmp_path / "timings.json")
    assert load_timings(tmp_path) == load_timings(tmp_path / "timings.json") == timings
    write_comm_bench(timings, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"comm.html", "comm.md"}
    with pytest.raises(PacelineError, match="cannot be read"):
        load_timings(tmp_path / "nowhere")
    for damage in ("{", "[]", "{}", '{"nodes": 5}'):
        (tmp_path / "timings.json").write_text(damage)
        with pytest.raises(PacelineError, match=r"timings\.json' are damaged"):
            load_timings(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(PacelineError, match="cannot be written"):
        write_comm_bench(timings, tmp_path / "file")


@given(st.floats(1e-6, 1e3))
def test_times_have_three_digits(seconds: float) -> None:
    number, unit = time_text(seconds).split()
    assert float(number) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[unit] == pytest.approx(seconds, rel=6e-3)
    assert len(number) <= 5


@given(st.floats(1, 1e13))
def test_rates_have_three_digits(bytes_per_s: float) -> None:
    number, unit = rate_text(bytes_per_s).split()
    scale = {"B/s": 1, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12}[unit]
    assert float(number) * scale == pytest.approx(bytes_per_s, rel=6e-3)


def test_sizes_are_round_in_their_unit() -> None:
    assert [size_text(size) for size in (512, 4096, 2**20, 100_000_000, 2**31)] == [
        *("512 B", "4 KiB", "1 MiB", "100 MB", "2 GiB")
    ]
    assert all(size_text(size).endswith("iB") for size in CommRequest().sizes_bytes)
