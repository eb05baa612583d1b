"""Files of measured steps: what is read, printed and refused."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import command_line
from paceline.cli.step_times import fit_and_predict, suggest_next
from paceline.errors import JobError
from paceline.spec.forecast import Forecast
from paceline.workflows.step_times import FittedSteps, fit_step_times, suggest_measurements

STUDY = "num_nodes,devices_per_node,micro_batch_size,step_time_s\n1,1,64,0.0723\n1,2,64,0.0804\n"
HEADER = "num_nodes,devices_per_node,micro_batch_size"
OBSERVED = f"{HEADER},step_time_s\n"
QUESTIONS = "num_nodes,devices_per_node,devices_on_node,micro_batch_size\n1,3,,64\n,,2+4,64\n2,4,,128\n"


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return written(tmp_path / "obs.csv", STUDY)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    return written(tmp_path / "q.csv", QUESTIONS)


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_two_rows_are_enough_for_a_forecast(study: Path, questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit_and_predict(study, questions, as_json=True)
    answer = json.loads(capsys.readouterr().out)
    three, uneven, even = answer["predictions"]
    assert three["step_time_s"] == pytest.approx(0.083, rel=0.05)
    assert three["low_s"] < three["step_time_s"] < three["high_s"]
    assert (three["num_nodes"], three["devices_per_node"], three["devices_on_node"]) == (1, 3, "3")
    assert (uneven["num_nodes"], uneven["devices_per_node"], uneven["devices_on_node"]) == (2, None, "2+4")
    assert even["bound_by"] in ("compute", "communication", "loader", "overhead")
    # Nobody has measured a second node.
    assert even["high_s"] / even["low_s"] > three["high_s"] / three["low_s"]
    assert all(constant > 0 for constant in answer["constants"].values())
    assert set(answer["uncertain_by_factor"]) == set(answer["constants"])
    assert answer["contradictions"] == []


def test_people_get_a_table(study: Path, questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit_and_predict(study, questions, as_json=False)
    shown = capsys.readouterr().out
    for word in ("2+4", "2 x 4", "1 x 3", "bound by", "a sample on one device", "standard deviation", "efficiency"):
        assert word in shown


def test_a_contradicting_row_is_named_by_its_line(
    tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [(n, size, 0.01 + 0.001 * size) for n in (1, 2, 4, 8) for size in (32, 64, 128)]
    lines = [f"1,{n},{size},{seconds * (3 if (n, size) == (2, 64) else 1)}\n" for n, size, seconds in rows]
    obs = written(tmp_path / "obs.csv", "num_nodes,devices_per_node,micro_batch_size,step_time_s\n" + "".join(lines))
    fit_and_predict(obs, questions, as_json=True)
    (found,) = json.loads(capsys.readouterr().out)["contradictions"]
    assert found["line"] == 6
    fit_and_predict(obs, questions, as_json=False)
    assert f"{obs}, line 6, contradicts the other rows" in capsys.readouterr().out


def test_suggestions_are_rows_without_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    obs = written(
        tmp_path / "obs.csv",
        "num_nodes,devices_per_node,micro_batch_size,step_time_s,algorithm\n1,1,64,0.1,\n"
        "2,1,64,,\n3,1,64,,\n4,2,64,,ring\n",
    )
    suggest_next(obs, 2, as_json=True)
    first, second = json.loads(capsys.readouterr().out)["suggestions"]
    assert first["num_nodes"] in (2, 3, 4)
    assert second["promised_error"] <= first["promised_error"]
    suggest_next(obs, 3, as_json=False)
    assert "4 x 2" in capsys.readouterr().out


def test_without_such_rows_a_range_is_assumed(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suggest_next(study, 5, as_json=True)
    rows = json.loads(capsys.readouterr().out)["suggestions"]
    assert len(rows) == 5
    assert max(row["num_nodes"] for row in rows) > 2
    assert {row["micro_batch_size"] for row in rows} <= {16, 32, 64}
    assert max(row["devices_per_node"] for row in rows) <= 2


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("", "needs the columns .* its first line has none"),
        ("num_nodes,micro_batch_size\n1,2\n", "needs the columns .* its first line has num_nodes, micro_batch_size"),
        (STUDY + "1,two,64,0.1\n", "line 4, devices_per_node: two is not a whole number from 1 on"),
        (STUDY + "0,2,64,0.1\n", "line 4, num_nodes: 0 is not a whole number"),
        (STUDY + "1.5,2,64,0.1\n", "line 4, num_nodes: 1.5 is not a whole number"),
        (STUDY + "1,2,,0.1\n", "line 4, micro_batch_size: is empty"),
        (STUDY + "1,2,64,-1\n", "line 4, step_time_s: -1 is not a time above zero"),
        (STUDY + "1,2,64,nan\n", "line 4, step_time_s: nan is not a time above zero"),
        ("devices_on_node,micro_batch_size,step_time_s\n2+x,64,1\n", r"devices_on_node: 2\+x should be"),
        ("num_nodes,devices_on_node,micro_batch_size,step_time_s\n3,2+4,64,1\n", "names 2 nodes, but num_nodes says 3"),
        ("devices_on_node,micro_batch_size,step_time_s,sync_time_s\n2,64,1,2\n", "2 s is longer than the step of 1 s"),
        (
            "devices_on_node,micro_batch_size,step_time_s,algorithm\n2,64,1,rings\n",
            "rings is not known; there are all_",
        ),
        ("devices_on_node,micro_batch_size,step_time_s\n2,64,\n", "no row with a step_time_s"),
        ("devices_on_node,micro_batch_size,step_time_s\n2,64,0,36\n", "line 2 has more cells than the first line"),
        (STUDY + '1,2,"1,000",0.1\n', "line 4, micro_batch_size: 1,000 may have a separator of thousands"),
        (STUDY + "1,2,1.000,0.1\n", "line 4, micro_batch_size: 1.000 may have a separator of thousands"),
        (STUDY.replace(",", ";") + "1;2;1,000;0,1\n", "line 4, micro_batch_size: 1,000 may have a separator"),
        (STUDY.replace(",", "\t") + "1\t2\t1.000.000\t0,1\n", "micro_batch_size: 1.000.000 may have a separator"),
        ("devices_on_node;micro_batch_size;step_time_s;gradient_bytes\n1;8;1;97,528\n", "gradient_bytes: 97,528 may"),
        (STUDY + "1,2,64,1e300\n", "line 4, step_time_s: 1e300 is more than can be meant"),
        ("devices_on_node,micro_batch_size,step_time_s,gradient_bytes\n1,8,1,1e300\n", "gradient_bytes: 1e300 is more"),
        (
            "devices_on_node,devices_per_node,num_nodes,micro_batch_size,step_time_s\n2,8,1,64,0.31\n",
            "line 2, devices_on_node: 2 contradicts devices_per_node, which says 8",
        ),
        (
            "devices_on_node,micro_batch_size,step_time_s\n999999+999999,64,0.31\n",
            r"999999\+999999 are more than 1048576 devices",
        ),
        (STUDY.replace("step_time_s", "step_time_ms"), "a column step_time_ms and none step_time_s"),
        (STUDY.replace("step_time_s", "step_time_s [ms]"), r"a column step_time_s \[ms\] and none step_time_s"),
        (STUDY.replace("step_time_s", "time"), "needs the column step_time_s; its first line has .*, time"),
        (STUDY.replace("step_time_s", "step_time_s,grad_accum"), "a column grad_accum and none grad_accum_steps"),
        (STUDY.replace("step_time_s", "step_time_s,global_batch"), "a column global_batch and none global_batch_size"),
        (STUDY.replace("_batch_size", "_batch"), "a column micro_batch and none micro_batch_size"),
        (STUDY + '1,2,"6\n4x",1\n', "micro_batch_size: 6 4x is not"),
        (STUDY + '1,2,64,1,"not closed\n1,2,64,1\n', "a quotation mark is not closed"),
        (
            "devices_on_node,micro_batch_size,step_time_s,STEP_TIME_S\n2,64,1,2\n",
            "has more than one column step_time_s",
        ),
    ],
)
def test_mistakes_are_one_sentence_with_the_line(tmp_path: Path, questions: Path, text: str, mistake: str) -> None:
    with pytest.raises(JobError, match=mistake) as refused:
        fit_and_predict(written(tmp_path / "bad.csv", text), questions, as_json=True)
    assert "\n" not in str(refused.value)


def test_on_the_command_line_columns_and_keys_of_files_keep_their_names(tmp_path: Path) -> None:
    """Some options have the same names."""
    for text in ("num_nodes,batch\n1,2\n", STUDY + "1,two,64,0.1\n"):
        bad = str(written(tmp_path / "bad.csv", text))
        with pytest.raises(JobError) as refused:
            CliRunner().invoke(command_line(), ["plan", "--fit", bad, "--predict", bad], catch_exceptions=False)
        assert "devices_per_node" in str(refused.value) and "--devices" not in str(refused.value)
    plan = str(written(tmp_path / "plan.json", '{"cpu_offload": 3}'))
    with pytest.raises(JobError, match="cpu_offload = 3 should be true or false"):
        CliRunner().invoke(command_line(), ["train", "digits-lenet", "--plan", plan], catch_exceptions=False)


def test_files_and_budgets_that_cannot_be_meant(tmp_path: Path, study: Path) -> None:
    with pytest.raises(JobError, match=r"gone\.csv cannot be read"):
        fit_and_predict(study, tmp_path / "gone.csv", as_json=True)
    with pytest.raises(JobError, match="budget = 0"):
        suggest_next(study, 0, as_json=True)
    empty = written(tmp_path / "empty.csv", STUDY.splitlines()[0] + "\n")
    with pytest.raises(JobError, match="has no rows"):
        suggest_next(empty, 1, as_json=True)


def test_what_spreadsheets_write_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    obs = tmp_path / "obs.csv"
    lines = [
        "num_nodes, devices_per_node, micro_batch_size, step_time_s, note",
        "1.0, 1, 64, 0.1, first",
        "",
        "1,2,64,1,",
    ]
    obs.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    fit_and_predict(obs, obs, as_json=True)
    assert len(json.loads(capsys.readouterr().out)["predictions"]) == 2


@pytest.mark.parametrize(
    "above", ["\n", "\r\n \r\n", ",,,\n", "# measured by us, on Monday\n\n", "\N{ZERO WIDTH NO-BREAK SPACE}\n"]
)
def test_what_stands_above_the_header_is_skipped_and_lines_keep_their_numbers(
    tmp_path: Path, questions: Path, study: Path, above: str
) -> None:
    known = fit_step_times(study, questions)
    assert fit_step_times(written(tmp_path / "above.csv", above + STUDY), questions).forecasts == known.forecasts
    comment = STUDY + "# 1,4,64,0.3\n"
    assert fit_step_times(written(tmp_path / "comment.csv", comment), questions).forecasts == known.forecasts
    with pytest.raises(JobError, match=rf"line {above.count(chr(10)) + 5}, step_time_s: -1"):
        fit_step_times(written(tmp_path / "bad.csv", above + comment + "1,2,64,-1\n"), questions)


def test_the_line_by_which_excel_knows_the_delimiter(tmp_path: Path, questions: Path, study: Path) -> None:
    text = "sep=;\n" + STUDY.translate(str.maketrans(",.", ";,"))
    found = fit_step_times(written(tmp_path / "sep.csv", text), questions)
    assert found.forecasts == fit_step_times(study, questions).forecasts


def test_what_is_no_text_or_no_file_is_one_sentence_without_numbers_of_errors(tmp_path: Path, study: Path) -> None:
    (tmp_path / "utf16.csv").write_bytes(STUDY.encode("utf-16"))
    (tmp_path / "latin.csv").write_bytes(STUDY.encode() + "1,4,64,0.1 # é\n".encode("latin-1"))
    for path, reason in (("utf16.csv", "no text in UTF-8"), ("latin.csv", "no text in UTF-8"), (".", "Is a directory")):
        with pytest.raises(JobError, match=rf"comma-separated values: {reason}") as refused:
            fit_step_times(tmp_path / path, study)
        assert "Errno" not in str(refused.value)


def test_one_row_alone_and_nodes_that_nobody_measured_are_said(
    tmp_path: Path, questions: Path, study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = written(tmp_path / "one.csv", "".join(STUDY.splitlines(keepends=True)[:2]))
    fit_and_predict(alone, questions, as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert any("One row alone" in sentence for sentence in answer["warnings"])
    assert all(one["high_s"] > 1.2 * one["low_s"] for one in answer["predictions"])
    fit_and_predict(study, questions, as_json=False)
    shown = capsys.readouterr().out
    assert "Nobody measured two nodes" in shown and "One row alone" not in shown


def test_semicolons_decimal_commas_any_order_and_more_columns(
    tmp_path: Path, study: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "step_time_s;note;Micro_Batch_Size;NUM_NODES;devices_per_node\n0,0723;first;64;1;1\n0,0804;;64;1;2\n"
    for one in (study, written(tmp_path / "semicolons.csv", text)):
        fit_and_predict(one, questions, as_json=True)
    first, second = capsys.readouterr().out.splitlines()
    assert json.loads(first)["predictions"] == json.loads(second)["predictions"]


def test_times_in_milliseconds_are_suspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = "num_nodes,devices_per_node,micro_batch_size,step_time_s\n"
    questions = written(tmp_path / "q.csv", head.replace(",step_time_s", "") + "1,4,64\n")
    fit_and_predict(written(tmp_path / "ms.csv", head + "1,1,64,72.3\n1,2,64,80.4\n"), questions, as_json=True)
    assert "divide step_time_s by 1000" in json.loads(capsys.readouterr().out)["warnings"][0]
    one_wrong = written(tmp_path / "one.csv", head + "1,1,64,0.310\n1,2,64,331\n1,4,64,0.352\n")
    fit_and_predict(one_wrong, questions, as_json=True)
    answer = json.loads(capsys.readouterr().out)
    (found,) = answer["contradictions"]
    assert found["line"] == 3 and "looks like milliseconds" in found["sentence"]
    assert answer["predictions"][0]["step_time_s"] == pytest.approx(0.352, rel=0.1)


def test_accumulation_is_a_column(tmp_path: Path, questions: Path) -> None:
    head = "num_nodes,devices_per_node,micro_batch_size,step_time_s,"
    by_steps = written(tmp_path / "a.csv", head + "grad_accum_steps\n1,8,64,6.4,64\n2,8,64,3.3,32\n")
    by_batch = written(tmp_path / "b.csv", head + "global_batch_size\n1,8,64,6.4,32768\n2,8,64,3.3,32768\n")
    one, other = (fit_step_times(path, questions) for path in (by_steps, by_batch))
    assert one.forecasts == other.forecasts
    odd = written(tmp_path / "odd.csv", head + "global_batch_size\n1,8,64,6.4,1000\n")
    with pytest.raises(JobError, match="line 2, global_batch_size: 1000 is no multiple of the 512 samples"):
        fit_step_times(odd, questions)


def test_a_page_with_recommendation_and_cost(tmp_path: Path, study: Path, questions: Path) -> None:
    fitted = fit_step_times(study, questions, price=2.0, out=tmp_path / "page")
    assert fitted.forecast is not None
    assert "plan.html" in [path.name for path in (tmp_path / "page").iterdir()]
    assert all(row.cost_per_million_samples for row in fitted.forecast.rows)
    slow = written(tmp_path / "slow.csv", STUDY.replace("1,2,64,0.0804", "1,2,64,0.3"))
    pair = written(tmp_path / "pair.csv", "num_nodes,devices_per_node,micro_batch_size\n1,2,64\n")
    refused = fit_step_times(slow, pair).forecast
    assert refused is not None and refused.verdict.startswith("Stay with 1 device")


def test_suggestions_are_steps_like_the_measured_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = f"{OBSERVED.strip()},algorithm,grad_accum_steps,gradient_bytes\n"
    obs = written(tmp_path / "o.csv", head + "1,8,64,0.3,ring,8,4e8\n2,8,64,0.4,ring,8,4e8\n2,4,64,0.4,ring,8,\n")
    for one in suggest_measurements(obs, 5):
        placement = one.placement
        assert (placement.algorithm, placement.num_passes, placement.gradient_bytes) == ("ring", 8, 4e8)
    suggest_next(obs, 1, as_json=False)
    shown = capsys.readouterr().out
    assert "ring" in shown and "8 x " in shown
    twice = written(tmp_path / "twice.csv", OBSERVED + "1,1,64,0.3\n1,4,64,\n1,4,64,\n")
    assert len(suggest_measurements(twice, 3)) == 1


@pytest.mark.parametrize("rows", ["4,8,64,\n", "1,1,64,0.3\n4,8,64,\n"])
def test_nothing_within_the_limits_is_said_as_that(tmp_path: Path, rows: str) -> None:
    obs = written(tmp_path / "o.csv", OBSERVED + rows)
    with pytest.raises(
        JobError, match=r"o\.csv leaves nothing to measure within 1 node and 2 devices; raise"
    ) as refused:
        suggest_measurements(obs, max_nodes=1, max_devices=2)
    assert "measured already" not in str(refused.value)


def test_suggestions_stay_within_what_there_is(study: Path) -> None:
    for one in suggest_measurements(study, 4, max_nodes=2, max_devices=3):
        assert one.placement.layout.num_nodes <= 2 and one.placement.layout.num_workers <= 3


def fitted_to(folder: Path, observed: str, asked: str, columns: str = HEADER) -> FittedSteps:
    return fit_step_times(
        written(folder / "o.csv", OBSERVED + observed), written(folder / "a.csv", f"{columns}\n{asked}")
    )


@pytest.mark.parametrize(
    ("columns", "asked"),
    [
        (f"{HEADER},algorithm", "2,4,64,ring\n2,4,64,all_to_one\n2,4,64,hierarchical\n"),
        ("devices_on_node,micro_batch_size", "4+4,64\n2+6,64\n1+7,64\n"),
        (f"{HEADER},grad_accum_steps", "1,2,64,1\n1,2,16,4\n"),
        (f"{HEADER},gradient_bytes", "2,4,64,1e8\n2,4,64,1e9\n"),
    ],
)
def test_every_row_has_figures_of_its_own(
    tmp_path: Path, columns: str, asked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fitted = fitted_to(tmp_path, "1,1,64,0.310\n2,4,64,0.5\n", asked, columns)
    assert len(fitted.rows) == len(asked.splitlines())
    for placement, forecast, row in fitted.rows:
        assert row.step_s == forecast.total_s
        assert row.samples_per_s == pytest.approx(placement.global_batch_size / forecast.total_s)
    assert len({row.speedup for _, _, row in fitted.rows}) == len(fitted.rows)
    assert len({row.placement for _, _, row in fitted.rows}) == len(fitted.rows)
    fit_and_predict(tmp_path / "o.csv", tmp_path / "a.csv", as_json=True)
    for answer, (_, _, row) in zip(json.loads(capsys.readouterr().out)["predictions"], fitted.rows, strict=True):
        assert answer["speedup"] == row.speedup


def test_the_verdict_the_marked_row_and_the_page_mean_one_placement(tmp_path: Path) -> None:
    fitted = fitted_to(tmp_path, "1,1,64,0.310\n2,4,64,0.5\n", "1,8,64\n8,1,64\n1,8,16\n1,8,256\n")
    assert fitted.forecast is not None and fitted.recommended is not None
    row = fitted.forecast.recommended
    assert row is max((one for _, _, one in fitted.rows), key=lambda one: one.samples_per_s)
    assert fitted.compared[fitted.recommended] is row
    assert row.placement == "1 x 8, micro-batch 256"
    assert fitted.forecast.verdict == f"Use 8 devices (1 x 8, micro-batch 256): {row.speedup:.2f}x the speed of one."
    assert Forecast.from_mapping(fitted.forecast.to_mapping()).recommended == row
    page = fitted.page()
    assert page.count('<tr class="recommended">') == 1
    marked = page.partition('<tr class="recommended">')[2].partition("</tr>")[0]
    assert "<td>1 x 8, micro-batch 256</td>" in marked


def test_speed_ups_do_not_depend_on_the_order_of_rows_nor_on_other_batches(tmp_path: Path) -> None:
    rows = ["1,1,8,0.060\n", "1,1,64,0.310\n", "1,2,64,0.331\n", "1,4,64,0.352\n"]
    first, last = (
        fitted_to(tmp_path, "".join(observed), "1,8,64\n").rows[0][2] for observed in (rows, rows[1:] + rows[:1])
    )
    assert first.speedup == pytest.approx(last.speedup, rel=1e-3) == pytest.approx(6.8, rel=0.01)
    twice = ["1,1,64,0.310\n", "1,1,64,0.340\n", "1,2,64,0.331\n"]
    one, other = (fitted_to(tmp_path, "".join(observed), "1,8,64\n").rows[0][2] for observed in (twice, twice[::-1]))
    assert one.speedup == pytest.approx(other.speedup, rel=1e-3)


def test_speed_ups_are_over_one_device_or_the_fewest_that_there_are(tmp_path: Path) -> None:
    observed = "1,8,64,0.4\n2,8,64,0.5\n"
    asked = fitted_to(tmp_path, observed, "1,1,64\n2,8,64\n")
    (_, _, one), (_, _, most) = asked.rows
    assert (one.speedup, one.efficiency) == (1, 1)
    assert most.speedup == pytest.approx(most.samples_per_s / one.samples_per_s)
    assert asked.forecast is not None
    assert asked.forecast.verdict == f"Use 16 devices: {most.speedup:.2f}x the speed of one."
    beyond = fitted_to(tmp_path, observed, "2,8,64\n4,8,64\n")
    assert beyond.forecast is not None
    eight, _, most = beyond.forecast.rows
    assert (eight.devices, eight.speedup, eight.efficiency) == (8, 8, 1)
    gain = most.samples_per_s / eight.samples_per_s
    assert beyond.forecast.verdict == f"Use 32 devices: {gain:.2f}x the speed of 8."
    assert any("over the fewest, 8," in sentence for sentence in beyond.warnings)
    assert "Throughput over that of one device of the smallest row (8 devices)" in " ".join(beyond.page().split())


def test_one_count_alone_is_no_choice_between_counts(tmp_path: Path) -> None:
    observed = "1,1,64,0.310\n1,2,64,0.331\n"
    for asked, name in (("1,1,256\n", "1 device"), ("1,1,256\n1,1,16\n", "1 device (micro-batch 256)")):
        forecast = fitted_to(tmp_path, observed, asked).forecast
        assert forecast is not None
        assert forecast.verdict.startswith(f"{name}: ") and forecast.verdict.endswith(" samples/s.")
        assert forecast.bend == "This is the only number of devices here, which tells nothing of scaling."


def test_the_page_says_what_the_text_says_and_nothing_of_a_probe(tmp_path: Path) -> None:
    observed = "1,1,64,0.310\n1,2,64,331\n1,4,64,0.352\n"
    fitted = fitted_to(tmp_path, observed, "1,8,64\n1,8,16\n")
    page = html.unescape(" ".join(fitted.page().replace("\N{NO-BREAK SPACE}", " ").split()))
    (contradiction,) = fitted.contradictions
    for sentence in (contradiction.sentence, *fitted.warnings):
        assert sentence in page
    assert "probe measured" not in page
    assert "batch stays the same" not in page and "Batches differ between rows" in page
    milliseconds = fitted_to(tmp_path, "1,1,64,310\n1,2,64,331\n", "1,8,64\n")
    assert "divide step_time_s by 1000" in milliseconds.page()
