"""A node as one drawing: devices on a circle, links as wide as they are fast, network cards at the rim.

Devices stand in the order of the ring, so that it is the outline. Where every pair has as many NVLinks as only a switch
can give, the switch is drawn and not each pair. The drawing is one SVG file that needs nothing else and follows the
reader's preference for light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from paceline.report.page import render
from paceline.report.topology import device_words, label_class, legend, link_text, ring_words, title
from paceline.spec import Device, Link, Node
from paceline.spec.cluster import num_nvlinks

Point = tuple[float, float]

_LEAST_WIDTH, _MOST_WIDTH = 1.2, 8.0
_SPACE = 88
"""Pixels between the middles of neighbours."""
_MOST_LABELLED = 4
"""Devices up to which each link carries its label; with more, labels would cover each other."""
_MOST_NVLINKS = 18
"""NVLinks of one GPU, up to NVLink 5 (NVIDIA Blackwell architecture); a GPU that seems to have more is on a switch."""
_NEAR = ("PIX", "PXB", "PHB", "NODE")
"""Ways from a card that give it a side, the shortest first; SYS leads from everywhere to everywhere."""


@dataclass(frozen=True)
class _Stroke:
    kind: str
    """Its classes in the style sheet."""
    start: Point
    end: Point
    width: float
    text: str = ""
    """Stands on it, a third of the way."""


def draw_topology(node: Node, ring: Sequence[int]) -> str:
    """The SVG document of one node, the `ring` of device indices in it highlighted."""
    gpus = {device.index: device for device in node.devices if device.kind == "cuda"}
    devices = [gpus[index] for index in ring if index in gpus]
    devices += [device for index, device in gpus.items() if index not in ring]
    nics = node.nics if devices else {}
    heading = [title(node)]
    if ring:
        heading.append(f"Best ring: {ring_words(ring)}" if len(ring) > 2 else f"Best choice: {device_words(ring)}")
    if node.device_kind == "cpu":
        heading.append(f"No GPU: {node.num_cores} CPU cores, and no links to draw.")
    places = _places(node, devices, nics)
    reach_x, reach = (max((abs(place[axis]) for place in places.values()), default=0.0) for axis in (0, 1))
    width = max(920, 2 * math.ceil(reach_x + 60))
    centre = (width / 2, 24 * len(heading) + 80 + reach)
    places = {label: (x + centre[0], y + centre[1]) for label, (x, y) in places.items()}
    switch = _switch_link(node, devices)
    lines = _card_strokes(node, nics, places) + _strokes(node, switch, devices, places, centre)
    kinds = {stroke.kind for stroke in lines}
    known = [(label, f"link {label_class(label)}", words) for label, words in legend(node)]
    return render(
        "topology.svg",
        width=width,
        heading=heading,
        centre=centre,
        places=places,
        devices=devices,
        nics=nics,
        switch=link_text(switch) if switch else "",
        ring=[index for index in ring if index in gpus],
        lines=lines,
        legend=[(label, kind, words) for label, kind, words in known if kind in kinds],
        legend_top=math.ceil(centre[1] + reach + 60) if devices else 24 * len(heading) + 40,
    )


def _places(node: Node, devices: Sequence[Device], nics: Iterable[str]) -> dict[str, Point]:
    """Where things stand, seen from the middle of the circle: devices from the top, two of them level; each card at the
    rim, near the devices next to it."""
    count, radius = len(devices), _radius(len(devices))
    first = -math.pi / 2 if count == 2 else -math.pi / max(1, count)
    places = {
        device.label: _on_circle(radius, first + 2 * math.pi * number / count) for number, device in enumerate(devices)
    }
    wanted = []
    for nic in nics:
        near = [places[link.ends[0]] for link in _nearest(node, nic) if link.ends[0] in places]
        x, y = (sum(place[axis] for place in near) for axis in (0, 1))
        wanted.append((math.atan2(x, -y) % (2 * math.pi), nic))
    rim, shift = max(radius + 105, _radius(len(wanted))), min(wanted, default=(0.0, ""))[0]
    # At equal distances in the order of where they should be, the first one there.
    return places | {
        label: _on_circle(rim, shift + 2 * math.pi * number / len(wanted))
        for number, (_, label) in enumerate(sorted(wanted))
    }


def _radius(num_boxes: int) -> float:
    """Radius of a circle on which boxes stand without touching; two stand side by side."""
    return max(150.0, _SPACE / (2 * math.sin(math.pi / num_boxes))) if num_boxes > 1 else 0.0


def _on_circle(radius: float, angle: float) -> Point:
    return radius * math.sin(angle), -radius * math.cos(angle)


def _nearest(node: Node, nic: str) -> list[Link]:
    """The shortest ways from a card to devices, if they are shorter than across the sockets."""
    links = [link for link in node.links if link.ends[1] == nic and link.label in _NEAR]
    best = min((_NEAR.index(link.label) for link in links), default=0)
    return [link for link in links if link.label == _NEAR[best]]


def _switch_link(node: Node, devices: Sequence[Device]) -> Link | None:
    """Any link of a node whose GPUs hang on an NVSwitch: all pairs alike, and more NVLinks than a GPU has."""
    links = [node.link(one.label, other.label) for one, other in combinations(devices, 2)]
    labels = {link.label if link else "" for link in links}
    is_switched = len(labels) == 1 and num_nvlinks(*labels) * (len(devices) - 1) > _MOST_NVLINKS
    return links[0] if is_switched else None


def _card_strokes(node: Node, nics: Iterable[str], places: Mapping[str, Point]) -> list[_Stroke]:
    ways = [link for nic in nics for link in _nearest(node, nic) if link.label != "NODE" and link.ends[0] in places]
    return [
        _Stroke(f"link {label_class(link.label)}", places[link.ends[0]], places[link.ends[1]], 1.5) for link in ways
    ]


def _strokes(
    node: Node, switch: Link | None, devices: Sequence[Device], places: Mapping[str, Point], centre: Point
) -> list[_Stroke]:
    """The links between devices, or to their switch; the slowest first so that none hides a faster one.

    The width is the root of the bandwidth over that of the fastest, since they differ by powers of ten.
    """
    if switch is not None:
        return [_Stroke("link NVLink", places[device.label], centre, _MOST_WIDTH) for device in devices]
    labels = {device.label for device in devices}
    links = [link for link in node.links if set(link.ends) <= labels]
    links.sort(key=lambda link: (link.label != "SYS", link.bytes_per_s or 0.0))
    fastest = max((link.bytes_per_s or 0.0 for link in links), default=0.0) or 1.0
    strokes = []
    for link in links:
        rate = 0.0 if link.label == "SYS" else link.bytes_per_s or 0.0
        width = max(_LEAST_WIDTH, _MOST_WIDTH * math.sqrt(rate / fastest))
        text = link_text(link) if len(devices) == 2 else link.label if len(devices) <= _MOST_LABELLED else ""
        start, end = (places[label] for label in link.ends)
        strokes.append(_Stroke(f"link {label_class(link.label)}", start, end, width, text))
    return strokes
