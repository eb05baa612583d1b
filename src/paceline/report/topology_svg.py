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

from paceline.report.templates import render
from paceline.report.topology import (
    device_words,
    label_bandwidth,
    label_class,
    label_words,
    labels_in_use,
    link_text,
    num_nvlinks,
    title,
)
from paceline.spec import Device, Link, Node, Peripheral

Point = tuple[float, float]

WIDTH = 920
_MARGIN, _LINE_HEIGHT = 28, 24
_DEVICE_WIDTH, _DEVICE_HEIGHT = 66, 42
_NIC_WIDTH, _NIC_HEIGHT = 74, 38
_LEAST_WIDTH, _MOST_WIDTH = 1.2, 8.0
_NIC_STROKE, _RING_STROKE, _GROUP_STROKE = 1.5, 16.0, 14.0
_FULL_TURN = 2 * math.pi
_MOST_LABELLED = 4
"""Devices up to which each link carries its label; with more, labels would cover each other."""
_MOST_NVLINKS = 18
"""NVLinks of one GPU, up to NVLink 5 (NVIDIA Blackwell architecture); a GPU that seems to have more is on a switch."""
_MOST_WAYS = 4
"""Most links that are drawn from a card; one that is as near to more devices, or only on their NUMA node, stands on
their side."""
_NEAREST_FIRST = ("PIX", "PXB", "PHB", "NODE")
"""Ways from a card that give it a side; SYS leads from everywhere to everywhere."""


@dataclass(frozen=True)
class _Stroke:
    kind: str
    """Its classes in the style sheet."""
    start: Point
    end: Point
    width: float


@dataclass(frozen=True)
class _Box:
    kind: str
    centre: Point
    width: int
    height: int
    name: str
    detail: str


def draw_topology(node: Node, ring: Sequence[int]) -> str:
    """The SVG document of one node, the `ring` of device indices in it highlighted."""
    devices = _in_order(node, ring)
    nics = [part for part in node.peripherals if part.kind == "nic"] if devices else []
    places = _places(node, devices, nics)
    heading = _heading(node, ring)
    top = _MARGIN + _LINE_HEIGHT * len(heading) + 12
    # Wide drawings for many devices: the page grows with them, and never below what a title needs.
    width = max(WIDTH, 2 * math.ceil(max((abs(x) for x, _ in places.values()), default=0.0) + _NIC_WIDTH))
    highest = min((y for _, y in places.values()), default=0.0) - _DEVICE_HEIGHT / 2
    lowest = max((y for _, y in places.values()), default=0.0) + _DEVICE_HEIGHT / 2
    centre = (width / 2, top - highest)
    places = {label: (x + centre[0], y + centre[1]) for label, (x, y) in places.items()}
    legend_top = centre[1] + lowest + 44 if devices else top
    links = _drawn_links(node, devices, nics)
    legend = list(_legend(node, links, ring))
    switch = switch_link(node)
    return render(
        "topology.svg",
        width=width,
        height=math.ceil(legend_top + _LINE_HEIGHT * len(legend) + _MARGIN / 2),
        heading=heading,
        groups=[[places[device.label] for device in group] for group in _numa_groups(devices)],
        ring=[places[f"GPU{index}"] for index in ring if f"GPU{index}" in places],
        lines=_lines(links, switch, devices, places, centre),
        switch=None if switch is None else _Box("switch", centre, 128, 58, "NVSwitch", link_text(switch)),
        tags=list(_tags(node, devices, places, centre)),
        boxes=[
            *(_nic(part, places[part.label]) for part in nics),
            *(_device(device, places[device.label], is_chosen=device.index in ring) for device in devices),
        ],
        legend=[
            (_sample(kind, legend_top + _LINE_HEIGHT * place, stroke), name, words)
            for place, (kind, stroke, name, words) in enumerate(legend)
        ],
    )


# --- Where things stand ---


def _in_order(node: Node, ring: Sequence[int]) -> list[Device]:
    """GPUs: first those of the ring in its order, then the others by NUMA node and id."""
    gpus = [device for device in node.devices if device.kind == "cuda"]
    by_index = {device.index: device for device in gpus}
    others = [device for device in gpus if device.index not in ring]
    others.sort(key=lambda device: (-1 if device.numa_node is None else device.numa_node, device.index))
    return [by_index[index] for index in ring if index in by_index] + others


def _numa_groups(devices: Sequence[Device]) -> list[list[Device]]:
    """Neighbours on the circle that share a NUMA node; none where all devices do, or where it is not known."""
    if len({device.numa_node for device in devices} - {None}) < 2:
        return []
    return [list(group) for _, group in groupby(devices, key=lambda device: device.numa_node)]


