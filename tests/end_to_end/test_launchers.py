"""One script, every launcher: the README's training prints the same weights under `python`, torchrun, `paceline
launch` over SSH, Slurm's srun and, every night, mpirun, Ray, a Kubernetes Job and Apptainer. (`paceline launch` on one
machine is in the README's own test.)

Nodes are namespaces of this machine with real sshd, Slurm and Ray on them.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from paceline.spec import RunRecord
from tests.kit.commands import paceline, python, succeeded
from tests.kit.markdown import README, reader_environ, write_files
from tests.kit.nodes.cluster import Cluster, Node
from tests.kit.nodes.mpirun import mpirun_argv
from tests.kit.nodes.ray_cluster import RAY_VARIABLES, ray_on, why_not_ray
from tests.kit.nodes.slurm import slurm_on
from tests.kit.nodes.sshd import ssh_between
from tests.kit.packages import missing, need, need_nodes
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.timeout(1200), pytest.mark.budget(processor_s=40)]

TIMEOUT_S = 500.0
PROGRAM = [sys.executable, "-m", "paceline"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the README's files lie, on storage that all nodes see."""
    place = tmp_path_factory.mktemp("reader")
    write_files(README, place)
    return place


@pytest.fixture(scope="module")
def alone(folder: Path) -> str:
    """The weights of one process."""
    (weights,) = weights_in(succeeded(python("train.py", cwd=folder, OMP_NUM_THREADS="1")).stdout, world_size=1)
    return weights


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    need_nodes()
    with Cluster(num_nodes=2) as two:
        yield two


def weights_in(output: str, *, world_size: int) -> list[str]:
    """What the script has printed, if it ran on so many workers."""
    return re.findall(rf"^.*world size {world_size}: accuracy \S+ weights ([0-9a-f]+)$", output, re.MULTILINE)


def on_node(node: Node, command: Sequence[str], folder: Path, **extra: str) -> str:
    """What a command that must succeed prints on a node, where a reader stands in `folder`."""
    environ = reader_environ(folder) | {"GLOO_SOCKET_IFNAME": ""} | extra  # which interface, is for Paceline to find
    process = node.exec(command, env=environ, cwd=folder)
    assert process.wait(TIMEOUT_S) == 0, process.output
    return process.stdout


def test_torchrun(folder: Path, alone: str) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    output = succeeded(python(*torchrun, "train.py", cwd=folder)).stdout
    assert weights_in(output, world_size=2) == [alone]


def test_paceline_launch_over_ssh(cluster: Cluster, folder: Path, alone: str, tmp_path: Path) -> None:
    need("ssh", "sshd")
    with ssh_between(cluster.nodes, tmp_path):
        launch = [*PROGRAM, "launch", "--hosts", "node0:1,node1:1", "train.py"]
        assert weights_in(on_node(cluster.nodes[0], launch, folder), world_size=2) == [alone]
        check_nobody_is_left(cluster)


def test_srun_on_two_nodes(cluster: Cluster, folder: Path, alone: str, tmp_path: Path) -> None:
    need("slurmctld", "slurmd", "srun", "munged")
    with slurm_on(cluster.nodes, tmp_path, cpus_per_node=1):
        srun = ["srun", "--nodes=2", "--ntasks-per-node=1", sys.executable, "train.py"]
        assert weights_in(on_node(cluster.nodes[0], srun, folder), world_size=2) == [alone]


@pytest.mark.nightly
def test_a_job_script_for_slurm_trains_on_its_nodes(cluster: Cluster, folder: Path, alone: str, tmp_path: Path) -> None:
    need("slurmctld", "slurmd", "srun", "munged")
    (tmp_path / "slurm").mkdir()
    with slurm_on(cluster.nodes, tmp_path / "slurm", cpus_per_node=1):
        run_dir = tmp_path / "a run"  # a space, as in a user's folder
        submit = [*PROGRAM, "submit", "slurm", "--cpu", "--nodes", "2", "--out", str(run_dir), "launch", "train.py"]
        on_node(cluster.nodes[0], submit, folder)

        def logs() -> str:
            return "".join(path.read_text(errors="replace") for path in run_dir.glob("slurm-*.log"))

        wait_until(lambda: bool(weights_in(logs(), world_size=2)), f"weights in {run_dir}", TIMEOUT_S)
        assert weights_in(logs(), world_size=2) == [alone]


