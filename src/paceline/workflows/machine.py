"""`paceline.topo` and `paceline.doctor`: what a node is made of, and what is wrong with it or between several."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING

from paceline.errors import ClusterError, JobError, LaunchError, file_problems
from paceline.hardware import detect, read_topology
from paceline.plan.placement import pick as pick_devices
from paceline.spec import Cluster, Node
from paceline.spec.cluster import DeviceChoice
from paceline.spec.codec import from_mapping
from paceline.workflows.arguments import checked

if TYPE_CHECKING:
    from paceline.hardware.doctor.checks import Finding
    from paceline.launch.run import Transport

ANSWER_LIMIT_S = 180.0
"""For a doctor on another node: looking up every peer of a cluster without a name server takes this long."""


@dataclass(frozen=True)
class Topology:
    """A node, the best ring over the wanted number of its GPUs (None without GPUs), and the sentence about a pair."""

    node: Node
    choice: DeviceChoice | None
    pair_sentence: str | None = None

    def _repr_html_(self) -> str:
        from paceline.report.topology_svg import draw_topology

        return draw_topology(self.node, self.choice.ring.devices if self.choice else ())


@checked
def topo(
    source: str | Path | Cluster | None = None,
    *,
    pair: str | None = None,
    pick: int | None = None,
    svg: Path | str | None = None,
) -> Topology:
    """How the GPUs of a node are joined, and the best of them.

    Example: `paceline.topo().node.devices`.

    Args:
        source: a file, or its text, from nvidia-smi topo -m, or cluster.json, of which the first node is shown; None:
            this node. A single line is a path.
        pair: two GPUs such as "0,1", or a GPU and another device such as "GPU0,NIC1"; says how they are connected.
        pick: choose this many GPUs, so that the slowest link of a ring through them is as fast as possible; None: all.
        svg: write a drawing of the node to this file.

    Raises:
        ClusterError: a source that cannot be read or has no node, or a pair or number of GPUs that is not there.
        PacelineError: the drawing cannot be written.
    """
    from paceline.report.topology import pair_sentence  # loads rich

    cluster = detect() if source is None else source if isinstance(source, Cluster) else read_topology(source)
    if not cluster.nodes:
        raise ClusterError("This cluster has no nodes; write one with paceline probe.")
    found, *others = cluster.nodes
    gpus = [device for device in found.devices if device.kind == "cuda"]
    left_out = [device for device in gpus if device.busy]
    notes = [f"{device.label} is left out of every choice: {device.busy}." for device in left_out]
    notes += [f"Not shown are the nodes {', '.join(node.hostname for node in others)}."] if others else []
    found = replace(found, notes=(*found.notes, *notes))
    free = sorted(device.index for device in gpus if device not in left_out)
    if pick is not None and not 1 <= pick <= len(free):
        name = found.hostname or "this node"
        raise ClusterError(f"pick = {pick} is not possible on {name}: it has {len(free)} GPUs that are not in use.")
    choice = pick_devices(found, pick or len(free), free) if free else None
    topology = Topology(found, choice, None if pair is None else pair_sentence(found, *_ends_of(found, pair)))
    if svg is not None:
        with file_problems(f"The drawing cannot be written to '{svg}'"):
            Path(svg).write_text(topology._repr_html_(), encoding="utf-8", newline="\n")
    return topology


def _ends_of(node: Node, pair: str) -> tuple[str, str]:
    """ "0,1" as ("GPU0", "GPU1"); a label or a name of a part, such as NIC1 or mlx5_0, is possible too."""
    gpus = [device for device in node.devices if device.kind == "cuda"]
    labels = {name: label for label, name in node.nics.items()} | {str(gpu.index): gpu.label for gpu in gpus}
    labels |= {label: label for label in labels.values()}
    ends = [labels.get(word.strip(), "") for word in pair.split(",")]
    if len(ends) != 2 or "" in ends or ends[0] == ends[1]:
        raise ClusterError(
            f"pair = {pair!r} should be two different parts of {node.hostname or 'this node'}, such as 0,1 or 0,NIC1; "
            f"it has {', '.join(sorted({*labels.values()})) or 'no GPU'}."
        )
    return ends[0], ends[1]


@checked
def doctor(*, hosts: str | None = None, folder: Path | str = Path("runs")) -> tuple[Finding, ...]:
    """Check this node, or all that are named and the network between them.

    Example: `[finding.what for finding in paceline.doctor() if finding.level == "error"]`.

    Args:
        hosts: nodes to look at over SSH, such as "a:8,b:8"; None: this node alone.
        folder: where runs are written.

    Returns:
        What was found, fine or not; each with its level, a sentence, and what to do.

    Raises:
        LaunchError: names of nodes that are invalid.
    """
    from paceline.hardware.doctor.node import examine
    from paceline.workflows.where import Where, over_ssh

    folder = Path(folder).absolute()
    if hosts is None:
        return examine(folder).findings
    return survey({address: over_ssh(address) for address in Where(hosts=hosts).named_hosts()}, folder)


def survey(nodes: Mapping[str, Transport], folder: Path) -> tuple[Finding, ...]:
    """What is wrong on nodes and between them; a doctor of its own looks at each."""
    from paceline.hardware.doctor.checks import Finding
    from paceline.hardware.doctor.cluster import ONE_ENVIRONMENT, NodeSurvey, check_nodes
    from paceline.hardware.doctor.node import NodeFacts

    marker, port = "", 20_000 + secrets.randbelow(12_000)

    def look_at(node: str) -> NodeSurvey | Finding:
        peers = [other for other in nodes if other != node]
        question = json.dumps({"folder": str(folder), "marker": marker, "peers": peers, "port": port})
        program = (nodes[node].python, "-m", "paceline.hardware.doctor.node", question)
        try:
            told = json.loads(nodes[node].output_of(program, ANSWER_LIMIT_S).splitlines()[-1])
            skew_s = told["time_s"] - time.time()
            facts, sees_folder = from_mapping(NodeFacts, told["facts"]), told["marker"] == Path(marker).name
            return NodeSurvey(facts, skew_s, sees_folder, told["unreachable"])
        except LaunchError as problem:
            return Finding("error", "node", str(problem), f"Try: ssh {node} hostname", node)
        except (JobError, LookupError, TypeError, ValueError):
            return Finding("error", "node", f"{node} has another version of Paceline.", ONE_ENVIRONMENT, node)

    with ExitStack() as at_end, ThreadPoolExecutor(len(nodes)) as pool:
        with suppress(OSError):  # where nothing can be written, the check of the folder says so
            there = next(level for level in (folder, *folder.parents) if level.is_dir())
            marker = at_end.enter_context(NamedTemporaryFile(dir=there, prefix=".paceline-doctor-")).name
            Path(marker).write_text(Path(marker).name)  # it is random
        found = dict(zip(nodes, pool.map(look_at, nodes), strict=True))
    findings = [one for one in found.values() if isinstance(one, Finding)]
    surveyed = {node: one for node, one in found.items() if isinstance(one, NodeSurvey)}
    for node, one in surveyed.items():
        findings += [replace(finding, node=node) for finding in one.facts.findings]
    return (*findings, *(check_nodes(surveyed, str(folder)) if len(surveyed) > 1 else ()))