def _places(node: Node, devices: Sequence[Device], nics: Sequence[Peripheral]) -> dict[str, Point]:
    """Where each box has its middle, seen from the middle of the circle."""
    radius = _radius(len(devices), _DEVICE_WIDTH + 22)
    places = {device.label: _on_circle(radius, _angle(i, len(devices))) for i, device in enumerate(devices)}
    return places | _nic_places(node, nics, places, max(radius + 105, _radius(len(nics), _NIC_WIDTH + 14)))


def _radius(num_boxes: int, space: float) -> float:
    """Radius of a circle on which boxes stand without touching; two stand side by side."""
    return max(150.0, space / (2 * math.sin(math.pi / num_boxes))) if num_boxes > 1 else 0.0


def _angle(place: int, num_places: int) -> float:
    """In radians, clockwise from the top; two are level."""
    return 2 * math.pi * place / num_places - (math.pi / 2 if num_places == 2 else math.pi / num_places)


def _on_circle(radius: float, angle: float) -> Point:
    return radius * math.sin(angle), -radius * math.cos(angle)


def _nic_places(node: Node, nics: Sequence[Peripheral], places: Mapping[str, Point], radius: float) -> dict[str, Point]:
    """Each card outside of the devices next to it, moved along the rim until none covers another."""
    wanted: dict[str, float] = {}
    homeless = []
    for nic in nics:
        near = [places[link.ends[0]] for link in _nearest(node, nic) if link.ends[0] in places]
        x, y = (sum(place[axis] for place in near) for axis in (0, 1))
        if math.hypot(x, y) > 1:
            wanted[nic.label] = math.atan2(x, -y) % _FULL_TURN
        else:
            homeless.append(nic.label)
    for label in homeless:  # where there is most room
        angles = sorted(wanted.values()) or [0.0]
        ends = [*angles[1:], angles[0] + _FULL_TURN]
        room, angle = max((end - angle, angle) for angle, end in zip(angles, ends, strict=True))
        wanted[label] = (angle + room / 2) % _FULL_TURN
    labels = sorted(wanted, key=lambda label: wanted[label])
    gap = 2 * math.asin((_NIC_WIDTH + 12) / (2 * radius))
    angles = spread_out([wanted[label] for label in labels], gap)
    return {label: _on_circle(radius, angle) for label, angle in zip(labels, angles, strict=True)}


def spread_out(angles: Sequence[float], gap: float) -> list[float]:
    """Ascending angles in [0, 2 pi), each moved as little as it takes to keep `gap` to the next around the circle.

    Neighbours that are too near are spread about the mean of where they want to be (isotonic regression of the angles
    less the gaps before them). Where there is no room for all gaps they stand at equal distances.
    """
    from scipy.optimize import isotonic_regression  # takes its time to load

    count, full = len(angles), _FULL_TURN
    if count < 2:
        return list(angles)
    # The circle is opened at its widest empty part.
    first = max(range(count), key=lambda i: (angles[i] - angles[i - 1]) % full if i else angles[0] - angles[-1] + full)
    opened = [angles[(first + i) % count] + (full if first + i >= count else 0.0) for i in range(count)]
    means = isotonic_regression([angle - place * gap for place, angle in enumerate(opened)]).x
    spread = [float(mean) + place * gap for place, mean in enumerate(means)]
    if spread[-1] - spread[0] > full - gap:
        spread = [opened[0] + place * full / count for place in range(count)]
    # Back to the order of the angles that came in.
    return [spread[(place - first) % count] for place in range(count)]


def _nearest(node: Node, nic: Peripheral) -> list[Link]:
    """The shortest ways from a card to devices, if they are shorter than across the sockets."""
    links = [link for link in node.links if link.ends[1] == nic.label and link.label in _NEAREST_FIRST]
    best = min((_NEAREST_FIRST.index(link.label) for link in links), default=0)
    return [link for link in links if _NEAREST_FIRST.index(link.label) == best]


# --- What is drawn ---


def switch_link(node: Node) -> Link | None:
    """Any link of a node whose GPUs hang on an NVSwitch: all pairs alike, and more NVLinks than a GPU has."""
    gpus = [device.label for device in node.devices if device.kind == "cuda"]
    links = [node.link(one, other) for one, other in combinations(gpus, 2)]
    first = links[0] if links else None
    if first is None or any(link is None or link.label != first.label for link in links):
        return None
    return first if num_nvlinks(first.label) * (len(gpus) - 1) > _MOST_NVLINKS else None


def _heading(node: Node, ring: Sequence[int]) -> list[str]:
    lines = [title(node)]
    if len(ring) > 2:
        lines.append(f"Best ring: {' - '.join(map(str, [*ring, ring[0]]))}")
    elif ring:
        lines.append(f"Best choice: {device_words(sorted(ring))}")
    if not any(device.kind == "cuda" for device in node.devices):
        lines.append(f"No GPU: {node.num_cores} CPU cores, and no links to draw.")
    return lines


