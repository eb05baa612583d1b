"""A node as one drawing: devices on a circle, links as wide as they are fast, network cards at the rim.

Devices stand in the order of the ring, so that it is the outline. Where every pair has as many NVLinks as only a switch
can give, the switch is drawn and not each pair. The drawing is one SVG file that needs nothing else and follows the
reader's preference for light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

from paceline.report.page import render
from paceline.report.topology import (
    device_words,
    label_bandwidth,
    label_class,
    label_words,
    labels_in_use,
    link_text,
    num_nvlinks,
    ring_words,
    title,
)
from paceline.spec import Device, Link, Node, Peripheral

Point = tuple[float, float]

_LEAST_WIDTH, _MOST_WIDTH = 1.2, 8.0
_SPACE = 88
"""Pixels between the middles of neighbours."""
_MOST_LABELLED = 4
"""Devices up to which each link carries its label; with more, labels would cover each other."""
_MOST_NVLINKS = 18
"""NVLinks of one GPU, up to NVLink 5 (NVIDIA Blackwell architecture); a GPU that seems to have more is on a switch."""
_MOST_WAYS = 4
"""Most links that are drawn from a card; one that is as near to more devices stands on their side."""
_NEAREST_FIRST = ("PIX", "PXB", "PHB", "NODE")
"""Ways from a card that give it a side; SYS leads from everywhere to everywhere."""


@dataclass(frozen=True)
class _Stroke:
    kind: str
    """Its classes in the style sheet."""
    start: Point
    end: Point
    width: float
    text: str = ""
    """Stands on it, a third of the way."""


@dataclass(frozen=True)
class _Box:
    kind: str
    centre: Point
    name: str
    detail: str


def draw_topology(node: Node, ring: Sequence[int]) -> str:
    """The SVG document of one node, the `ring` of device indices in it highlighted."""
    devices = _in_order(node, ring)
    nics = [part for part in node.peripherals if part.kind == "nic"] if devices else []
    places = _places(node, devices, nics)
    reach_x, reach = (max((abs(place[axis]) for place in places.values()), default=0.0) for axis in (0, 1))
    width = max(920, 2 * math.ceil(reach_x + 60))
    heading = [title(node)]
    if ring:
        heading.append(f"Best ring: {ring_words(ring)}" if len(ring) > 2 else f"Best choice: {device_words(ring)}")
    if node.device_kind == "cpu":
        heading.append(f"No GPU: {node.num_cores} CPU cores, and no links to draw.")
    centre = (width / 2, 24 * len(heading) + 80 + reach)
    places = {label: (x + centre[0], y + centre[1]) for label, (x, y) in places.items()}
    numa = [list(group) for _, group in groupby(devices, key=lambda device: device.numa_node)]
    numa = numa if len({device.numa_node for device in devices} - {None}) > 1 else []
    links = _drawn_links(node, devices, nics)
    drawn = {link.label for link in links}
    legend = [
        (label, f"link {label_class(label)}", f"{label_words(label)}, {label_bandwidth(node, label)}".strip(", "))
        for label in labels_in_use(node)
        if label in drawn
    ]
    if len(ring) > 1:
        legend.append(("ring", "ring", "the order in which the chosen GPUs pass data on"))
    if numa:
        legend.append(("NUMA", "group", "GPUs of one NUMA node, usually one socket"))
    switch = _switch_link(node)
    return render(
        "topology.svg",
        width=width,
        heading=heading,
        groups=[[places[device.label] for device in group] for group in numa],
        ring=[places[f"GPU{index}"] for index in ring if f"GPU{index}" in places],
        lines=list(_strokes(links, switch, devices, places, centre)),
        boxes=[
            *([] if switch is None else [_Box("switch", centre, "NVSwitch", link_text(switch))]),
            *(_Box("nic", places[nic.label], nic.label, "" if nic.name == nic.label else nic.name) for nic in nics),
            *(
                _Box(
                    f"device{' chosen' * (device.index in ring)}{' busy' * bool(device.busy)}",
                    places[device.label],
                    f"GPU {device.index}",
                    "busy" if device.busy else "" if device.numa_node is None else f"NUMA {device.numa_node}",
                )
                for device in devices
            ),
        ],
        legend=legend,
        legend_top=math.ceil(centre[1] + reach + 60) if devices else 24 * len(heading) + 40,
    )


# --- Where things stand, seen from the middle of the circle ---


def _in_order(node: Node, ring: Sequence[int]) -> list[Device]:
    """GPUs: first those of the ring in its order, then the others by NUMA node and id."""
    gpus = {device.index: device for device in node.devices if device.kind == "cuda"}
    others = [device for index, device in gpus.items() if index not in ring]
    others.sort(key=lambda device: (-1 if device.numa_node is None else device.numa_node, device.index))
    return [gpus[index] for index in ring if index in gpus] + others


def _places(node: Node, devices: Sequence[Device], nics: Sequence[Peripheral]) -> dict[str, Point]:
    """Devices on a circle from the top, two of them level; each card at the rim, near the devices next to it."""
    count = len(devices)
    radius = _radius(count, _SPACE)
    first = -math.pi / 2 if count == 2 else -math.pi / max(1, count)
    places = {
        device.label: _on_circle(radius, first + 2 * math.pi * number / count) for number, device in enumerate(devices)
    }
    wanted = []
    for nic in nics:
        near = [places[link.ends[0]] for link in _nearest(node, nic) if link.ends[0] in places]
        x, y = (sum(place[axis] for place in near) for axis in (0, 1))
        wanted.append((math.atan2(x, -y) % (2 * math.pi), nic.label))
    wanted.sort()
    # At equal distances in the order of where they should be, turned so that they come near to it.
    shifts = [angle - 2 * math.pi * number / len(nics) for number, (angle, _) in enumerate(wanted)]
    shift = math.atan2(sum(map(math.sin, shifts)), sum(map(math.cos, shifts)))
    rim = max(radius + 105, _radius(len(nics), _SPACE))
    return places | {
        label: _on_circle(rim, shift + 2 * math.pi * number / len(nics)) for number, (_, label) in enumerate(wanted)
    }


def _radius(num_boxes: int, space: float) -> float:
    """Radius of a circle on which boxes stand without touching; two stand side by side."""
    return max(150.0, space / (2 * math.sin(math.pi / num_boxes))) if num_boxes > 1 else 0.0


def _on_circle(radius: float, angle: float) -> Point:
    return radius * math.sin(angle), -radius * math.cos(angle)


# --- What is drawn ---


def _nearest(node: Node, nic: Peripheral) -> list[Link]:
    """The shortest ways from a card to devices, if they are shorter than across the sockets."""
    links = [link for link in node.links if link.ends[1] == nic.label and link.label in _NEAREST_FIRST]
    best = min((_NEAREST_FIRST.index(link.label) for link in links), default=0)
    return [link for link in links if _NEAREST_FIRST.index(link.label) == best]


def _switch_link(node: Node) -> Link | None:
    """Any link of a node whose GPUs hang on an NVSwitch: all pairs alike, and more NVLinks than a GPU has."""
    gpus = [device.label for device in node.devices if device.kind == "cuda"]
    links = [node.link(one, other) for one, other in combinations(gpus, 2)]
    first = links[0] if links else None
    if first is None or any(link is None or link.label != first.label for link in links):
        return None
    return first if num_nvlinks(first.label) * (len(gpus) - 1) > _MOST_NVLINKS else None


def _drawn_links(node: Node, devices: Sequence[Device], nics: Sequence[Peripheral]) -> list[Link]:
    """Links of cards, then those between devices, the slowest first so that none hides a faster one."""
    labels = {device.label for device in devices}
    ways = [near for nic in nics if len(near := _nearest(node, nic)) <= _MOST_WAYS]
    of_nics = [link for near in ways for link in near if link.label != "NODE" and link.ends[0] in labels]
    between = [link for link in node.links if set(link.ends) <= labels]
    return of_nics + sorted(between, key=lambda link: (link.label != "SYS", link.bytes_per_s or 0.0))


def _strokes(
    links: Sequence[Link], switch: Link | None, devices: Sequence[Device], places: Mapping[str, Point], centre: Point
) -> Iterator[_Stroke]:
    """The links, labelled where there is room; with a switch those between devices lead to it.

    The width is the root of the bandwidth over that of the fastest, since they differ by powers of ten.
    """
    fastest = max((link.bytes_per_s or 0.0 for link in links), default=0.0) or 1.0
    for link in links:
        kind, start, end = label_class(link.label), places[link.ends[0]], places[link.ends[1]]
        rate = 0.0 if link.label == "SYS" else link.bytes_per_s or 0.0
        width = max(_LEAST_WIDTH, _MOST_WIDTH * math.sqrt(rate / fastest))
        if not link.ends[1].startswith("GPU"):
            yield _Stroke(f"link to-nic {kind}", start, end, 1.5)
        elif switch is None:
            text = link_text(link) if len(devices) == 2 else link.label
            yield _Stroke(f"link {kind}", start, end, width, text if len(devices) <= _MOST_LABELLED else "")
    if switch is not None:
        for device in devices:
            yield _Stroke("link NVLink", places[device.label], centre, _MOST_WIDTH)
