"""A program on another node through a real Slurm (Debian's): its bytes, its end, its allocation, its job script."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.launch.slurm import batch_script, srun_argv
from tests.kit.nodes.cluster import Cluster
from tests.kit.nodes.slurm import slurm_on
from tests.old.hosts.stdio import VARIABLE, commands_on, echo_program, orphan, talk, wait_until
from tests.old.hosts.why_not import why_not_slurm

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not_slurm()), reason=why_not_slurm() or ""),
]

TIMEOUT_S = 60.0

SHOW_ALLOCATION = """
import os, json
from paceline.launch.slurm import allocation
found = allocation(os.environ)
print(json.dumps([[node.address, node.num_workers] for node in found]))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    with Cluster(num_nodes=2, rate_bits_per_s=1e9) as cluster, slurm_on(cluster.nodes, folder, cpus_per_node=4):
        yield cluster


def test_bytes_pass_both_ways_and_the_end_of_input_ends_the_program(cluster: Cluster, tmp_path: Path) -> None:
    value = 'it\'s $HOME, "quoted"\nA=B'
    argv = srun_argv("node1", echo_program(), cwd=tmp_path, environ={VARIABLE: value})
    salloc = ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2", *argv)
    place = talk(cluster.nodes[0], salloc, timeout_s=TIMEOUT_S)
    assert (place.hostname, place.cwd, place.variable) == ("node1", str(tmp_path), value)


def test_nothing_is_left_of_a_client_that_was_killed(cluster: Cluster, tmp_path: Path) -> None:
    mark = tmp_path.name
    # The allocation lives on, as in a job script: it is srun alone that is killed.
    holder = cluster.nodes[0].exec(["salloc", "--nodes=2", "sh", "-c", "echo job $SLURM_JOB_ID; exec sleep 1000"])
    holder.expect("\n", TIMEOUT_S)
    job_id = holder.stdout.split()[1]
    argv = srun_argv("node1", echo_program(mark), cwd=tmp_path, environ={})
    place = orphan(cluster.nodes[0], ("env", f"SLURM_JOB_ID={job_id}", *argv), timeout_s=TIMEOUT_S)
    assert place.hostname == "node1"
    wait_until(
        lambda: not any(mark in command for command in commands_on(cluster.nodes[1])),
        timeout_s=TIMEOUT_S,
        what="the program has ended",
    )
    assert cluster.nodes[0].exec(["scancel", job_id]).wait(TIMEOUT_S) == 0
    holder.kill()


def test_a_job_script_is_accepted_and_finds_its_allocation(cluster: Cluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "100% a run"
    run_dir.mkdir()
    script = batch_script(
        [sys.executable, "-c", SHOW_ALLOCATION],
        name="a-run",
        run_dir=run_dir,
        cwd=tmp_path,
        num_nodes=2,
        workers_per_node=2,
        cpus_per_worker=1,
        use_gpus=False,
        time_limit_s=90.0,
        partition="all",
    )
    (tmp_path / "job.sh").write_text(script)
    submitting = f"from paceline.launch.slurm import submit; print(submit(open({str(tmp_path / 'job.sh')!r}).read()))"
    client = cluster.nodes[0].exec([sys.executable, "-c", submitting])
    assert client.wait(TIMEOUT_S) == 0, client.output
    log = run_dir / f"slurm-{client.stdout.strip()}.log"
    wait_until(lambda: log.exists() and log.read_text().endswith("\n"), timeout_s=TIMEOUT_S, what=shlex.quote(str(log)))
    assert json.loads(log.read_text()) == [["node0", 2], ["node1", 2]]


def test_a_refused_job_is_one_sentence(cluster: Cluster) -> None:
    submitting = "from paceline.launch.slurm import submit; submit('#!/bin/sh\\n#SBATCH --partition=none\\ntrue\\n')"
    client = cluster.nodes[0].exec([sys.executable, "-c", submitting])
    assert client.wait(TIMEOUT_S) == 1
    assert "LaunchError: sbatch refused: " in client.stderr
    assert "invalid partition" in client.stderr