def _drawn_links(node: Node, devices: Sequence[Device], nics: Sequence[Peripheral]) -> list[Link]:
    """Links of cards, then those between devices, the slowest first so that none hides a faster one."""
    labels = {device.label for device in devices}
    ways = [near for nic in nics if len(near := _nearest(node, nic)) <= _MOST_WAYS]
    of_nics = [link for near in ways for link in near if link.label != "NODE" and link.ends[0] in labels]
    between = [link for link in node.links if set(link.ends) <= labels]
    between.sort(key=lambda link: (link.label != "SYS", link.bytes_per_s or 0.0))
    return of_nics + between


def _lines(
    links: Sequence[Link], switch: Link | None, devices: Sequence[Device], places: Mapping[str, Point], centre: Point
) -> list[_Stroke]:
    """The links; with a switch those between devices lead to it."""
    found = []
    for link in links:
        kind, start, end = label_class(link.label), places[link.ends[0]], places[link.ends[1]]
        if not link.ends[1].startswith("GPU"):
            found.append(_Stroke(f"link to-nic {kind}", start, end, _NIC_STROKE))
        elif switch is None:
            found.append(_Stroke(f"link {kind}", start, end, _stroke(link, links)))
    if switch is not None:
        width = _stroke(switch, links)
        found += [_Stroke("link NVLink", places[device.label], centre, width) for device in devices]
    return found


def _stroke(link: Link, links: Sequence[Link]) -> float:
    """Width in pixels: the root of the bandwidth over that of the fastest, since they differ by powers of ten."""
    fastest = max(one.bytes_per_s or 0.0 for one in links)
    if link.label == "SYS" or not link.bytes_per_s or not fastest:
        return _LEAST_WIDTH
    return max(_LEAST_WIDTH, _MOST_WIDTH * math.sqrt(link.bytes_per_s / fastest))


def _tags(
    node: Node, devices: Sequence[Device], places: Mapping[str, Point], centre: Point
) -> Iterator[tuple[float, float, float, str]]:
    """(x, y, half of its width, text) of the label on each link where there is room; beside the middle, where the links
    of four devices cross."""
    if len(devices) > _MOST_LABELLED or switch_link(node) is not None:
        return
    for one, other in combinations(devices, 2):
        link = node.link(one.label, other.label)
        if link is None:
            continue
        (x1, y1), (x2, y2) = places[one.label], places[other.label]
        is_diagonal = math.hypot((x1 + x2) / 2 - centre[0], (y1 + y2) / 2 - centre[1]) < 1 and len(devices) > 2
        share = 0.33 if is_diagonal else 0.5
        text, half = (
            (link_text(link), 4 + 3.6 * len(link_text(link)))
            if len(devices) == 2
            else (link.label, 4 + 4.2 * len(link.label))
        )
        yield x1 + (x2 - x1) * share, y1 + (y2 - y1) * share, half, text


def _device(device: Device, place: Point, *, is_chosen: bool) -> _Box:
    kind = f"device{' chosen' * is_chosen}{' busy' * bool(device.busy)}"
    detail = "busy" if device.busy else "" if device.numa_node is None else f"NUMA {device.numa_node}"
    return _Box(kind, place, _DEVICE_WIDTH, _DEVICE_HEIGHT, f"GPU {device.index}", detail)


def _nic(part: Peripheral, place: Point) -> _Box:
    return _Box("nic", place, _NIC_WIDTH, _NIC_HEIGHT, part.label, "" if part.name == part.label else part.name)


def _legend(node: Node, links: Sequence[Link], ring: Sequence[int]) -> Iterator[tuple[str, float, str, str]]:
    """(classes and width of a line, name, words) for each label that is drawn, for the ring and for NUMA nodes."""
    drawn = {link.label: link for link in links}
    between_gpus = {link.label for link in links if link.ends[1].startswith("GPU")}
    for label in labels_in_use(node):
        if label in drawn:
            width = _stroke(drawn[label], links) if label in between_gpus else _NIC_STROKE
            words = ", ".join(filter(None, [label_words(label), label_bandwidth(node, label)]))
            yield f"link sample {label_class(label)}", width, label, words
    if len(ring) > 1:
        yield "ring", _RING_STROKE, "ring", "the order in which the chosen GPUs pass data on"
    if _numa_groups(_in_order(node, ring)):
        yield "group sample", _GROUP_STROKE, "NUMA", "GPUs of one NUMA node, usually one socket"


def _sample(kind: str, y: float, width: float) -> _Stroke:
    return _Stroke(kind, (_MARGIN, y), (_MARGIN + 42, y), width)
