"""Who a worker is, from the variables of whoever started it."""

from __future__ import annotations

import pytest

from paceline.env import WorkerFacts, device_kind, worker_facts
from paceline.errors import LaunchError


def test_alone() -> None:
    assert worker_facts({}) == WorkerFacts()


def test_torchrun() -> None:
    facts = worker_facts({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert facts == WorkerFacts(3, 4, 1, 2, "env://", "torchrun")


def test_paceline() -> None:
    facts = worker_facts({"RANK": "0", "WORLD_SIZE": "2", "PACELINE_RENDEZVOUS": "file:///tmp/x/store"})
    assert (facts.init_method, facts.started_by) == ("file:///tmp/x/store", "paceline")


def test_srun() -> None:
    env = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "5",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "gpu[03-04]",
    }
    facts = worker_facts(env)
    assert (facts.rank, facts.world_size, facts.local_rank, facts.local_world_size) == (5, 8, 1, 4)
    assert facts.init_method.startswith("tcp://gpu03:")
    # Every task of the step derives the same address; another step derives another port.
    assert worker_facts(env | {"SLURM_PROCID": "0"}).init_method == facts.init_method
    assert worker_facts(env | {"SLURM_STEP_ID": "1"}).init_method != facts.init_method


def test_srun_with_uneven_nodes() -> None:
    env = {
        "SLURM_PROCID": "6",
        "SLURM_STEP_NUM_TASKS": "7",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "3",
        "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    }
    assert worker_facts(env | {"MASTER_ADDR": "gpu1"}).local_world_size == 1
    assert worker_facts(env | {"MASTER_ADDR": "gpu1", "SLURM_NODEID": "2"}).local_world_size == 2
    with pytest.raises(LaunchError, match="says nothing of node 4"):
        worker_facts(env | {"SLURM_NODEID": "4"})


def test_an_sbatch_script_itself_is_alone() -> None:
    assert worker_facts({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}).world_size == 1


def test_open_mpi_and_mpich() -> None:
    ompi = worker_facts(
        {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        }
    )
    assert (ompi.rank, ompi.world_size, ompi.started_by) == (1, 2, "mpirun")
    assert ompi.init_method.startswith("tcp://127.0.0.1:")
    mpich = worker_facts({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert mpich.init_method == "tcp://10.0.0.1:1234"


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of 2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK = 'x'"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is missing"),
        (
            {
                "OMPI_COMM_WORLD_RANK": "0",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            "set MASTER_ADDR",
        ),
    ],
)
def test_contradictions_are_one_sentence(env: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        worker_facts(env)


def test_a_device_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DEVICE", "cpu")
    assert device_kind() == "cpu"
    monkeypatch.setenv("PACELINE_DEVICE", "gpu")
    with pytest.raises(LaunchError, match="'gpu' should be 'cpu' or 'cuda'"):
        device_kind()
