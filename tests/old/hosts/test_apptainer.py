"""Training in a real Apptainer image of a local tree, on one node and on two, and what happens to workers in it.

What it is compared with is a command without an image, forked from a process that has loaded torch.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.launch.containers import in_container
from tests.kit.nodes.cluster import Cluster
from tests.kit.nodes.sshd import ssh_between, why_not_ssh
from tests.kit.nodes.stdio import commands_on, wait_until
from tests.old.hosts.apptainer import ApptainerMissingError, build_image, install, why_not_apptainer
from tests.old.ranks import command_line

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(why_not_ssh() or why_not_apptainer()), reason=why_not_ssh() or why_not_apptainer() or ""),
]

TIMEOUT_S = 300.0
SCRIPTS = Path(__file__).parents[1] / "plain_scripts"
VARIABLES: dict[str, Any] = {"PACELINE_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
ON_ONE = ("-n", "2")
ON_TWO = ("--hosts", "node0:1,node1:1")
MARK = "paceline.launch.worker"


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder with Apptainer and an image, or no tests."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-apptainer-"))
    try:
        install(folder)
        build_image(folder)
        yield folder
    except ApptainerMissingError as reason:
        pytest.skip(str(reason))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    lay_over = f"mount -t overlay -o lowerdir={place / 'bin'}:/usr/local/bin none /usr/local/bin"
    with (
        Cluster(num_nodes=2, rate_bits_per_s=1e9) as cluster,
        ssh_between(cluster.nodes, tmp_path_factory.mktemp("keys")),
    ):
        for node in cluster.nodes:  # where a shell over SSH finds it
            laid = node.exec(["sh", "-c", lay_over])
            assert laid.wait(10.0) == 0, laid.output
        yield cluster


def paceline(cluster: Cluster, cwd: Path, *arguments: str) -> tuple[int, str, str]:
    """`paceline ARGUMENTS` on the first node: its exit code, and what it wrote; nobody of it is left."""
    command = cluster.nodes[0].exec([sys.executable, "-m", "paceline", *arguments], env=VARIABLES, cwd=cwd)
    ended = command.wait(TIMEOUT_S), command.stdout, command.stderr
    for node in cluster.nodes:
        wait_until(
            lambda node=node: not any(MARK in line or "paceline agent" in line for line in commands_on(node)),  # type: ignore[misc]
            timeout_s=30.0,
            what=f"all processes on {node.hostname} have ended",
        )
    return ended


def without_image(cwd: Path, *arguments: str) -> str:
    return command_line.succeeded(command_line.paceline(*arguments, cwd=cwd, **VARIABLES)).stdout


def weights_in(output: str) -> str:
    (line,) = [line for line in output.splitlines() if line.startswith("weights ")]
    return line


def test_a_script_of_another_library(cluster: Cluster, place: Path, tmp_path: Path) -> None:
    # How a kernel splits its sums among threads may change their last bits.
    launch, script = ("launch", "--threads", "1"), str(SCRIPTS / "with_fabric.py")
    image = ("--container", str(place / "image.sif"))
    exit_code, out, err = paceline(cluster, tmp_path, *launch, *ON_TWO, *image, script)
    assert exit_code == 0, out + err
    assert weights_in(out) == weights_in(without_image(tmp_path, *launch, *ON_ONE, script))


def test_a_job_on_two_nodes(cluster: Cluster, place: Path, tmp_path: Path) -> None:
    job = ("train", "digits-lenet", "--set", "parity=bitwise", "--max-steps", "3", "--quiet")
    image = ("--container", str(place / "image.sif"))
    exit_code, out, err = paceline(cluster, tmp_path, *job, "--out", "two", *ON_TWO, *image)
    assert exit_code == 0, out + err
    without_image(tmp_path, *job, "--out", "alone", "-n", "1")
    two, alone = (json.loads((tmp_path / name / "record.json").read_text()) for name in ("two", "alone"))
    assert two["weights_sha256"] == alone["weights_sha256"]


@pytest.mark.parametrize(
    ("where", "fault", "cause", "words"),
    [
        (ON_TWO, "raise", "exception", "ValueError: sample 17 is damaged"),
        (ON_ONE, "kill", "signal", "killed by SIGKILL"),
        (ON_ONE, "hang", "hung", "in read_from_a_disk_that_hangs"),
    ],
    ids=["raises on two nodes", "killed on one node", "hangs on one node"],
)
def test_what_happens_to_a_worker_is_named(
    cluster: Cluster, place: Path, tmp_path: Path, where: Sequence[str], fault: str, cause: str, words: str
) -> None:
    options = ("--container", str(place / "image.sif"), "--hang-timeout", "15", "--out", "run")
    exit_code, out, err = paceline(cluster, tmp_path, "launch", *where, *options, str(SCRIPTS / "ddp.py"), fault)
    assert exit_code != 0 and "weights" not in out, out + err
    report: dict[str, Any] = json.loads((tmp_path / "run" / "failure.json").read_text())
    hostname = "node1" if where == ON_TWO else "node0"
    assert (report["cause"], report["ranks"], report["hostname"]) == (cause, [1], hostname), report
    assert words in report["sentence"] + report["evidence"] and words in err, err


def test_gpus_are_passed_through(cluster: Cluster, place: Path, tmp_path: Path) -> None:
    look = ["python3", "-c", "import os, paceline; print(os.getcwd(), paceline.__file__)"]
    program = in_container(look, str(place / "image.sif"), cwd=tmp_path, gpus=True)
    assert "--nv" in program
    done = cluster.nodes[0].exec(program)
    assert done.wait(TIMEOUT_S) == 0, done.output
    assert done.stdout.startswith(f"{tmp_path} /opt/python/")
