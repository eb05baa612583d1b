"""The commands, each as a user runs it."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from paceline.spec import RunRecord
from tests.old.ranks.command_line import TRACEBACK, clean_environ, paceline, python, succeeded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]

SUMMARY_KEYS = {
    "accuracy",
    "loss",
    "samples_per_s",
    "time_to_first_step_s",
    "wall_s",
    "steps",
    "samples_seen",
    "world_size",
    "weights_sha256",
}


def started(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`paceline ARGUMENTS` by a new Python, and so are its workers."""
    return python("-m", "paceline", *arguments, cwd=cwd)


# --- train ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, subprocess.CompletedProcess[str]]]:
    """`paceline train` on 1 and on 2 workers: the folder it was started in, and how it ended."""

    def train(workers: int, folder: Path) -> subprocess.CompletedProcess[str]:
        options = ("--workers", str(workers), "--max-steps", "3", "--json", *(("--quiet",) if workers == 1 else ()))
        return succeeded(started("train", "digits-lenet", *options, cwd=folder))

    folders = {workers: tmp_path_factory.mktemp(f"workers{workers}") for workers in (1, 2)}
    with ThreadPoolExecutor() as beside:
        results = beside.map(train, folders.keys(), folders.values())
    return {workers: (folder, result) for (workers, folder), result in zip(folders.items(), results, strict=True)}


def test_train_ends_with_one_line_of_json_and_nothing_else(trained: Any) -> None:
    for workers, (_, result) in trained.items():
        (line,) = result.stdout.splitlines()
        summary = json.loads(line)
        assert set(summary) == SUMMARY_KEYS
        assert (summary["steps"], summary["samples_seen"], summary["world_size"]) == (3, 3 * 64, workers)
        assert 0 <= summary["accuracy"] <= 1
        assert 0 < summary["time_to_first_step_s"] < summary["wall_s"]
        assert summary["samples_per_s"] > 0
        assert len(summary["weights_sha256"]) == 64


def test_train_speaks_to_a_person_unless_told_not_to(trained: Any) -> None:
    assert trained[1][1].stderr == ""
    assert "epoch 1/15  train loss" in trained[2][1].stderr
    assert "\x1b" not in trained[2][1].stderr


def test_train_ends_with_the_same_bits_on_1_and_2_workers(trained: Any) -> None:
    one, two = (json.loads(trained[workers][1].stdout) for workers in (1, 2))
    for key in ("weights_sha256", "accuracy", "loss"):
        assert one[key] == two[key]


def test_train_leaves_a_folder_with_all_of_it(trained: Any) -> None:
    folder, result = trained[2]
    (run_dir,) = (folder / "runs").iterdir()
    assert {"job.json", "plan.json", "record.json", "metrics.jsonl", "model.safetensors"} <= {
        path.name for path in run_dir.iterdir()
    }
    record = RunRecord.load(run_dir / "record.json")
    assert record.summary() == json.loads(result.stdout)
    assert record.plan.world_size == 2
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line.get("samples_seen")) for line in steps[:3]] == [(1, 64), (2, 128), (3, 192)]


def test_train_does_not_write_over_a_finished_run(trained: Any, tmp_path: Path) -> None:
    folder, _ = trained[1]
    (run_dir,) = (folder / "runs").iterdir()
    before = (run_dir / "record.json").read_bytes()
    result = paceline("train", "digits-lenet", "--set", "optim.lr=0.2", "--out", str(run_dir), cwd=tmp_path)
    assert_one_sentence(result, "optim.lr was 0.05 and is 0.2")
    assert (run_dir / "record.json").read_bytes() == before


def test_a_run_that_could_not_save_says_so_at_its_end(tmp_path: Path) -> None:
    options = ("-n", "1", "--max-steps", "1", "--set", "checkpoint.dir=/proc/x")
    result = succeeded(started("train", "digits-lenet", *options, cwd=tmp_path))
    assert re.search(r"^checkpoint +none was written$", result.stderr, re.MULTILINE)


