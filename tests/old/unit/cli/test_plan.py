"""`paceline plan` without training anything: options, files, the plan that a run can follow."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli import command_line
from paceline.errors import ClusterError, JobError
from paceline.plan.forecast import forecast
from paceline.spec import Job, Plan
from paceline.workflows.jobs import read_counts, read_price
from paceline.workflows.plan import recommended_plan
from tests.old.sample_clusters import cpu_cluster, gpu_cluster


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a job and what was probed."""
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text('name = "job"\nglobal_batch_size = 1024\nvirtual_shards = 1024\n', encoding="utf-8")
    gpu_cluster().save(Path("cluster.json"))
    return tmp_path


def ask(*arguments: str) -> str:
    """Standard output of `paceline plan`; what it raises is raised."""
    result = CliRunner().invoke(command_line(), ["plan", *arguments], catch_exceptions=False)
    if isinstance(result.exception, Exception):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(
    ("text", "counts"),
    [("1", [1]), ("4,1,2", [1, 2, 4]), ("1..4,8", [1, 2, 3, 4, 8]), ("2-3", [2, 3]), (" 1 .. 2 ", [1, 2])],
)
def test_counts_are_read_as_people_write_them(text: str, counts: list[int]) -> None:
    assert read_counts("devices", text) == counts
    assert read_counts("devices", counts[0]) == counts[:1]


@pytest.mark.parametrize("text", ["", "0", "1..", "4..1", "1..4..8", "one", "1,,2", "1..99999999"])
def test_counts_that_are_none_name_the_option(text: str) -> None:
    with pytest.raises(JobError, match=r"devices = .* should be counts such as 1,2,4 or a range such as 1..64"):
        read_counts("devices", text)


def test_a_mistake_on_the_line_comes_before_a_cluster_that_is_missing(folder: Path) -> None:
    Path("cluster.json").unlink()
    with pytest.raises(JobError, match="--devices 0 should be counts"):
        ask("job.toml", "--devices", "0")


def test_table_page_and_files(folder: Path) -> None:
    text = ask("job.toml", "--price", "2.5 USD", "--target-samples", "1e8")
    assert "Use 16 devices" in text
    assert "time to target" in text
    assert text.splitlines()[-2:] == ["plan.json", "plan.html"]
    marked = [line for line in text.splitlines() if line.startswith("►")]
    assert len(marked) == 1
    assert marked[0].split()[1] == "16"
    plan = Plan.from_mapping(json.loads(Path("plan.json").read_text(encoding="utf-8")))
    assert plan.world_size == 16
    assert [share.hostname for share in plan.placements] == ["node0", "node1"]
    assert len(json.loads(Path("forecast.json").read_text(encoding="utf-8"))["rows"]) == 16
    assert "<title>job" in Path("plan.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("price", "found"),
    [
        ("2.5EUR", (2.5, "EUR")),
        (None, (None, "")),
        (2.5, (2.5, "")),
        ("2.5", (2.5, "")),
        ("2.5 USD", (2.5, "USD")),
        ("0.3€", (0.3, "€")),
        (".5", (0.5, "")),
        ("2e1EUR", (20, "EUR")),
    ],
)
def test_a_price_may_have_a_currency(price: float | str | None, found: tuple[float | None, str]) -> None:
    assert read_price(price) == found


@pytest.mark.parametrize("price", ["USD", "-1 USD", "1e400", "2.5 USD an hour", "٣", "2e", "", -1.0, float("nan")])
def test_a_price_that_is_none_is_refused(price: float | str) -> None:
    with pytest.raises(JobError, match=r"price = .* should be an amount of 0 or more and its currency"):
        read_price(price)


def test_json_is_one_line_with_the_plan(folder: Path) -> None:
    text = ask("job.toml", "--devices", "1,2", "--json", "--out", "elsewhere")
    found = json.loads(text)
    assert len(text.splitlines()) == 1
    assert [row["devices"] for row in found["rows"]] == [1, 2]
    assert found["recommended_devices"] == found["plan"]["world_size"] == 2
    assert (folder / "elsewhere" / "plan.json").exists()


