"""What only several nodes together can get wrong: different versions, clocks, folders, and doors that are shut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from paceline.hardware.checks.facts import NodeFacts
from paceline.hardware.checks.finding import Finding, error, ok, size_text, warning, words
from paceline.hardware.checks.reachability import ReachTest

MAX_SKEW_S = 1.0
"""Time stamps of logs, heartbeats and files of different nodes stay comparable below it."""


def check_nodes(nodes: Mapping[str, NodeFacts], reaches: Sequence[ReachTest], marker: str) -> list[Finding]:
    """Compare the nodes.

    Args:
        nodes: what each has found, by what --hosts calls it.
        reaches: one for every ordered pair that was tried.
        marker: what this node wrote into the run folder for the others to read.
    """
    return [
        *check_versions({host: facts.system.versions for host, facts in nodes.items()}),
        *check_gpu_models({host: [gpu.name for gpu in facts.gpus.gpus] for host, facts in nodes.items()}),
        *check_names({host: facts.hostname for host, facts in nodes.items()}),
        *check_mtu(nodes),
        *check_reaches(reaches),
        *check_clocks(reaches),
        *check_shared_folder({host: facts.storage.marker for host, facts in nodes.items()}, marker, nodes),
    ]


def check_versions(versions: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Workers of different versions speak different protocols, or compute different numbers."""
    findings: list[Finding] = []
    for part in ("paceline", "python", "torch", "CUDA", "NCCL"):
        by_host = {host: named.get(part, "none") for host, named in versions.items()}
        if part == "python":  # its patch releases are alike
            by_host = {host: ".".join(version.split(".")[:2]) for host, version in by_host.items()}
        if len(set(by_host.values())) > 1:
            (usual, _), *_ = Counter(by_host.values()).most_common()
            others = [f"{version} on {host}" for host, version in by_host.items() if version != usual]
            findings += error(
                "same versions",
                f"{part} is {usual} on {next(h for h, v in by_host.items() if v == usual)}, but {words(others)}.",
                "Use one environment on all nodes: a shared folder, a container, or pip install from one list.",
            )
    return findings or ok("same versions", f"All {len(versions)} nodes have the same versions.")


def check_gpu_models(models: Mapping[str, Sequence[str]]) -> list[Finding]:
    check = "same GPUs"
    kinds = {
        host: words([f"{n} x {name}" for name, n in Counter(names).items()]) or "no GPU"
        for host, names in models.items()
    }
    if len(set(kinds.values())) > 1:
        return warning(
            check,
            f"The nodes are not alike: {words([f'{host} has {kind}' for host, kind in kinds.items()])}; the slowest "
            "GPU sets the pace.",
            "Leave the odd nodes out of --hosts.",
        )
    return ok(check, f"All {len(models)} nodes have {next(iter(kinds.values()), 'no GPU')}.")


def check_names(hostnames: Mapping[str, str]) -> list[Finding]:
    """Workers that see the same host name take each other for neighbours."""
    check = "host names"
    twice = [name for name, count in Counter(hostnames.values()).items() if count > 1]
    if twice:
        hosts = [host for host, name in hostnames.items() if name == twice[0]]
        return error(
            check,
            f"{words(hosts)} all call themselves {twice[0]}.",
            "Give each a name of its own (hostnamectl set-hostname), or name each node once in --hosts.",
        )
    return ok(check, "Every node has a name of its own.")


def check_mtu(nodes: Mapping[str, NodeFacts]) -> list[Finding]:
    """Packets larger than the smallest MTU on the way vanish where path discovery is blocked: connections open, and
    hang with the first large message."""
    check = "MTU"
    mtus: dict[str, int] = {}
    for host, facts in nodes.items():
        for name in facts.network.routes.values():
            interface = facts.network.interface(name)
            if interface is not None and name != "lo":
                mtus[f"{interface.mtu} on {name} of {host}"] = interface.mtu
    if len(set(mtus.values())) > 1:
        return warning(
            check,
            f"The largest packets differ between nodes: {words(list(mtus))}.",
            f"Set one size on all of them and on the switch: sudo ip link set INTERFACE mtu {min(mtus.values())}",
        )
    return ok(check, "All nodes send packets of the same size.")


def check_reaches(reaches: Sequence[ReachTest]) -> list[Finding]:
    check = "firewall"
    findings: list[Finding] = []
    for reach in reaches:
        if reach.problem:
            findings += error(
                check,
                f"{reach.source} cannot connect to a port of {reach.target}: {reach.problem}.",
                f"Let the nodes talk to each other on all ports; on {reach.target}, for one subnet: sudo ufw allow "
                "from SUBNET, or sudo firewall-cmd --zone=trusted --add-source=SUBNET",
            )
    return findings or ok(check, f"All {len(reaches)} ways between nodes are open.")


def check_clocks(reaches: Sequence[ReachTest]) -> list[Finding]:
    check = "clocks"
    reached = [reach for reach in reaches if not reach.problem]
    if not reached:
        return []
    worst = max(reached, key=lambda reach: abs(reach.skew_s))
    if abs(worst.skew_s) - worst.rtt_s / 2 > MAX_SKEW_S:
        return warning(
            check,
            f"The clock of {worst.target} is {abs(worst.skew_s):.1f} s {'ahead of' if worst.skew_s > 0 else 'behind'} "
            f"that of {worst.source}.",
            "sudo timedatectl set-ntp true, on both",
        )
    return ok(check, f"The clocks of all nodes agree within {max(0.001, abs(worst.skew_s) + worst.rtt_s / 2):.1g} s.")


def check_shared_folder(read_by: Mapping[str, str], marker: str, nodes: Mapping[str, NodeFacts]) -> list[Finding]:
    check = "shared folder"
    blind = [host for host, text in read_by.items() if text != marker]
    folder = next((facts.storage.folder for facts in nodes.values()), "")
    if blind:
        return warning(
            check,
            f"{words(blind)} cannot see what this node writes into {folder}: checkpoints could not be resumed there.",
            "Run in a folder that all nodes share (NFS, Lustre), or name one with --folder.",
        )
    sizes = [facts.storage.free_bytes for facts in nodes.values() if facts.storage.free_bytes is not None]
    return ok(check, f"All nodes see {folder}, with {size_text(min(sizes, default=0))} free.")