def test_a_run_whose_checkpoints_have_lost_their_manifests_does_not_begin_anew(tmp_path: Path) -> None:
    train = ("train", "digits-lenet", "-n", "1", "--out", "half", "--max-steps")
    succeeded(started(*train, "2", cwd=tmp_path))
    manifests = list((tmp_path / "half" / "checkpoints").glob("*/manifest.json"))
    assert manifests
    for manifest in manifests:
        manifest.rename(manifest.with_name("elsewhere"))
    result = started(*train, "3", cwd=tmp_path)
    assert_one_sentence(result, "manifest.json is missing, and one was complete before. Remove them to start from the")
    assert not (tmp_path / "half" / "record.json").exists()
    assert RunRecord.load(tmp_path / "half" / "record-2-steps.json").steps == 2
    for manifest in manifests:
        manifest.with_name("elsewhere").rename(manifest)
    assert "resum" in succeeded(started(*train, "3", cwd=tmp_path)).stderr


# --- scripts of users, under every launcher ---

SCRIPT = """\
import sys

import torch

import paceline


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 22

    def __getitem__(self, index):
        x = torch.arange(5.0) * (index - 10) / 10
        return x, x.sum().sin()


def loss_fn(model, batch):
    x, y = batch
    return torch.nn.functional.mse_loss(model(x)[:, 0], y)


with paceline.init(global_batch_size=8, virtual_shards=4, epochs=2, seed=3, parity="bitwise") as run:
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for batch in run.batches(Points()):
        run.step(batch, loss_fn)
    sys.stdout.write(f"rank {run.rank} of {run.world_size}: {run.steps} steps {run.weights_sha256()}\\n")
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "points.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def sha_alone(script: Path) -> str:
    """The weights that plain `python` ends with."""
    line = succeeded(python(str(script), cwd=script.parent)).stdout.strip()
    assert line.startswith("rank 0 of 1: 6 steps ")
    return line.rpartition(" ")[2]


def assert_two_workers_ended_with(sha: str, output: str) -> None:
    found = sorted(re.findall(r"rank \d of \d: \d+ steps [0-9a-f]{64}", output))
    assert found == [f"rank {rank} of 2: 6 steps {sha}" for rank in range(2)], output


def test_a_script_under_torchrun(script: Path, sha_alone: str) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    result = succeeded(python(*torchrun, str(script), cwd=script.parent))
    assert_two_workers_ended_with(sha_alone, result.stdout)


def test_a_script_under_paceline_launch(script: Path, sha_alone: str, tmp_path: Path) -> None:
    result = succeeded(started("launch", "-n", "2", str(script), cwd=tmp_path))
    assert_two_workers_ended_with(sha_alone, result.stdout)


def _srun(rank: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "node[07]",
    }


def _mpirun(rank: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": "prterun-here-4711@1",
    }


@pytest.mark.parametrize("facts", [_srun, _mpirun], ids=["srun", "mpirun"])
def test_a_script_under_a_launcher_of_a_cluster(facts: Any, script: Path, sha_alone: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    workers = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=clean_environ(MASTER_PORT=port, OMP_NUM_THREADS="1", **facts(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=60) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    assert_two_workers_ended_with(sha_alone, "".join(stdout for stdout, _ in outputs))


# --- mistakes ---


def assert_one_sentence(result: subprocess.CompletedProcess[str], words: str, exit_code: int = 2) -> None:
    (line,) = result.stderr.splitlines()
    assert line.startswith("paceline: ")
    assert words in line
    assert result.stdout == ""
    assert result.returncode == exit_code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("train digits-lenet --set optim.learning_rate=1", "There is no key 'optim.learning_rate'"),
        ("train digits-lenett", "did you mean 'digits-lenet'?"),
        ("train digits-lenet --set virtual_shards=8 --workers 9", "9 workers cannot share virtual_shards = 8"),
        ("train mnist-lenet --workers 1 --quiet --data nowhere", "nowhere"),
        ("train digits-lenet --workers 2 --quiet --set model.name=lenett", "did you mean 'lenet'?"),
        ("train digits-lenet --workers 1 --max-steps 1 --quiet --track paper", "There is no tracker 'paper'"),
        ("scale digits-lenet --devices 1,two", "--devices 1,two should be counts"),
        ("scale digits-lenet --devices 8", "8 workers cannot share virtual_shards = 4"),
        ("scale digits-lenet --tolerance much", "--tolerance much"),
        ("verify nothing.py", "There is no script 'nothing.py'"),
        ("verify nothing.toml", "There is no job file 'nothing.toml'"),
        ("launch nothing.py", "There is no script 'nothing.py'"),
        ("launch --nprocs 2 nothing.py", "There is no option '--nprocs'"),
        ("train digits-lenet --workers 2 --strategy fspd", "did you mean 'fsdp'?"),
        ("report nothing", "nothing"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: str, words: str, tmp_path: Path) -> None:
    assert_one_sentence(paceline(*arguments.split(), cwd=tmp_path), words)


def test_a_script_without_a_step_cannot_be_verified(tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("")
    result = paceline("verify", "idle.py", "--workers", "1", "--json", cwd=tmp_path)
    assert_one_sentence(result, "run.step in its loop")


FAULTY = """\
import os

