"""A program in a real container (Podman), on this node and on another one over SSH."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from paceline.launch.containers import image_digest, in_container
from paceline.launch.ssh import ssh_argv
from tests.kit.nodes.cluster import Cluster, Node
from tests.kit.nodes.sshd import ssh_between
from tests.old.hosts.stdio import VARIABLE, commands_on, orphan, talk, wait_until
from tests.old.hosts.why_not import why_not_ssh

TIMEOUT_S = 60.0
IMAGE = "podman://localhost/echo:1"
BUSYBOX = Path("/bin/busybox")

# In the image there is no Python, so the echo is one of the shell.
ECHO = (
    'printf \'{"hostname": "%s", "pid": %d, "cwd": "%s", "variable": "%s"}\\n\' '
    f'"$(hostname)" $$ "$(pwd)" "${VARIABLE}"; cat; exit 0'
)

# This is a machine without control groups that a container could have; its nodes have none either.
SETTINGS = """
[containers]
cgroups = "disabled"
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
"""

STORAGE = """
[storage]
driver = "vfs"
graphroot = "{folder}/images"
runroot = "/run/containers"
"""


def _why_not() -> str | None:
    if missing := [name for name in ("podman", "crun") if shutil.which(name) is None]:
        return f"containers need {', '.join(missing)}"
    if not BUSYBOX.exists() or subprocess.run([BUSYBOX, "true"], timeout=10).returncode != 0:
        return "an image to run is made of /bin/busybox (busybox-static)"
    return why_not_ssh()


pytestmark = [
    pytest.mark.hosts,
    pytest.mark.slow,
    pytest.mark.skipif(bool(_why_not()), reason=_why_not() or ""),
]


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("podman")
    (folder / "containers.conf").write_text(SETTINGS)
    (folder / "storage.conf").write_text(STORAGE.format(folder=folder))
    return {
        "CONTAINERS_CONF": str(folder / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
    }


@pytest.fixture(scope="module")
def cluster(environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    _write_image(folder / "image.tar")
    with Cluster(num_nodes=2, rate_bits_per_s=1e9) as cluster, ssh_between(cluster.nodes, folder):
        for node in cluster.nodes:
            _run(node, ["mount", "-t", "tmpfs", "tmpfs", "/sys/fs/cgroup"])
        _run(cluster.nodes[0], ["podman", "import", str(folder / "image.tar"), "localhost/echo:1"], environ)
        yield cluster


def test_bytes_pass_and_the_program_sees_its_folder(cluster: Cluster, environ: dict[str, str], tmp_path: Path) -> None:
    program = in_container(["env", f"{VARIABLE}=it's here", "sh", "-c", ECHO], IMAGE, cwd=tmp_path)
    place = talk(cluster.nodes[0], ("env", *_assignments(environ), *program), timeout_s=TIMEOUT_S)
    assert (place.hostname, place.cwd, place.variable) == ("node0", str(tmp_path), "it's here")


def test_on_another_node_over_ssh(cluster: Cluster, environ: dict[str, str], tmp_path: Path) -> None:
    program = in_container(["sh", "-c", ECHO], IMAGE, cwd=tmp_path)
    argv = ssh_argv("node1", program, cwd=tmp_path, environ=environ)
    assert talk(cluster.nodes[0], argv, timeout_s=TIMEOUT_S).hostname == "node1"


def test_nothing_is_left_when_the_client_is_killed(cluster: Cluster, environ: dict[str, str], tmp_path: Path) -> None:
    mark = tmp_path.name
    program = in_container(["sh", "-c", ECHO, mark], IMAGE, cwd=tmp_path)
    for node, argv in (
        (cluster.nodes[0], ("env", *_assignments(environ), *program)),
        (cluster.nodes[1], ssh_argv("node1", program, cwd=tmp_path, environ=environ)),
    ):
        orphan(cluster.nodes[0], argv, timeout_s=TIMEOUT_S)
        wait_until(
            lambda node=node: not any(mark in command for command in commands_on(node)),  # type: ignore[misc]
            timeout_s=TIMEOUT_S,
            what=f"the container on {node.hostname} has ended",
        )


def test_the_digest_is_the_same_on_all_nodes(cluster: Cluster, environ: dict[str, str]) -> None:
    digests = {image_digest(IMAGE, lambda argv, node=node: _run(node, argv, environ)) for node in cluster.nodes}  # type: ignore[misc]
    assert len(digests) == 1


def _assignments(environ: dict[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in environ.items()]


def _run(node: Node, argv: Sequence[str], environ: dict[str, str] | None = None) -> str:
    process = node.exec(argv, env=environ)
    assert process.wait(TIMEOUT_S) == 0, process.output
    return process.stdout


def _write_image(path: Path) -> None:
    """A root file system of busybox and the folders that a container needs."""
    with tarfile.open(path, "w") as image:
        for folder in ("bin", "dev", "etc", "proc", "sys", "tmp"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            image.addfile(entry)
        program = tarfile.TarInfo("bin/busybox")
        program.size, program.mode = BUSYBOX.stat().st_size, 0o755
        image.addfile(program, io.BytesIO(BUSYBOX.read_bytes()))
        for name in ("sh", "cat", "env", "hostname", "printf"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            image.addfile(link)
