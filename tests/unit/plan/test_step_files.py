"""Files of measured steps: what people and spreadsheets write is read, and a mistake is named with line and column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.errors import JobError
from tests.unit.plan.tables import Tables

STUDY = "num_nodes,devices_per_node,micro_batch_size,step_time_s\n1,1,64,0.0723\n1,2,64,0.0804\n"
HEAD = "num_nodes,devices_per_node,micro_batch_size"
ONE = f"{HEAD},step_time_s\n1,2,64,0.0804\n"


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    return Tables(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def known(tables: Tables) -> list[float]:
    """Forecast seconds from the one row in its plainest form."""
    return seconds(tables, ONE)


def seconds(tables: Tables, text: str | bytes) -> list[float]:
    planned = paceline.plan(tables.text("o.csv", text), devices=[2, 3, 8], devices_per_node=4)
    return [row.step_s for row in planned.forecast.rows]


@pytest.mark.parametrize(
    "text",
    [
        b"\xef\xbb\xbf" + ONE.encode(),
        ONE.replace("\n", "\r\n"),
        ONE.replace(",", " , "),
        ONE.replace(",", ";").replace(".", ","),
        "sep=;\n" + ONE.replace(",", ";").replace(".", ","),
        ONE.replace(",", "\t"),
        ONE.upper().replace("E-", "e-"),
        "\n# measured on Monday, by us\n,,,\n" + ONE + "\n# 1,4,64,0.3\n",
        f"{HEAD},step_time_s,note\n1.0,2,64.0,8.04e-2,first\n",
        "step_time_s,note,micro_batch_size,devices_on_node\n0.0804,x,64,2\n",
        f"{HEAD},step_time_s,grad_accum_steps\n1,2,64,0.0804,1\n",
        f"{HEAD},step_time_s,global_batch_size\n1,2,64,0.0804,128\n",
        f"{HEAD},step_time_s,algorithm\n1,2,64,0.0804,\n",
        f"{HEAD},devices_on_node,step_time_s\n1,2,64,2,0.0804\n",
        ONE.replace("64", '"64"'),
    ],
)
def test_the_same_row_in_another_notation(tables: Tables, known: list[float], text: str | bytes) -> None:
    assert seconds(tables, text) == known


def test_layouts_of_unequal_nodes_are_rows_of_their_own(tables: Tables) -> None:
    table = "devices_on_node,micro_batch_size,step_time_s\n1,64,0.0723\n2,64,0.0804\n4+4,64,\n2+6,64,\n1+7,64,\n"
    rows = paceline.plan(tables.text("o.csv", table)).forecast.rows
    assert [row.devices for row in rows] == [1, 8, 8, 8]
    assert len({row.speedup for row in rows[1:]}) == len({row.placement for row in rows[1:]}) == 3


def test_without_rows_to_forecast_a_table_has_twice_the_devices_that_were_measured(tables: Tables) -> None:
    found = paceline.plan(tables.text("o.csv", STUDY)).forecast
    assert [row.devices for row in found.rows] == [1, 2, 3, 4]
    assert {row.micro_batch_size for row in found.rows} == {64} and found.grow == "batch"


@pytest.mark.parametrize("option", [{"noise_scale": 64}, {"link_rate": 1e9}, {"settings": ["seed=1"]}, {"trace": True}])
def test_options_of_a_job_have_no_effect_on_a_table_and_are_refused(tables: Tables, option: dict[str, Any]) -> None:
    with pytest.raises(JobError, match=next(iter(option))):
        paceline.plan(tables.text("o.csv", STUDY), **option)


MISTAKES: list[tuple[str, list[str]]] = [
    ("", ["num_nodes", "none"]),
    ("num_nodes,micro_batch_size\n1,2\n", ["devices_per_node", "num_nodes, micro_batch_size"]),
    (STUDY + "1,two,64,0.1\n", ["line 4", "devices_per_node", "two", "whole number"]),
    (STUDY + "0,2,64,0.1\n", ["line 4", "num_nodes", "whole number"]),
    (STUDY + "1.5,2,64,0.1\n", ["line 4", "num_nodes", "1.5"]),
    (STUDY + "1,2,,0.1\n", ["line 4", "micro_batch_size", "empty"]),
    (STUDY + "1,2,64,-1\n", ["line 4", "step_time_s", "-1", "greater than 0"]),
    (STUDY + "1,2,64,0\n", ["line 4", "step_time_s", "greater than 0"]),
    (STUDY + "1,2,64,nan\n", ["line 4", "step_time_s", "nan"]),
    (STUDY + "1,2,64,x\n", ["line 4", "step_time_s", "x"]),
    ("\n# x\n" + STUDY + "1,2,64,-1\n", ["line 6", "step_time_s"]),
    ("devices_on_node,micro_batch_size,step_time_s\n2+x,64,1\n", ["devices_on_node", "2+x", "2+4"]),
    ("devices_on_node,micro_batch_size,step_time_s\n2+0,64,1\n", ["devices_on_node", "2+0"]),
    (f"{HEAD},step_time_s\n1000000,1000,64,1\n", ["num_nodes", "1048576"]),
    (f"{HEAD},step_time_s,sync_time_s\n1,2,64,1,2\n", ["sync_time_s", "2 s"]),
    (f"{HEAD},step_time_s,sync_time_s\n1,2,64,1,-1\n", ["sync_time_s", "-1"]),
    (f"{HEAD},step_time_s,algorithm\n1,2,64,1,rings\n", ["algorithm", "rings", "ring", "all_reduce"]),
    (f"{HEAD},step_time_s,global_batch_size\n1,8,64,6.4,1000\n", ["global_batch_size", "1000", "512"]),
    (f"{HEAD},step_time_s,link_bytes_per_s\n1,8,64,1,0\n", ["link_bytes_per_s", "0"]),
    (f"{HEAD},step_time_s\n1,2,64,\n", ["step_time_s", "measure"]),
    (f"{HEAD}\n1,2,64\n", ["step_time_s"]),
    ("devices_on_node,micro_batch_size,step_time_s\n2,64,0,36\n", ["line 2", "more cells", "decimal point"]),
    (STUDY + '1,2,"1,000",0.1\n', ["line 4", "micro_batch_size", "1,000", "thousands"]),
    (STUDY + "1,2,1.000,0.1\n", ["micro_batch_size", "1.000", "thousands"]),
    (STUDY.replace(",", ";") + "1;2;1,000;0,1\n", ["micro_batch_size", "1,000", "thousands"]),
    ("devices_on_node;micro_batch_size;step_time_s;gradient_bytes\n1;8;1;97,528\n", ["gradient_bytes", "thousands"]),
    (STUDY.replace("step_time_s", "step_time_ms"), ["step_time_ms", "step_time_s"]),
    (STUDY.replace("step_time_s", "step_time_s [ms]"), ["step_time_s [ms]"]),
    (STUDY.replace("step_time_s", "time"), ["step_time_s", "time"]),
    (STUDY.replace("step_time_s", "step_time_s,grad_accum"), ["grad_accum", "grad_accum_steps"]),
    (STUDY.replace("_batch_size", "_batch"), ["micro_batch", "micro_batch_size"]),
    (STUDY + '1,2,64,"0.1\n', ["quotation mark"]),
]


@pytest.mark.parametrize(("text", "words"), MISTAKES)
def test_a_mistake_is_one_sentence_with_file_line_and_column(tables: Tables, text: str, words: list[str]) -> None:
    with pytest.raises(JobError) as caught:
        seconds(tables, text)
    sentence = str(caught.value)
    assert "\n" not in sentence
    for word in ("o.csv", *words):
        assert word in sentence, sentence


@pytest.mark.parametrize("name", ["gone.csv", "folder.csv", "utf16.csv", "latin.csv"])
def test_a_file_that_is_no_text_or_absent_is_named_without_error_numbers(tables: Tables, name: str) -> None:
    tables.text("utf16.csv", STUDY.encode("utf-16"))
    tables.text("latin.csv", STUDY.encode() + "1,4,64,0.1 # é\n".encode("latin-1"))
    (tables.folder / "folder.csv").mkdir(exist_ok=True)
    path: Path = tables.folder / name
    with pytest.raises(JobError) as caught:
        paceline.plan(path)
    assert str(path) in str(caught.value) and "Errno" not in str(caught.value)
