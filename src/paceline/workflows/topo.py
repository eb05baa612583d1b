"""`paceline.topo`: the links inside of a node, and which of its devices to use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import ClusterError, file_problems
from paceline.hardware import detect, read_topology
from paceline.plan.pick import pick as pick_devices
from paceline.spec import Cluster, Node
from paceline.spec.cluster import DeviceChoice
from paceline.words import number_of
from paceline.workflows.arguments import checked


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
    node: str | None = None,
    pair: str | None = None,
    pick: int | None = None,
    svg: Path | str | None = None,
    keep_busy: bool = False,
) -> Topology:
    """How the GPUs of a node are joined, and the best of them.

    Example: `paceline.topo().node.devices`.

    Args:
        source: a file, or its text, from nvidia-smi topo -m, or cluster.json; None:
            this node. A single line is a path.
        node: the name of the node, in a cluster with several; None: the first.
        pair: two GPUs such as "0,1", or a GPU and another device such as "GPU0,NIC1"; says how they
            are connected.
        pick: choose this many GPUs, so that the slowest link of a ring through them is as fast
            as possible; None: all.
        svg: write a drawing of the node to this file.
        keep_busy: choose among all GPUs, also those in use.

    Raises:
        ClusterError: a source that cannot be read, or a node, pair or number of GPUs that is not there.
        PacelineError: the drawing cannot be written.
    """
    from paceline.report.topology import pair_sentence  # loads rich

    cluster = detect() if source is None else source if isinstance(source, Cluster) else read_topology(source)
    machine = choose_node(cluster, node)
    gpus = [device for device in machine.devices if device.kind == "cuda"]
    left_out = [device for device in gpus if device.busy and not keep_busy]
    notes = [
        f"{device.label} is left out of every choice: {device.busy}; keep_busy = True takes it all the same."
        for device in left_out
    ]
    machine = replace(machine, notes=(*machine.notes, *notes))
    free = sorted(device.index for device in gpus if device not in left_out)
    if pick is not None and not 1 <= pick <= len(free):
        listed = ", ".join(map(str, free)) or "none"
        there = f"it has {number_of(len(free), 'free GPU' if left_out else 'GPU')} ({listed})"
        busy = f" and {len(left_out)} busy, which keep_busy = True takes too" if left_out else ""
        raise ClusterError(f"pick = {pick} is not possible on {machine.hostname or 'this node'}: {there}{busy}.")
    sentence = None if pair is None else pair_sentence(machine, *ends_of(machine, pair))
    choice = pick_devices(machine, pick or len(free), free) if free else None
    if svg is not None:
        from paceline.report.topology_svg import draw_topology

        with file_problems(f"The drawing cannot be written to '{svg}'"):
            drawing = draw_topology(machine, choice.ring.devices if choice else ())
            Path(svg).write_text(drawing, encoding="utf-8", newline="\n")
    return Topology(machine, choice, sentence)


def choose_node(cluster: Cluster, hostname: str | None) -> Node:
    """The node of that name, or the first. Raises `ClusterError` where there is none."""
    if not cluster.nodes:
        raise ClusterError("This cluster has no nodes; write one with paceline probe.")
    if hostname is None:
        first, *others = cluster.nodes
        if not others:
            return first
        names = ", ".join(node.hostname for node in others)
        return replace(first, notes=(*first.notes, f"This is the first node; node = NAME shows another: {names}."))
    named = [node for node in cluster.nodes if node.hostname == hostname]
    if not named:
        names = ", ".join(node.hostname for node in cluster.nodes)
        raise ClusterError(f"node = {hostname!r} is not in this cluster; its nodes are {names}.")
    return named[0]


def ends_of(node: Node, pair: str) -> tuple[str, str]:
    """ "0,1" as ("GPU0", "GPU1"); a label or a name of a part, such as NIC1 or mlx5_0, is possible too.

    Raises:
        ClusterError: not two, twice the same, or one that the node does not have.
    """
    known = {device.label: device.label for device in node.devices if device.kind == "cuda"}
    known |= {part.label: part.label for part in node.peripherals}
    by_name = {part.name: part.label for part in node.peripherals} | known
    by_name |= {label.removeprefix("GPU"): label for label in known if label.startswith("GPU")}
    by_name |= {name.lower(): label for name, label in by_name.items()}
    words = [word.strip() for word in pair.split(",")]
    found = [by_name.get(word, by_name.get(word.lower())) for word in words]
    if len(words) != 2 or found[0] == found[1] is not None:
        raise ClusterError(
            f"pair = {pair!r} should be two different GPUs such as 0,1, or a GPU and a NIC such as 0,NIC1."
        )
    one, other = found
    if one is None or other is None:
        missing = words[0] if one is None else words[1]
        there = f"its parts are {', '.join(known)}" if known else "it has no GPU"
        raise ClusterError(f"pair = {pair!r}: {node.hostname or 'this node'} has no {missing}; {there}.")
    return one, other