from torch import nn


class Faulty(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10))

    def forward(self, x):
        if os.environ["RANK"] == "1":
            raise ArithmeticError("this worker cannot count")
        return self.inner(x)


def build():
    return Faulty()
"""


def test_a_model_that_fails_on_one_rank_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    result = paceline(
        *("train", "digits-lenet", "--workers", "2", "--set", "model.name=faulty:build", "--quiet"),
        cwd=tmp_path,
        PYTHONPATH=str(tmp_path),
    )
    assert result.returncode == 1
    assert result.stderr.count(TRACEBACK) == 1
    assert result.stderr.count("in forward") == 1
    *_, sentence, report = result.stderr.splitlines()
    assert sentence.startswith("paceline: Rank 1 of 2")
    assert "ArithmeticError: this worker cannot count" in sentence
    assert (tmp_path / report.removeprefix("The report: ")).read_text().startswith("Rank 1 of 2")
    assert not list(tmp_path.glob("runs/*/record.json"))


# --- scale and report ---

SCALE = ("scale", "digits-lenet", "--devices", "1,2", "--out", "study", "--quiet")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study's folder."""
    folder = tmp_path_factory.mktemp("study")
    result = succeeded(started(*SCALE, "--max-steps", "4", cwd=folder))
    assert result.stdout.splitlines()[-1] == "study/report.html"
    return folder


