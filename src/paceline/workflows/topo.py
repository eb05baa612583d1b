"""`paceline.topo`: the links inside of a node, and which of its devices to use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import ClusterError, file_problems
from paceline.hardware import detect, read_topology
from paceline.plan.pick import pick as pick_devices
from paceline.spec import Cluster, Node
from paceline.spec.cluster import DeviceChoice
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
        source: a file, or its text, from nvidia-smi topo -m, or cluster.json; None: this node. A single line is a path.
        node: the name of the node, in a cluster with several; None: the first.
        pair: two GPUs such as "0,1", or a GPU and another device such as "GPU0,NIC1"; says how they are connected.
        pick: choose this many GPUs, so that the slowest link of a ring through them is as fast as possible; None: all.
        svg: write a drawing of the node to this file.
        keep_busy: choose among all GPUs, also those in use.

    Raises:
        ClusterError: a source that cannot be read, or a node, pair or number of GPUs that is not there.
        PacelineError: the drawing cannot be written.
    """
    from paceline.report.topology import pair_sentence  # loads rich

    cluster = detect() if source is None else source if isinstance(source, Cluster) else read_topology(source)
    shown = _chosen_node(cluster, node)
    gpus = [device for device in shown.devices if device.kind == "cuda"]
    left_out = [device for device in gpus if device.busy and not keep_busy]
    notes = [f"{device.label} is left out of every choice: {device.busy}." for device in left_out]
    shown = replace(shown, notes=(*shown.notes, *notes))
    free = sorted(device.index for device in gpus if device not in left_out)
    if pick is not None and not 1 <= pick <= len(free):
        busy = f" and {len(left_out)} in use, which keep_busy = True takes too" if left_out else ""
        raise ClusterError(
            f"pick = {pick} is not possible on {shown.hostname or 'this node'}: it has {len(free)} GPUs{busy}."
        )
    sentence = None if pair is None else pair_sentence(shown, *_ends_of(shown, pair))
    found = Topology(shown, pick_devices(shown, pick or len(free), free) if free else None, sentence)
    if svg is not None:
        with file_problems(f"The drawing cannot be written to '{svg}'"):
            Path(svg).write_text(found._repr_html_(), encoding="utf-8", newline="\n")
    return found


def _chosen_node(cluster: Cluster, hostname: str | None) -> Node:
    """The node of that name, or the first."""
    names = [node.hostname for node in cluster.nodes]
    if not names:
        raise ClusterError("This cluster has no nodes; write one with paceline probe.")
    if hostname is None:
        first = cluster.nodes[0]
        others = (f"This is the first of the nodes {', '.join(names)}.",) if len(names) > 1 else ()
        return replace(first, notes=(*first.notes, *others))
    if hostname not in names:
        raise ClusterError(f"node = {hostname!r} is not in this cluster; its nodes are {', '.join(names)}.")
    return cluster.nodes[names.index(hostname)]


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
