"""The checks of several nodes together: versions, clocks, folders and connections; a table as for one node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.hardware.checks.engine import Check, Finding, error, warning, words
from paceline.hardware.checks.reachability import ReachTest
from paceline.hardware.checks.survey import ONE_ENVIRONMENT, Survey
from paceline.words import size

MAX_SKEW_S = 1.0
"""Time stamps of logs, heartbeats and files of different nodes stay comparable below it."""


def check_nodes(found: Survey) -> list[Finding]:
    """All findings that compare nodes."""
    return [finding for check in CHECKS_BETWEEN_NODES for finding in check.findings(found)]


@dataclass(frozen=True)
class _Different:
    """A version that is not the same on all nodes; workers would speak different protocols, or compute differently."""

    package: str
    usual: str
    usual_node: str
    others: str


@dataclass(frozen=True)
class _Mtu:
    """The largest packets of all nodes. Larger ones than the smallest MTU on the way vanish where path discovery is
    blocked: connections open, and hang with the first large message."""

    smallest: int
    texts: str


def _versions(found: Survey) -> list[_Different]:
    different = []
    for package in ("paceline", "python", "torch", "CUDA", "NCCL"):
        by_node = {node: facts.system.versions.get(package, "none") for node, facts in found.nodes.items()}
        if package == "python":  # its patch releases are alike
            by_node = {node: ".".join(version.split(".")[:2]) for node, version in by_node.items()}
        ((usual, count),) = Counter(by_node.values()).most_common(1)
        if count < len(by_node):
            others = [f"{version} on {node}" for node, version in by_node.items() if version != usual]
            usual_node = next(node for node, version in by_node.items() if version == usual)
            different.append(_Different(package, usual, usual_node, words(others)))
    return different


def _gpu_models(found: Survey) -> dict[str, str]:
    """What GPUs each node has, in words."""
    names = {node: Counter(gpu.name for gpu in facts.gpus.gpus) for node, facts in found.nodes.items()}
    return {node: words([f"{n} x {name}" for name, n in counts.items()]) or "no GPU" for node, counts in names.items()}


def _shared_names(found: Survey) -> list[tuple[str, str]]:
    """The first host name that several nodes have, and those nodes; their workers take each other for neighbours."""
    by_name: dict[str, list[str]] = {}
    for node, facts in found.nodes.items():
        by_name.setdefault(facts.hostname, []).append(node)
    return [(name, words(nodes)) for name, nodes in by_name.items() if len(nodes) > 1][:1]


def _mtus(found: Survey) -> list[_Mtu]:
    mtus: dict[str, int] = {}
    for node, facts in found.nodes.items():
        for name in facts.network.routes.values():
            interface = facts.network.interface(name)
            if interface is not None and name != "lo":
                mtus[f"{interface.mtu} on {name} of {node}"] = interface.mtu
    return [_Mtu(min(mtus.values()), words(list(mtus)))] if len(set(mtus.values())) > 1 else []


def _worst_clock(found: Survey) -> list[ReachTest] | None:
    reached = [reach for reach in found.reaches if not reach.problem]
    return [max(reached, key=lambda reach: abs(reach.skew_s))] if reached else None


def _clocks_text(found: Survey) -> str:
    worst = (_worst_clock(found) or [ReachTest("", "")])[0]
    return f"The clocks of all nodes agree within {max(0.001, abs(worst.skew_s) + worst.rtt_s / 2):.1g} s."


def _folder(found: Survey) -> str:
    return next((facts.storage.folder for facts in found.nodes.values()), "")


def _without_folder(found: Survey) -> list[Mapping[str, str]]:
    """The nodes that cannot read what this one wrote, and where."""
    blind = [node for node, facts in found.nodes.items() if facts.storage.marker != found.marker]
    return [{"nodes": words(blind), "folder": _folder(found)}] if blind else []


def _least_room(found: Survey) -> str:
    sizes = [facts.storage.free_bytes for facts in found.nodes.values() if facts.storage.free_bytes is not None]
    return size(min(sizes, default=0))


CHECKS_BETWEEN_NODES: tuple[Check[Survey, Any], ...] = (
    Check[Survey, _Different](
        "same versions",
        _versions,
        lambda found: f"All {len(found.nodes)} nodes have the same versions.",
        error(bool, "{package} is {usual} on {usual_node}, but {others}.", ONE_ENVIRONMENT),
    ),
    Check[Survey, dict[str, str]](
        "same GPUs",
        lambda found: [_gpu_models(found)],
        lambda found: f"All {len(found.nodes)} nodes have {next(iter(_gpu_models(found).values()), 'no GPU')}.",
        warning(
            lambda models: len(set(models.values())) > 1,
            lambda models: (
                f"The nodes are not alike: {words([f'{node} has {gpus}' for node, gpus in models.items()])}; "
                "the slowest GPU sets the pace."
            ),
            "Leave the odd nodes out of --hosts.",
        ),
    ),
    Check[Survey, tuple[str, str]](
        "host names",
        _shared_names,
        "Every node has a name of its own.",
        error(
            bool,
            lambda name_nodes: "{1} all call themselves {0}.".format(*name_nodes),
            "Give each a name of its own (hostnamectl set-hostname), or name each node once in --hosts.",
        ),
    ),
    Check[Survey, _Mtu](
        "MTU",
        _mtus,
        "All nodes send packets of the same size.",
        warning(
            bool,
            "The largest packets differ between nodes: {texts}.",
            "Set one size on all of them and on the switch: sudo ip link set INTERFACE mtu {smallest}",
        ),
    ),
    Check[Survey, ReachTest](
        "firewall",
        lambda found: found.reaches,
        lambda found: f"All {len(found.reaches)} ways between nodes are open.",
        error(
            lambda reach: reach.problem,
            "{source} cannot connect to a port of {target}: {problem}.",
            "Let the nodes talk to each other on all ports; on {target}, for one subnet: sudo ufw allow from SUBNET, "
            "or sudo firewall-cmd --zone=trusted --add-source=SUBNET",
        ),
    ),
    Check[Survey, ReachTest](
        "clocks",
        _worst_clock,
        _clocks_text,
        warning(
            lambda worst: abs(worst.skew_s) - worst.rtt_s / 2 > MAX_SKEW_S,
            lambda worst: (
                f"The clock of {worst.target} is {abs(worst.skew_s):.1f} s "
                f"{'ahead of' if worst.skew_s > 0 else 'behind'} that of {worst.source}."
            ),
            "sudo timedatectl set-ntp true, on both",
        ),
    ),
    Check[Survey, Mapping[str, str]](
        "shared folder",
        _without_folder,
        lambda found: f"All nodes see {_folder(found)}, with {_least_room(found)} free.",
        warning(
            bool,
            lambda blind: (
                "{nodes} cannot see what this node writes into {folder}: checkpoints could not be resumed "
                "there.".format_map(blind)
            ),
            "Run in a folder that all nodes share (NFS, Lustre), or name one with --folder.",
        ),
    ),
)