def scale(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return paceline(*SCALE, *options, cwd=folder)


def test_scale_writes_the_study(study: Path) -> None:
    out = study / "study"
    rows = json.loads((out / "scaling.json").read_text())
    assert "weights_sha256" in json.dumps(rows)
    assert len((out / "scaling.csv").read_text().splitlines()) == 3
    assert (out / "report.html").read_text().lstrip().lower().startswith("<!doctype html>")
    records = [RunRecord.load(path) for path in sorted(out.glob("runs/*/record.json"))]
    assert [(record.world_size, record.steps) for record in records] == [(1, 4), (2, 4)]
    assert records[0].weights_sha256 == records[1].weights_sha256
    # The same threads a device, whatever the number of devices.
    assert records[0].plan.threads_per_worker == records[1].plan.threads_per_worker


def test_scale_again_reuses_the_runs(study: Path) -> None:
    out = study / "study"
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/record.json")}
    (out / "report.html").unlink()
    result = succeeded(scale(study, "--max-steps", "4", "--json"))
    assert json.loads(result.stdout) == json.loads((out / "scaling.json").read_text())
    assert {path: path.stat().st_mtime_ns for path in out.glob("runs/*/record.json")} == before
    assert (out / "report.html").exists()


@pytest.mark.parametrize(
    "options",
    [("--max-steps", "4", "--set", "optim.lr=0.01"), ("--max-steps", "5"), ()],
    ids=["another job", "more steps", "all steps"],
)
def test_scale_refuses_the_folder_of_another_study(study: Path, options: tuple[str, ...]) -> None:
    assert_one_sentence(scale(study, *options), "name another folder for this study")


def test_report_makes_the_study_again(study: Path, tmp_path: Path) -> None:
    runs = sorted(str(path.parent) for path in study.glob("study/runs/*/record.json"))
    result = succeeded(paceline("report", *runs, "--out", "again", cwd=tmp_path))
    assert result.stdout.splitlines()[-1] == "again/report.html"
    assert (tmp_path / "again" / "scaling.csv").read_text() == (study / "study" / "scaling.csv").read_text()


# --- verify ---

UNLIKE_SCRIPT = """\
import os

import torch
import torch.nn.functional as F

import paceline
from paceline.data import load
from paceline.spec import DataSpec


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(28 * 28, 10)
        {buffer}

    def forward(self, x):
        x = x.flatten(1)
        {update}
        return self.inner(x)


CLASS_WEIGHTS = torch.arange(1.0, 11.0)


def loss_fn(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels{weight})


with paceline.init(global_batch_size=32, virtual_shards=4) as run:
    net = Net()
    model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05))
    for batch in run.batches(load(DataSpec("digits"))[0]):
        run.step(batch, loss_fn)
"""


def verify_script(folder: Path, buffer: str = "", update: str = "", weight: str = "") -> dict[str, Any]:
    """The verdict on two workers; the command must end as it says."""
    text = UNLIKE_SCRIPT.format(buffer=buffer or "pass", update=update or "pass", weight=weight)
    (folder / "mine.py").write_text(text)
    result = paceline("verify", "mine.py", "--workers", "1,2", "--steps", "2", "--json", cwd=folder, timeout_s=600)
    assert TRACEBACK not in result.stderr
    verdicts = json.loads(result.stdout)
    assert [(verdict["workers"], verdict["passed"]) for verdict in verdicts[:1]] == [(1, True)]
    assert result.returncode == (0 if verdicts[1]["passed"] else 1)
    return dict(verdicts[1])


def test_verify_passes_what_is_right(tmp_path: Path) -> None:
    result = succeeded(started("verify", "digits-lenet", "--workers", "1,2", "--steps", "2", cwd=tmp_path))
    assert result.stdout.splitlines() == [
        "PASS  1 worker: the same over 2 steps, bit for bit",
        "PASS  2 workers: the same over 2 steps, bit for bit",
    ]
    assert list(tmp_path.iterdir()) == []  # it leaves nothing behind


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """On scripts that are verified at the same time."""
    scripts: dict[str, dict[str, str]] = {
        "buffer": {
            "buffer": 'self.register_buffer("level", torch.zeros(()))',
            "update": "self.level.mul_(0.9).add_(0.1 * x.detach().square().mean())",
        },
        "weights": {"weight": ", weight=CLASS_WEIGHTS"},
        "rank": {
            "buffer": 'self.register_buffer("level", torch.zeros(()))',
            "update": 'self.level.add_(float(os.environ.get("RANK", "0")))',
        },
    }
    with ThreadPoolExecutor() as beside:
        verifying = {
            name: beside.submit(verify_script, tmp_path_factory.mktemp(name), **parts)
            for name, parts in scripts.items()
        }
    return {name: verdict.result() for name, verdict in verifying.items()}


def test_verify_finds_a_buffer_that_depends_on_the_rank(verdicts: dict[str, Any]) -> None:
    verdict = verdicts["rank"]
    assert not verdict["passed"]
    assert "buffer 'level'" in verdict["tensor"]
    assert "synchronised" in verdict["cause"]


def test_verify_passes_a_buffer_that_forward_passes_change(verdicts: dict[str, Any]) -> None:
    assert verdicts["buffer"]["passed"]


def test_verify_finds_a_weighted_mean_which_is_then_the_same_on_any_number_of_workers(verdicts: dict[str, Any]) -> None:
    verdict = verdicts["weights"]
    assert verdict["passed"]
    assert "return paceline.Mean(loss, weight=number of tokens)" in verdict["note"]
