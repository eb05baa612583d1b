"""Slurm's command lines, node lists and job scripts."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import LaunchError
from paceline.launch.node_list import NodeSlots
from paceline.launch.slurm import allocation, batch_script, expand_nodelist, srun_argv, submit


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu1", "gpu1"),
        ("gpu[03-05,9]", "gpu03 gpu04 gpu05 gpu9"),
        ("gpu[1-2],login,cpu[098-101]x", "gpu1 gpu2 login cpu098x cpu099x cpu100x cpu101x"),
        ("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02"),
        ("a-b-[1,3].example", "a-b-1.example a-b-3.example"),
    ],
)
def test_node_lists(text: str, names: str) -> None:
    assert list(expand_nodelist(text)) == names.split()


@pytest.mark.parametrize(
    "text", ["", "gpu[", "gpu[1-", "gpu[2-1]", "gpu[]", "gpu[a]", "a,,b", ",a", "gpu[1]]", "[[1]]"]
)
def test_node_lists_that_are_none(text: str) -> None:
    with pytest.raises(LaunchError, match="cannot be read"):
        expand_nodelist(text)


@given(st.text("gpu[]0123-,x", max_size=20))
def test_any_node_list_is_names_or_one_sentence(text: str) -> None:
    try:
        names = expand_nodelist(text)
    except LaunchError:
        return
    assert all(name and not set(name) & set("[],") for name in names)


@given(st.lists(st.integers(0, 120), min_size=1, max_size=12, unique=True), st.integers(1, 3))
def test_a_compressed_list_expands_to_what_it_was(numbers: list[int], width: int) -> None:
    names = [f"n{str(number).zfill(width)}" for number in numbers]
    assert list(expand_nodelist("n[" + ",".join(name[1:] for name in names) + "]")) == names


def _scontrol(argv: Sequence[str], text: str) -> str:
    assert argv == ["scontrol", "show", "hostnames", "gpu[1-3]"]
    return "gpu1\ngpu2\ngpu3\n"


def _absent(argv: Sequence[str], text: str) -> str:
    raise LaunchError(f"There is no {argv[0]}.")


@pytest.mark.parametrize("run", [_scontrol, _absent])
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
def test_an_allocation(run: object, variables: dict[str, str], counts: list[int]) -> None:
    found = allocation({"SLURM_JOB_NODELIST": "gpu[1-3]"} | variables, run)  # type: ignore[arg-type]
    assert found == tuple(NodeSlots(f"gpu{number}", count) for number, count in enumerate(counts, 1))


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "This is not a Slurm allocation"),
        ({"SLURM_JOB_NODELIST": "gpu[1-3]", "SLURM_TASKS_PER_NODE": "2(x2)"}, "does not fit an allocation of 3 nodes"),
        ({"SLURM_JOB_NODELIST": "gpu[1-3]", "SLURM_TASKS_PER_NODE": "many"}, "cannot be read"),
    ],
)
def test_no_allocation(variables: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        allocation(variables, _scontrol)


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


def test_submitting() -> None:
    asked: list[tuple[Sequence[str], str]] = []

    def answers(answer: str) -> object:
        def sbatch(argv: Sequence[str], text: str) -> str:
            asked.append((argv, text))
            return answer

        return sbatch

    assert submit("#!/bin/sh\n", answers("17\n")) == "17"  # type: ignore[arg-type]
    assert submit("#!/bin/sh\n", answers("18;other\n")) == "18"  # type: ignore[arg-type]
    assert asked[0] == (["sbatch", "--parsable"], "#!/bin/sh\n")
    with pytest.raises(LaunchError, match="not a job id"):
        submit("", answers("Submitted"))  # type: ignore[arg-type]


def test_where_there_is_no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="There is no sbatch on this machine"):
        submit("#!/bin/sh\n")
    assert allocation({"SLURM_JOB_NODELIST": "a[1-2]"}) == (NodeSlots("a1", 1), NodeSlots("a2", 1))
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: no such partition' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o700)
    with pytest.raises(LaunchError, match="sbatch refused: sbatch: error: no such partition"):
        submit("#!/bin/sh\n")
