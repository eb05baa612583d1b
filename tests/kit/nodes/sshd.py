"""SSH between the nodes of a cluster, as between machines that know each other.

    with ssh_between(cluster.nodes, folder):
        cluster.nodes[0].exec(["ssh", "node1", "hostname"])

On every node an sshd answers on port 22 with a host key of its own. What clients need (identity, known hosts) lies over
/etc/ssh/ssh_config of the nodes, so plain `ssh node1` works there; nothing on this machine's disk but `folder` changes.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.kit.nodes.cluster import Node, NodeProcess

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")

_TIMEOUT_S = 60.0

_SERVER_CONFIG = """
Port 22
AddressFamily inet
HostKey {folder}/{hostname}
AuthorizedKeysFile {folder}/client.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
PrintMotd no
"""

_CLIENT_CONFIG = """
Host *
    IdentityFile {folder}/client
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile none
"""

_START = """
set -e
mkdir -p /run/sshd
mount --bind "$1/client_config" /etc/ssh/ssh_config
exec "$2" -D -e -f "$1/$3.config" 2>&1
"""


@contextmanager
def ssh_between(nodes: Sequence[Node], folder: Path) -> Iterator[None]:
    """Let every node reach every other until the end; keys and settings lie in `folder`, which must exist.

    A node booted anew needs `start_sshd` again.
    """
    _make_key(folder / "client")
    known_hosts = []
    for node in nodes:
        _make_key(folder / node.hostname)
        kind, key, *_ = (folder / f"{node.hostname}.pub").read_text().split()
        known_hosts.append(f"{node.hostname},{node.address} {kind} {key}\n")
        settings = _SERVER_CONFIG.format(folder=folder, hostname=node.hostname)
        (folder / f"{node.hostname}.config").write_text(settings)
    (folder / "known_hosts").write_text("".join(known_hosts))
    (folder / "client_config").write_text(_CLIENT_CONFIG.format(folder=folder))
    with ExitStack() as servers:
        for server in [start_sshd(node, folder) for node in nodes]:
            servers.callback(server.kill)
        yield


def start_sshd(node: Node, folder: Path) -> NodeProcess:
    """An sshd on `node` that accepts connections when this returns."""
    assert SSHD is not None
    server = node.exec(["sh", "-c", _START, "sh", str(folder), SSHD, node.hostname])
    server.expect("Server listening on", _TIMEOUT_S)
    return server


def _make_key(path: Path) -> None:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)]
    subprocess.run(command, check=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL)