def test_settings_reach_the_job(folder: Path) -> None:
    rows = json.loads(ask("job.toml", "--devices", "1,4", "--set", "virtual_shards=2", "--json"))["rows"]
    assert "virtual_shards = 4" in rows[1]["objection"]


def test_a_plan_for_devices_that_are_not_there_is_not_written(folder: Path) -> None:
    text = ask("job.toml", "--devices", "64", "--out", "far")
    assert "No plan.json: the cluster lacks devices for 64" in text
    assert not (folder / "far" / "plan.json").exists()
    assert (folder / "far" / "plan.html").exists()


def test_a_plan_follows_the_recommended_row() -> None:
    job = Job(global_batch_size=64, virtual_shards=64)
    cluster = cpu_cluster()
    plan = recommended_plan(job, cluster, forecast(job, cluster, [2]))
    assert plan is not None
    assert plan.world_size == 2
    assert plan.forecast_samples_per_s == forecast(job, cluster, [2]).rows[0].samples_per_s
    bitwise = job.with_values(parity="bitwise")
    exact = recommended_plan(bitwise, cluster, forecast(bitwise, cluster, [2]))
    assert exact is not None
    assert exact.algorithm == "tree_exact"


def test_nothing_probed_is_one_sentence(folder: Path) -> None:
    with pytest.raises(ClusterError, match=r"There is no nowhere.json, .* run paceline probe job.toml first\."):
        ask("job.toml", "--cluster", "nowhere.json")
    Path("job.toml").write_text('name = "another"\n', encoding="utf-8")
    with pytest.raises(ClusterError, match=r"no timing of the job 'another' .* run paceline probe JOB first"):
        ask("job.toml")


def test_a_job_is_needed() -> None:
    with pytest.raises(JobError, match="Name the job to plan for"):
        ask()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--fit", "o.csv"), "--fit needs --predict Q.csv beside it"),
        (("--predict", "q.csv"), "--predict needs --fit OBS.csv beside it"),
        (("--suggest", "o.csv", "--fit", "o.csv"), "--suggest stands alone"),
        (("job.toml", "--suggest", "o.csv"), "leave job.toml out"),
    ],
)
def test_what_does_not_go_together(arguments: tuple[str, ...], sentence: str, calls: list[Any]) -> None:
    with pytest.raises(JobError, match=sentence):
        ask(*arguments)
    assert calls == []


FORMS = {
    "--fit": ("--fit", "o.csv", "--predict", "q.csv"),
    "--suggest": ("--suggest", "o.csv"),
    "a JOB": ("job.toml",),
    "--dry-run-mesh": ("job.toml", "--dry-run-mesh", "dp2 x tp2"),
}
TAKEN = {
    "--fit": {"--fit", "--predict", "--efficiency-floor", "--price", "--out", "--json"},
    "--suggest": {"--suggest", "--budget", "--max-nodes", "--max-devices", "--json"},
    "--dry-run-mesh": {"--dry-run-mesh", "--set", "--data", "--json"},
    "a JOB": {
        *("--cluster", "--devices", "--grow", "--efficiency-floor", "--price", "--noise-scale", "--target-samples"),
        *("--link-rate", "--devices-per-node", "--out", "--data", "--set", "--trace", "--json"),
    },
}
DECIDING = {"--fit", "--predict", "--suggest", "--dry-run-mesh", "--help"}


