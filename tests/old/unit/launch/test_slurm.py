"""Slurm's command lines, allocations and job scripts."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.errors import LaunchError
from paceline.launch import slurm
from paceline.launch.node_list import NodeSlots
from paceline.launch.slurm import allocation, batch_script, srun_argv, submit


def _scontrol(argv: Sequence[str]) -> str:
    assert argv == ["scontrol", "show", "hostnames", "gpu[1-3]"]
    return "gpu1\ngpu2\ngpu3\n"


@pytest.mark.parametrize(
    ("variables", "counts"),
    [
        ({"SLURM_TASKS_PER_NODE": "2(x2),1"}, [2, 2, 1]),
        ({"SLURM_TASKS_PER_NODE": "4(x3)"}, [4, 4, 4]),
        ({"SLURM_TASKS_PER_NODE": "1(x3)", "SLURM_GPUS_ON_NODE": "8"}, [8, 8, 8]),
        ({"SLURM_GPUS_PER_NODE": "h100:4", "SLURM_GPUS_ON_NODE": "8"}, [4, 4, 4]),
        ({}, [1, 1, 1]),
    ],
)
def test_an_allocation(variables: dict[str, str], counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_ask", _scontrol)
    found = allocation({"SLURM_JOB_NODELIST": "gpu[1-3]"} | variables)
    assert found == tuple(NodeSlots(f"gpu{number}", count) for number, count in enumerate(counts, 1))


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "This is not a Slurm allocation"),
        ({"SLURM_JOB_NODELIST": "gpu[1-3]", "SLURM_TASKS_PER_NODE": "2(x2)"}, "does not fit an allocation of 3 nodes"),
        ({"SLURM_JOB_NODELIST": "gpu[1-3]", "SLURM_TASKS_PER_NODE": "many"}, "cannot be read"),
    ],
)
def test_no_allocation(variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_ask", _scontrol)
    with pytest.raises(LaunchError, match=words):
        allocation(variables)


def test_a_task_on_one_node() -> None:
    argv = srun_argv("gpu1", ["python", "-m", "x"], cwd=Path("/data/a b"), environ={"A": "1"})
    assert argv[0] == "srun"
    assert {"--nodelist=gpu1", "--ntasks=1", "--overlap", "--chdir=/data/a b"} <= set(argv)
    assert argv[argv.index("--") + 1 :] == ("env", "A=1", "python", "-m", "x")
    assert "--unbuffered" not in argv
    for node in ("-x", "a,b", "a b", ""):
        with pytest.raises(LaunchError, match="not the name of a Slurm node"):
            srun_argv(node, ["true"], cwd=Path("/"), environ={})
    with pytest.raises(LaunchError, match="looks like a secret"):
        srun_argv("gpu1", ["true"], cwd=Path("/"), environ={"HF_TOKEN": "x"})


def _script(**values: object) -> str:
    settings = {
        "name": "run-1",
        "run_dir": Path("/data/runs/1"),
        "cwd": Path("/data/it's here"),
        "num_nodes": 2,
        "workers_per_node": 8,
        "cpus_per_worker": 12,
        "use_gpus": True,
    }
    command = ["/opt/python", "-m", "paceline", "launch", "--launcher", "slurm", "train.py", "it's"]
    return batch_script(command, **(settings | values))  # type: ignore[arg-type]


def test_a_job_script() -> None:
    script = _script(time_limit_s=90_061.5, partition="gpu", account="lab")
    assert script.splitlines() == [
        "#!/bin/sh",
        "#SBATCH --job-name=run-1",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --cpus-per-task=12",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --time=1-01:01:02",
        "#SBATCH --partition=gpu",
        "#SBATCH --account=lab",
        '#SBATCH --output="/data/runs/1/slurm-%j.log"',
        "umask 077",
        "cd -- '/data/it'\"'\"'s here' && exec /opt/python -m paceline launch --launcher slurm train.py 'it'\"'\"'s'",
    ]
    assert "gpus" not in _script(use_gpus=False)
    assert subprocess.run(["sh", "-n", "-c", script], timeout=10).returncode == 0


@pytest.mark.parametrize(
    "values",
    [
        {"name": "a\n#SBATCH --uid=0"},
        {"name": ""},
        {"partition": "gpu --uid=0"},
        {"account": "x\ny"},
        {"run_dir": Path('/data/"x')},
        {"run_dir": Path("/data/a\nb")},
    ],
)
def test_names_that_would_be_options(values: dict[str, object]) -> None:
    with pytest.raises(LaunchError):
        _script(**values)


def test_submitting(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["17\n", "18;other\n", "Submitted"]

    def sbatch(argv: Sequence[str], text: str) -> str:
        assert (argv, text) == (["sbatch", "--parsable"], "#!/bin/sh\n")
        return answers.pop(0)

    monkeypatch.setattr(slurm, "_ask", sbatch)
    assert submit("#!/bin/sh\n") == "17"
    assert submit("#!/bin/sh\n") == "18"
    with pytest.raises(LaunchError, match="not a job id"):
        submit("#!/bin/sh\n")


def test_where_there_is_no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="There is no sbatch on this machine"):
        submit("#!/bin/sh\n")
    with pytest.raises(LaunchError, match="There is no scontrol on this machine"):
        allocation({"SLURM_JOB_NODELIST": "a[1-2]"})
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: no such partition' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o700)
    with pytest.raises(LaunchError, match="sbatch refused: sbatch: error: no such partition"):
        submit("#!/bin/sh\n")
