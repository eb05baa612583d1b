"""A Slurm cluster on the nodes of a cluster: a controller on the first, a daemon on each.

    with slurm_on(cluster.nodes, folder, cpus_per_node=4):
        cluster.nodes[0].exec(["srun", "--nodes=2", "hostname"])

Debian's Slurm 22.05. Its settings lie over /etc/slurm of the nodes and its state in `folder`; nothing else of this
machine's disk changes. Slurm believes in as many cores as it is told.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.kit.nodes.cluster import Node
from tests.kit.waiting import wait_until

_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_TIMEOUT_S = 120.0

_SETTINGS = """
ClusterName=paceline
SlurmctldHost={controller}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
SlurmdParameters=config_overrides
KillWait=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

# The cgroup plugin wants a hierarchy to look at even where nothing uses it. All daemons stay in the process group of
# this shell, and end with it: a node may be part of another Slurm cluster afterwards.
_START = """
set -e
mount --bind "$1/etc" /etc/slurm
mount -t tmpfs tmpfs /sys/fs/cgroup
mkdir -p -m 755 /run/munge
rm -f /run/munge/*
munged --foreground --key-file="$1/munge.key" --socket=/run/munge/munge.socket.2 --pid-file=/run/munge/munged.pid \
    --log-file="$1/munged-$2.log" --seed-file="/run/munge/seed" &
while ! test -S /run/munge/munge.socket.2; do sleep 0.1; done
"""


@contextmanager
def slurm_on(nodes: Sequence[Node], folder: Path, *, cpus_per_node: int) -> Iterator[None]:
    """Let all nodes be one Slurm cluster until the end; settings, state and logs lie in `folder`, which must exist."""
    for name in ("etc", "state"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    lines = "\n".join(
        f"NodeName={node.hostname} NodeAddr={node.address} CPUs={cpus_per_node} State=UNKNOWN" for node in nodes
    )
    settings = _SETTINGS.format(controller=nodes[0].hostname, folder=folder, nodes=lines)
    (folder / "etc" / "slurm.conf").write_text(settings)
    (folder / "etc" / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    environ = {"PATH": f"{_PATH}:{os.environ.get('PATH', '')}"}
    with ExitStack() as daemons:
        started = []
        for number, node in enumerate(nodes):
            start = _START + ("slurmctld -D &\n" if number == 0 else "") + 'exec slurmd -D -N "$2"\n'
            started.append(node.exec(["sh", "-c", start, "sh", str(folder), node.hostname], env=environ))
            daemons.callback(started[-1].kill)

        def are_idle() -> bool:
            assert all(process.is_running for process in started), "".join(process.output for process in started)
            sinfo = nodes[0].exec(["sinfo", "--noheader", "--Node", "--format=%N %t"])
            sinfo.wait(_TIMEOUT_S)
            return [line.split()[1] for line in sinfo.stdout.splitlines()] == ["idle"] * len(nodes)

        wait_until(are_idle, "all Slurm nodes are idle", _TIMEOUT_S)
        yield