@pytest.mark.parametrize("form", FORMS)
def test_an_option_without_effect_is_refused(form: str, calls: list[Any]) -> None:
    command = typer.main.get_command(command_line()).commands["plan"]  # type: ignore[attr-defined]
    options = [one for one in command.params if one.opts[0].startswith("--")]
    refused = 0
    for option in options:
        name = option.opts[0]
        if name in TAKEN[form] | DECIDING:
            continue
        value = () if getattr(option, "is_flag", False) else ("batch" if name == "--grow" else "1",)
        with pytest.raises(JobError, match=rf"^{name} has no effect with {form}, only with .*: leave it out\.$"):
            ask(*FORMS[form], name, *value)
        refused += 1
    assert refused == len({one.opts[0] for one in options} - TAKEN[form] - DECIDING) > 2
    assert calls == []


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What reaches the commands behind --fit and --suggest."""
    seen: list[Any] = []
    monkeypatch.setattr("paceline.cli.plan.fit_and_predict", lambda *given: seen.append(("fit", *given)))
    monkeypatch.setattr("paceline.cli.plan.suggest_next", lambda *given: seen.append(("suggest", *given)))
    return seen


def test_calibration_needs_neither_job_nor_cluster(calls: list[Any]) -> None:
    ask("--fit", "o.csv", "--predict", "q.csv", "--json")
    ask("--suggest", "o.csv", "--budget", "3")
    assert calls == [
        ("fit", Path("o.csv"), Path("q.csv"), True, 0.5, None, Path()),
        ("suggest", Path("o.csv"), 3, False, None, None),
    ]


def test_4096_devices_in_two_seconds(folder: Path) -> None:
    """Of computing, so that others on this machine do not count; the page and all files included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    arguments = ["job.toml", "--devices", "1..4096", "--price", "2", "--target-samples", "1e9", "--json"]
    result = subprocess.run(
        [sys.executable, "-m", "paceline", "plan", *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert json.loads(result.stdout)["rows"][-1]["devices"] == 4096
    spent_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    assert spent_s < 4.0  # 1.7 s on an idle core; a shared one takes longer for the same work


def test_a_model_too_large_for_a_device_gets_a_mesh_that_is_kept_in_the_plan() -> None:
    """12 bytes a parameter make 100 GB of state; eight of these GPUs hold it together."""
    job = Job(global_batch_size=64, virtual_shards=64)
    cluster = gpu_cluster(1, num_parameters=8_000_000_000)
    found = forecast(job, cluster, [8])
    assert found.recommended.objection == ""
    plan = recommended_plan(job, cluster, found)
    assert plan is not None
    assert plan.mesh is not None and plan.mesh.fsdp > 1
    assert plan.mesh.num_workers == plan.world_size == 8
    assert found.recommended.memory_bytes is not None and found.recommended.memory_bytes < 80 * 2**30
    assert Plan.from_mapping(json.loads(json.dumps(plan.to_mapping()))) == plan
    with pytest.raises(JobError, match="None of these device counts"):
        forecast(job.with_values(parity="bitwise"), cluster, [8])


@pytest.mark.slow
def test_a_mesh_is_tried_on_paper_for_devices_that_nobody_has() -> None:
    arguments = ["digits-lenet", "--set", "virtual_shards=64", "--dry-run-mesh", "dp64 x pp2"]
    found = json.loads(ask(*arguments, "--json"))
    assert (found["mesh"], found["num_workers"], found["num_micro_batches"]) == ("dp64 x pp2", 128, 1)
    assert [stage["last_layer"] for stage in found["stages"]][1] == "fc2"
    assert found["sent_bytes"].keys() == {"pp", "dp"}
    text = ask(*arguments)
    assert text.startswith("dp64 x pp2: 128 workers, 1 micro-batch of 1 a share and step")
    assert "dp: a worker sends " in text


def test_a_mesh_with_more_shares_than_shards_or_without_degrees_is_one_sentence() -> None:
    with pytest.raises(JobError, match=r"dp128 divides the batch 128 ways, .* use virtual_shards = 128 or more"):
        ask("digits-lenet", "--dry-run-mesh", "dp128")
    with pytest.raises(JobError, match="There is no strategy 'dq2'"):
        ask("digits-lenet", "--dry-run-mesh", "dq2")