@pytest.mark.nightly
@pytest.mark.budget(processor_s=120)
def test_slurm_jobs_go_on_in_the_queue_with_the_same_bits(cluster: Cluster, folder: Path, tmp_path: Path) -> None:
    """One that meets its time limit, and one that loses a node."""
    need("slurmctld", "slurmd", "srun", "munged")
    job = ["train", "digits-lenet", "--set", "checkpoint.every_steps=2", "--max-steps", "80"]
    succeeded(paceline(*job, "-n", "1", "--out", str(tmp_path / "alone"), cwd=folder))
    alone = RunRecord.load(tmp_path / "alone" / "record.json")
    (tmp_path / "slurm").mkdir()
    first, last = cluster.nodes
    lost = ["scontrol", "update", f"nodename={last.hostname}", "reason=test"]
    with slurm_on(cluster.nodes, tmp_path / "slurm", cpus_per_node=1):
        for event in ("limit", "loss"):
            run_dir = tmp_path / event
            submit = [*PROGRAM, "submit", "slurm", "--cpu", "--nodes", "2", "--out", str(run_dir), *job]
            number = re.findall(r"Job (\d+):", on_node(first, submit, folder))[0]
            wait_until(lambda place=run_dir: any(place.glob("**/step-*/manifest.json")), "a checkpoint", TIMEOUT_S)  # type: ignore[misc]
            if event == "limit":  # what Slurm sends two minutes before it
                on_node(first, ["scancel", "--signal=USR2", "--batch", number], folder)
            else:
                on_node(first, [*lost, "state=down"], folder)
                first.exec([*lost, "state=resume"]).wait(TIMEOUT_S)  # unless it has come back by itself

            # Slurm waits two minutes before it starts a job again, and refuses one that starts while it is being ended.
            reason = ["squeue", "--noheader", "--jobs", number, "--format", "%r"]
            wait_until(lambda ask=reason: "BeginTime" in on_node(first, ask, folder), "a job to start again", TIMEOUT_S)  # type: ignore[misc]
            on_node(first, ["scontrol", "update", f"jobid={number}", "starttime=now+5"], folder)
            wait_until(lambda place=run_dir: (place / "record.json").exists(), f"the record in {run_dir}", TIMEOUT_S)  # type: ignore[misc]
            runs = [*reason, "--states", "running,completing"]
            wait_until(lambda ask=runs: not on_node(first, ask, folder), "the end of the job", TIMEOUT_S)  # type: ignore[misc]
            record = RunRecord.load(run_dir / "record.json")
            assert (record.steps, record.weights_sha256) == (80, alone.weights_sha256)
            assert any("resumed at step" in note for note in record.notes), record.notes


@pytest.mark.nightly
def test_mpirun_on_two_nodes(cluster: Cluster, folder: Path, alone: str, tmp_path: Path) -> None:
    need("ssh", "sshd", "mpirun")
    with ssh_between(cluster.nodes, tmp_path):
        passed_on = ["PATH", "PACELINE_DEVICE", "GLOO_SOCKET_IFNAME", "MASTER_ADDR=node0"]
        mpirun = mpirun_argv("node0:2,node1:1", passed_on, [str(folder / "train.py")])
        assert weights_in(on_node(cluster.nodes[0], mpirun, folder), world_size=3) == [alone]


