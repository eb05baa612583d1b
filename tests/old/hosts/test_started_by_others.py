"""Training whose workers torchrun, srun or a Kubernetes Job start: it reaches the weights of one process.

So does what mpirun starts, in test_launchers.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.launch.kubernetes import Pods, job_manifest
from paceline.spec import Job, Plan, RunRecord
from paceline.spec.plan import RunLimit
from paceline.workflows.run_folder import write_run
from tests.kit.nodes.cluster import INTERFACE, MASTER_PORT, Cluster, Node, NodeProcess
from tests.kit.nodes.mpirun import mpirun_argv, why_not_mpirun
from tests.kit.nodes.slurm import slurm_on, why_not_slurm
from tests.kit.nodes.sshd import ssh_between
from tests.kit.nodes.stdio import commands_on

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(1200)]

MAX_STEPS = 4
TIMEOUT_S = 500.0
JOB = Job.from_mapping(
    {"global_batch_size": 64, "virtual_shards": 8, "model": "lenet", "data": "digits", "parity": "bitwise"}
)
VARIABLES = {
    "GLOO_SOCKET_IFNAME": INTERFACE,
    "TP_SOCKET_IFNAME": INTERFACE,
    "OMP_NUM_THREADS": "1",
    "PACELINE_DEVICE": "cpu",
}

needs_mpirun = pytest.mark.skipif(bool(why_not_mpirun()), reason=why_not_mpirun() or "")
needs_slurm = pytest.mark.skipif(bool(why_not_slurm()), reason=why_not_slurm() or "")


def command_alone(run_dir: Path) -> list[str]:
    return [sys.executable, *write_run(JOB, Plan(), run_dir, RunLimit(MAX_STEPS), quiet=True)]


def test_torchrun(cluster: Cluster, weights_alone: str, tmp_path: Path) -> None:
    """One worker a node; two are in the pods below, which torchrun starts too."""
    program = _program(tmp_path / "run", world_size=2)
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=node0:{MASTER_PORT}", "--rdzv-id=test"]
    agents = [_start(node, _torchrun(rendezvous, program)) for node in cluster.nodes]
    for agent in agents:
        assert agent.wait(TIMEOUT_S) == 0, agent.output
    _check(tmp_path / "run", weights_alone)


def test_pods_of_a_kubernetes_job(weights_alone: str, tmp_path: Path) -> None:
    """Nodes play the pods, with the names that a Job and its Service give them; no Kubernetes is asked."""
    yaml = pytest.importorskip("yaml", reason="manifests need PyYAML (paceline[kubernetes])")
    program = _program(tmp_path / "run", world_size=4)
    pods = Pods(
        image="none",
        num_pods=2,
        workers_per_pod=2,
        use_gpus=False,
        claim="runs",
        mount=tmp_path,
        run_dir=tmp_path / "run",
    )
    _, job = yaml.safe_load_all(job_manifest("job", program, pods))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    variables["GLOO_SOCKET_IFNAME"] = INTERFACE
    variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    become = 'echo "job-$1" > /proc/sys/kernel/hostname; echo "$2" >> /etc/hosts; shift 2; exec "$@"'
    with Cluster(num_nodes=2, rate_bits_per_s=1e9) as cluster:
        names = [
            f"{node.address} job-{number}.job.default.svc.cluster.local job-{number}.job job-{number}"
            for number, node in enumerate(cluster.nodes)
        ]
        agents = [
            node.exec(["sh", "-c", become, "sh", str(number), "\n".join(names), *container["command"]], env=variables)
            for number, node in enumerate(cluster.nodes)
        ]
        for agent in agents:
            assert agent.wait(TIMEOUT_S) == 0, agent.output
    _check(tmp_path / "run", weights_alone)


@needs_slurm
def test_srun_with_uneven_nodes(cluster: Cluster, weights_alone: str, tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    program = _program(tmp_path / "run", world_size=3)
    with slurm_on(cluster.nodes, tmp_path / "slurm", cpus_per_node=2):
        srun = ["srun", "--nodes=2", "--ntasks=3", sys.executable, *program]
        step = _start(cluster.nodes[0], srun)
        assert step.wait(TIMEOUT_S) == 0, step.output
    _check(tmp_path / "run", weights_alone)


@needs_mpirun
def test_mpirun_that_does_not_say_where_to_meet(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "ssh").mkdir()
    program = _program(tmp_path / "run", world_size=2)
    with ssh_between(cluster.nodes, tmp_path / "ssh"):
        job = _start(cluster.nodes[0], mpirun_argv("node0:1,node1:1", VARIABLES, program))
        assert job.wait(TIMEOUT_S) != 0
    assert "LaunchError: mpirun started 2 workers on several nodes" in job.output
    assert "mpirun -x MASTER_ADDR=NODE" in job.output
    assert not any("paceline.train" in command for node in cluster.nodes for command in commands_on(node))


def _torchrun(rendezvous: Sequence[str], program: Sequence[str]) -> list[str]:
    size = ["--nnodes=2", "--nproc-per-node=1"]
    return [sys.executable, "-m", "torch.distributed.run", *size, *rendezvous, *program]


def _program(run_dir: Path, *, world_size: int) -> list[str]:
    plan = Plan(world_size=world_size, timeout_s=60, algorithm="tree_exact")
    return write_run(JOB, plan, run_dir, RunLimit(MAX_STEPS), quiet=True)


def _start(node: Node, argv: Sequence[str]) -> NodeProcess:
    return node.exec(argv, env={**VARIABLES, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


def _check(run_dir: Path, weights_alone: str) -> None:
    record = RunRecord.load(run_dir / "record.json")
    assert record.weights_sha256 == weights_alone
