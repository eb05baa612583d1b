"""The functions that start no workers, called from Python."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

import paceline
from paceline.errors import ClusterError, JobError
from paceline.workflows import verify as verify_workflow
from tests.data import topologies
from tests.old.fixtures.checkpoint import FOLDER
from tests.old.sample_clusters import cpu_cluster, gpu_cluster
from tests.old.sample_records import sample_study_records

JOB = paceline.Job(name="job", global_batch_size=1024, virtual_shards=1024)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_topology_shows_itself() -> None:
    found = paceline.topo(topologies.path_of("dgx1"), pick=2, pair="0,3", svg="node.svg")
    assert found.choice is not None and found.choice.devices == (0, 3)
    assert found.pair_sentence is not None and "NVLink" in found.pair_sentence
    assert found._repr_html_() == Path("node.svg").read_text(encoding="utf-8")
    assert paceline.topo(cpu_cluster()).choice is None
    with pytest.raises(ClusterError, match="pick = 9 is not possible"):
        paceline.topo(topologies.path_of("dgx1"), pick=9)


def test_a_plan_shows_itself_and_writes_only_where_it_is_asked_to() -> None:
    planned = paceline.plan(JOB, cluster=gpu_cluster(), devices=[1, 2, 4])
    assert [row.devices for row in planned.forecast.rows] == [1, 2, 4]
    assert planned.plan is not None and planned.plan.world_size == planned.forecast.recommended_devices
    assert "samples/s" in planned._repr_html_() and "<title>job" in planned.page()
    assert list(Path().iterdir()) == []
    paceline.plan(JOB, cluster=gpu_cluster(), devices="1..2", out="out")
    assert sorted(path.name for path in Path("out").iterdir()) == ["forecast.json", "plan.html", "plan.json"]
    with pytest.raises(ClusterError, match="run paceline probe job first"):
        paceline.plan(JOB)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("timings", 0, "micro_batches", 0, "spread"), 2**62),
        (("network", 0, "bytes_per_s"), 0),
        (("network", 0, "bytes_per_s"), 1e-300),
        (("network", 0, "latency_s"), 1e308),
        (("nodes", 0, "links", 0, "latency_s"), 1e308),
    ],
)
def test_a_cluster_file_that_cannot_be_meant_is_one_sentence(place: tuple[Any, ...], value: float) -> None:
    mapping = gpu_cluster().to_mapping()
    inner: Any = mapping
    for key in place[:-1]:
        inner = inner[key]
    assert place[-1] in inner
    inner[place[-1]] = value
    Path("cluster.json").write_text(json.dumps({"schema": 1, **mapping}), encoding="utf-8")
    with pytest.raises(ClusterError, match=rf"{place[-1]} = .* should be at (most|least)"):
        paceline.plan(JOB, devices=[1, 16])


def test_step_times_are_fitted_and_measurements_suggested() -> None:
    rows = "num_nodes,devices_per_node,micro_batch_size,step_time_s\n1,1,64,0.0723\n1,2,64,0.0804\n"
    Path("obs.csv").write_text(rows, encoding="utf-8")
    Path("q.csv").write_text(rows.splitlines()[0] + "\n1,3,64,\n", encoding="utf-8")
    fitted = paceline.fit_step_times("obs.csv", "q.csv")
    assert fitted.forecasts[0].total_s == pytest.approx(0.083, rel=0.05)
    assert fitted.placements[0].layout.num_workers == 3 and fitted.contradictions == ()
    assert len(paceline.suggest_measurements("obs.csv", budget=2)) == 2


def test_a_mesh_is_tried_on_paper() -> None:
    tried = paceline.dry_run_mesh("digits-lenet", "dp2 x pp2")
    assert tried.sent_bytes.keys() == {"pp", "dp"} and tried.mesh.num_workers == 4
    assert "a worker sends" in tried._repr_html_()


def test_a_report_is_made_of_folders() -> None:
    for number, record in enumerate(sample_study_records()):
        Path(f"run{number}").mkdir()
        record.save(Path(f"run{number}/record.json"))
    study = paceline.report(Path().glob("run*"), tolerance=0.02, out="report")
    assert len(paceline.report("run0").rows) == 1
    assert study.tolerance == 0.02 and study.page() == Path("report/report.html").read_text(encoding="utf-8")


def test_checkpoints_are_looked_at() -> None:
    place = str(FOLDER)
    (known,) = paceline.checkpoint.ls(place).states
    assert (known.name, known.state, known.step) == ("step-00000005", "complete", 5)
    (good,) = paceline.checkpoint.verify(place)
    assert good == dataclasses.replace(known, state="good")
    assert paceline.checkpoint.prune(place, dry_run=True).stay == ("step-00000005",)
    assert paceline.checkpoint.export(place, "model.safetensors").name == "step-00000005"


def test_runs_are_handed_to_schedulers() -> None:
    job = paceline.submit.slurm("train", ["digits-lenet"], nodes=2, time_limit_s=3600, dry_run=True)
    assert "#SBATCH --nodes=2" in job.script and job.job_id == ""
    manifests = paceline.submit.kubernetes("digits-lenet", image="a", claim="b", out="/data/run", on_cpu=True)
    assert "kind: Job" in manifests
    assert list(Path().iterdir()) == []


def test_this_node_is_checked() -> None:
    levels = {finding.level for finding in paceline.doctor()}
    assert "ok" in levels and levels <= {"ok", "warning", "error"}


@pytest.mark.parametrize("job", ["digits-lenet", "train.py"])
def test_verify_trains_nothing_before_all_numbers_of_workers_are_checked(
    job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_workflow, "run_workers", lambda *_: pytest.fail("it trains"))
    Path("train.py").write_text("")
    with pytest.raises(JobError, match="'dp2 x pp2' does not make 3 workers"):
        paceline.verify(job, strategy="dp2 x pp2", workers="1,3")
    if job == "digits-lenet":
        with pytest.raises(JobError, match="64 workers cannot share virtual_shards"):
            paceline.verify(job, workers=[1, 64])


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: paceline.train("digits-lenet", workers=0), "workers = 0 should be a whole number of 1 or more"),
        (lambda: paceline.launch(__file__, workers=0), "workers = 0 should be"),
        (
            lambda: paceline.submit.slurm("train", "digits-lenet"),
            r"arguments = 'digits-lenet' should be a list of words",
        ),
        (lambda: paceline.launch(__file__, "--x 1"), r"arguments = '--x 1' should be a list of words: \['--x', '1'\]"),
        (lambda: paceline.launch(__file__, cast(Any, [1])), "arguments holds 1; each should be a text, such as '1'"),
        (
            lambda: paceline.train("digits-lenet", track="wandb"),
            r"track = 'wandb' should be a list of words",
        ),
        (
            lambda: paceline.train("digits-lenet", callbacks=cast(Any, "mine:Log")),
            "callbacks = 'mine:Log' should be a list",
        ),
        (lambda: paceline.bench.comm(algorithms=cast(Any, "ring")), "algorithms = 'ring' should be a list of words"),
        (lambda: paceline.Strategy("pp", cut="layer1"), "cut = 'layer1' should be a list of words"),
        (lambda: paceline.verify("train.py", "--x 1"), "arguments = '--x 1' should be a list of words"),
        (
            lambda: paceline.verify("digits-lenet", ["--out", "x"]),
            "--out x is no option of this command, and arguments go to scripts .*, not to a job such as 'digits-lenet'",
        ),
        (
            lambda: paceline.submit.kubernetes("digits-lenet", ["--step", "2"], image="i", claim="c", out="/x"),
            "--step 2 is no option of this command",
        ),
        (
            lambda: paceline.verify("train.py", settings=["seed=1"], data="x"),
            "--set and --data would change a job, and 'train.py' is a script",
        ),
        (
            lambda: paceline.probe("digits-lenet", out="/proc/self/cluster.json"),
            "/proc/self/cluster.json cannot be written: No such file or directory",
        ),
        (lambda: paceline.train("digits-lenet", max_steps=0), "max_steps = 0 should be"),
        (lambda: paceline.train("digits-lenet", threads=-3), "threads = -3 should be"),
        (lambda: paceline.scale("digits-lenet", devices=[]), r"devices = \[\] should be whole numbers"),
        (lambda: paceline.scale("digits-lenet", devices=[1], grow=cast(Any, "x")), "grow = 'x' should be 'none' or 'b"),
        (lambda: paceline.plan(JOB, grow=cast(Any, None)), "grow = None should be a name"),
        (lambda: paceline.plan(JOB, devices=cast(Any, 2.5)), "devices = 2.5 should be a list or a text"),
        (lambda: paceline.plan(JOB, devices=cast(Any, iter([1]))), "devices = .* should be a whole number of 1"),
        (lambda: paceline.plan(JOB, devices_per_node=cast(Any, 2.0)), "devices_per_node = 2.0 should be"),
        (lambda: paceline.plan(JOB, efficiency_floor=2), "efficiency_floor = 2 should be a number from 0 to 1"),
        (lambda: paceline.plan(JOB, efficiency_floor=True), "efficiency_floor = True should be a number from 0 to 1"),
        (lambda: paceline.plan(JOB, link_rate=True), "link_rate = True should be a number from 1 to 1e"),
        (lambda: paceline.plan(JOB, link_rate=0), "link_rate = 0 should be a number from 1 to 1e"),
        (lambda: paceline.plan(JOB, noise_scale=0), "noise_scale = 0 should be a number from 1 to 1e"),
        (lambda: paceline.plan(JOB, target_samples=0), "target_samples = 0 should be a number from 1 to 1e"),
        (lambda: paceline.plan(JOB, price=1e300), r"price = 1e\+300 should be an amount of 0 or more .* a billion at"),
        (lambda: paceline.report("runs", efficiency_floor=2), "efficiency_floor = 2 should be a number from 0 to 1"),
        (lambda: paceline.fit_step_times("o", "q", efficiency_floor=2), "efficiency_floor = 2 should be a number from"),
        (lambda: paceline.verify("digits-lenet", workers=[]), r"workers = \[\] should be whole numbers"),
        (lambda: paceline.train("digits-lenet", where=paceline.Where(launcher=cast(Any, "foo"))), "no launcher 'foo'"),
        (lambda: paceline.train("digits-lenet", workers=cast(Any, 2.5)), "workers = 2.5 should be a whole number of 1"),
        (lambda: paceline.train("digits-lenet", max_steps=cast(Any, 2.5)), "max_steps = 2.5 should be a whole number"),
        (lambda: paceline.memory("digits-lenet", cast(Any, 2.5)), "devices = 2.5 should be a whole number of 1"),
        (
            lambda: paceline.verify("digits-lenet", workers=cast(Any, [1.5])),
            r"workers = \[1.5\] should be whole numbers",
        ),
        (lambda: paceline.scale("digits-lenet", devices=cast(Any, 2)), "devices = 2 should be a list or a text"),
        (lambda: paceline.submit.slurm("train", ["x"], nodes=cast(Any, 1.5)), "nodes = 1.5 should be a whole number"),
        (lambda: paceline.bench.comm(workers=cast(Any, 1.5)), "workers = 1.5 should be a whole number"),
        (lambda: paceline.train("digits-lenet", settings=cast(Any, [3])), "settings holds 3; each should be a text"),
        (
            lambda: paceline.plan(JOB, cluster=gpu_cluster(), settings=cast(Any, [3])),
            "settings holds 3; each should be a text",
        ),
        (lambda: paceline.train("digits-lenet", settings=cast(Any, 3)), "settings = 3 should be a list"),
        (lambda: paceline.train("digits-lenet", strategy=cast(Any, 3)), "strategy = 3 should be a Strategy or a text"),
        (lambda: paceline.train("digits-lenet", where=cast(Any, "a:1")), "where = 'a:1' should be a Where"),
        (lambda: paceline.train("digits-lenet", elastic=cast(Any, 2)), "elastic = 2 should be an Elastic"),
        (lambda: paceline.train("digits-lenet", out=cast(Any, 3)), "out = 3 should be a path or a text or None"),
        (lambda: paceline.train("digits-lenet", plan=cast(Any, 3)), "plan = 3 should be a Plan or a path or a text"),
        (lambda: paceline.train("digits-lenet", cluster=cast(Any, 3)), "cluster = 3 should be a path or a text"),
        (lambda: paceline.train("digits-lenet", say=cast(Any, "x")), "say = 'x' should be a function"),
        (lambda: paceline.train(cast(Any, None)), "job = None should be a Job or a text or a path"),
        (lambda: paceline.Where(hosts=cast(Any, 3)), "hosts = 3 should be a text or None"),
        (lambda: paceline.Where(hang_timeout_s=cast(Any, "1")), "hang_timeout_s = '1' should be a number"),
        (lambda: paceline.Elastic(exclude_slower=cast(Any, "2")), "exclude_slower = '2' should be a number or None"),
        (lambda: paceline.Strategy(cast(Any, 3)), "strategy = 3 should be a text or None"),
        (lambda: paceline.doctor(hosts=cast(Any, 3)), "hosts = 3 should be a text or None"),
        (lambda: paceline.report(cast(Any, None)), "runs = None should be a list or a path or a text"),
        (
            lambda: paceline.report("run", efficiency_floor=cast(Any, None)),
            "efficiency_floor = None should be a number",
        ),
        (lambda: paceline.bench.comm(budget=cast(Any, None)), "budget = None should be a number"),
        (
            lambda: paceline.train("digits-lenet", servers=2),
            r"servers = 2 goes with algorithm = 'parameter_server' or .*; leave it out",
        ),
        (
            lambda: paceline.bench.comm(algorithms=["ring"], servers=2),
            "servers = 2 goes with the algorithms parameter_se",
        ),
        (lambda: paceline.train("digits-lenet", data="nix"), "'digits' reads no folder; leave data = 'nix' out"),
        (
            lambda: paceline.memory("digits-lenet", 2, micro_batch_size=100000),
            "micro_batch_size = 100000 is more than the global batch of 64 samples",
        ),
        (
            lambda: paceline.launch(__file__, workers=2, where=paceline.Where(interface="nix")),
            "interface = 'nix' is for workers on other nodes, and all of these run on this one",
        ),
        (
            lambda: paceline.launch(__file__, workers=2, where=paceline.Where(python="nix")),
            "python = 'nix' is for workers on other nodes",
        ),
        (lambda: paceline.dry_run_mesh("digits-lenet", "dp0"), "'dp0' gives dp the degree 0; a degree is 1 or more"),
        (lambda: paceline.memory(""), "'' is neither a job file nor a recipe"),
        (lambda: paceline.checkpoint.ls("."), "There is no checkpoint in '.'|There is no folder '.'"),
        (lambda: paceline.report("."), r"There is no run record '/.*record\.json'"),
        (lambda: paceline.checkpoint.ls(Path("nowhere")), "no folder 'nowhere'"),
    ],
)
def test_an_invalid_argument_is_one_sentence_before_anything_starts(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(paceline.errors.PacelineError, match=sentence):
        call()