@pytest.mark.nightly
@pytest.mark.budget(processor_s=240)
def test_a_ray_cluster_of_two_nodes(cluster: Cluster, folder: Path, alone: str) -> None:
    if reason := why_not_ray():
        missing(reason)
    with ray_on(cluster.nodes):
        launch = [*PROGRAM, "launch", "--launcher", "ray", "--hosts", "node0:1,node1:1", "train.py"]
        output = on_node(cluster.nodes[0], launch, folder, **RAY_VARIABLES)
    assert weights_in(output, world_size=2) == [alone]


@pytest.mark.nightly
@pytest.mark.budget(processor_s=120)
def test_the_pods_of_a_kubernetes_job(folder: Path, alone: str) -> None:
    """Nodes play the pods, with the names that a Job and its Service give them; no Kubernetes is asked."""
    need_nodes()
    yaml = pytest.importorskip("yaml")
    submit = ("submit", "kubernetes", "--image", "none", "--claim", "runs", "--mount", str(folder), "--name", "job")
    size = ("--out", str(folder / "pods"), "--nodes", "2", "-n", "2", "--cpu", str(folder / "train.py"))
    manifests = yaml.safe_load_all(succeeded(paceline(*submit, *size, cwd=folder)).stdout)
    (job,) = (manifest for manifest in manifests if manifest["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    become = 'echo "job-$1" > /proc/sys/kernel/hostname; echo "$2" >> /etc/hosts; shift 2; exec "$@"'
    with Cluster(num_nodes=2) as cluster:
        names = [
            f"{node.address} job-{number}.job.default.svc.cluster.local job-{number}.job job-{number}"
            for number, node in enumerate(cluster.nodes)
        ]
        pods = [
            node.exec(
                ["sh", "-c", become, "sh", str(number), "\n".join(names), *container["command"]],
                env=reader_environ(folder) | {"GLOO_SOCKET_IFNAME": ""} | variables,
                cwd=folder,
            )
            for number, node in enumerate(cluster.nodes)
        ]
        for pod in pods:
            assert pod.wait(TIMEOUT_S) == 0, pod.output
    assert weights_in("".join(pod.output for pod in pods), world_size=4) == [alone]


@pytest.mark.nightly
@pytest.mark.timeout(2400)
@pytest.mark.budget(processor_s=600)
def test_an_apptainer_image(folder: Path, alone: str) -> None:
    need("mmdebstrap")
    from tests.kit.nodes import apptainer

    if reason := apptainer.why_not_apptainer():
        missing(reason)
    place = Path(tempfile.mkdtemp(prefix="paceline-apptainer-"))
    try:
        program = apptainer.install(place)
        image = apptainer.build_image(place)
        launch = ("launch", "-n", "2", "--container", str(image), "train.py")
        path = f"{program.parent}:{os.environ['PATH']}"
        output = succeeded(paceline(*launch, cwd=folder, timeout_s=TIMEOUT_S, PATH=path)).stdout
        assert weights_in(output, world_size=2) == [alone]
    finally:
        shutil.rmtree(place, ignore_errors=True)


@pytest.mark.nightly
def test_mpirun_that_does_not_say_where_to_meet_is_told_in_one_sentence(
    cluster: Cluster, folder: Path, tmp_path: Path
) -> None:
    need("ssh", "sshd", "mpirun")
    with ssh_between(cluster.nodes, tmp_path):
        mpirun = mpirun_argv("node0:1,node1:1", ["PATH", "PACELINE_DEVICE"], [str(folder / "train.py")])
        process = cluster.nodes[0].exec(mpirun, env=reader_environ(folder), cwd=folder)
        assert process.wait(TIMEOUT_S) != 0
        assert "MASTER_ADDR" in process.output and weights_in(process.output, world_size=2) == []
        check_nobody_is_left(cluster)


def check_nobody_is_left(cluster: Cluster) -> None:
    for node in cluster.nodes:
        wait_until(
            lambda node=node: not any("-m paceline" in line or "train.py" in line for line in node.commands()),  # type: ignore[misc]
            f"all processes of the run on {node.hostname} have ended",
        )
