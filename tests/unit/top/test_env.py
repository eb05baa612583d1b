"""Who a worker is, from the variables of whoever started it: python, torchrun, srun, mpirun or Paceline."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import env
from paceline.env import WorkerFacts, worker_facts
from paceline.errors import JobError, LaunchError
from paceline.import_path import import_by_path

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.mark.parametrize(
    ("variables", "facts"),
    [
        ({}, WorkerFacts()),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            WorkerFacts(3, 4, 1, 2, "env://", "torchrun"),
        ),
        ({"RANK": "1", "WORLD_SIZE": "2"}, WorkerFacts(1, 2, 1, 2, "env://", "torchrun")),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"},
            WorkerFacts(1, 2, 1, 2, "tcp://10.0.0.1:1234", "mpirun"),
        ),
        (SLURM | {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, WorkerFacts(5, 8, 1, 4, "tcp://a:1", "srun")),
        (OMPI | {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, WorkerFacts(1, 2, 1, 2, "tcp://a:1", "mpirun")),
        # A login shell of a Slurm job is no worker.
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, WorkerFacts()),
    ],
)
def test_a_worker_knows_its_rank_whoever_started_it(variables: dict[str, str], facts: WorkerFacts) -> None:
    assert worker_facts(variables) == facts


@pytest.mark.parametrize(
    ("tasks_per_node", "node", "local_world_size"),
    [("4(x2)", "0", 4), ("4(x2)", "1", 4), ("2(x3),1", "3", 1), ("2(x3),1", "2", 2), ("3", "0", 3), ("1,2,3", "1", 2)],
)
def test_slurms_tasks_of_each_node_are_read(tasks_per_node: str, node: str, local_world_size: int) -> None:
    found = worker_facts(SLURM | {"SLURM_STEP_TASKS_PER_NODE": tasks_per_node, "SLURM_NODEID": node})
    assert found.local_world_size == local_world_size


def test_all_workers_of_a_step_derive_one_rendezvous_and_another_step_another() -> None:
    def where(**changes: str) -> str:
        return worker_facts(SLURM | changes).init_method

    assert where() == where(SLURM_PROCID="0", SLURM_LOCALID="0") != where(SLURM_STEP_ID="1")
    assert where().startswith("tcp://gpu03:")
    assert where(SLURM_STEP_NODELIST="a,b[1-2]").startswith("tcp://a:")
    assert where(SLURM_STEP_NUM_NODES="1", SLURM_STEP_TASKS_PER_NODE="8").startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, ["rank 2", "2 workers", "torchrun"]),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, ["rank -1"]),
        ({"RANK": "x", "WORLD_SIZE": "2"}, ["RANK", "'x'"]),
        ({"RANK": "0", "WORLD_SIZE": ""}, ["WORLD_SIZE", "''"]),
        (OMPI | {"OMPI_COMM_WORLD_SIZE": "4"}, ["MASTER_ADDR"]),
        (SLURM | {"SLURM_NODEID": "2"}, ["SLURM_STEP_TASKS_PER_NODE", "2"]),
    ],
)
def test_variables_that_contradict_each_other_are_named(variables: dict[str, str], words: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        worker_facts(variables)
    assert all(word in str(caught.value) for word in words), caught.value


@given(
    st.dictionaries(st.sampled_from([*SLURM, *OMPI, "RANK", "WORLD_SIZE", "PMI_RANK", "PMI_SIZE"]), st.text(max_size=6))
)
def test_any_environment_is_read_or_refused_in_a_sentence(variables: dict[str, str]) -> None:
    try:
        facts = worker_facts(variables)
    except LaunchError as problem:
        assert "\n" not in str(problem).replace(repr("\n"), "")
    else:
        assert 0 <= facts.rank < facts.world_size, asdict(facts)


def test_a_device_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("cpu", "cuda"):
        monkeypatch.setenv("PACELINE_DEVICE", kind)
        assert env.device_kind() == kind
    monkeypatch.setenv("PACELINE_DEVICE", "gpu")
    with pytest.raises(LaunchError, match="'gpu'"):
        env.device_kind()


# --- what an import path in a job names ---


def test_an_import_path_names_a_function_or_a_class() -> None:
    assert import_by_path("pathlib:Path", "model.name") is Path
    assert import_by_path("os:path.join", "model.name")("a", "b") == "a/b"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("pathlib", ["'pathlib'", "package.module:name"]),
        ("pathlib:", ["package.module:name"]),
        ("path-lib:Path", ["package.module:name"]),
        ("nosuchmodule:x", ["no module 'nosuchmodule'", "PYTHONPATH"]),
        ("os.nosuch:x", ["'os.nosuch'"]),
        ("pathlib:Pth", ["pathlib", "'Pth'"]),
        ("math:pi", ["float"]),
    ],
)
def test_an_import_path_that_leads_nowhere_is_named_with_its_key(path: str, words: list[str]) -> None:
    with pytest.raises(JobError) as caught:
        import_by_path(path, "model.name")
    assert all(word in str(caught.value) for word in ("model.name", *words)), caught.value


def test_a_bug_inside_the_users_module_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "with_a_bug.py").write_text("import nosuchlibrary\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nosuchlibrary"):
        import_by_path("with_a_bug:x", "model.name")


@pytest.mark.parametrize(("told", "cores"), [("0,2;1,3", {1, 3}), (";", set()), ("0", set()), ("", set())])
def test_a_worker_whose_cores_are_not_known_stays_on_none(
    told: str, cores: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.CPUS, told)
    assert env.cpus(1) == cores
