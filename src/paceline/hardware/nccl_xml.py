"""The topology that NCCL found on a node: the file it writes where NCCL_TOPO_DUMP_FILE says.

    <system><cpu numaid><pci busid link_speed link_width><gpu dev sm><nvlink target count tclass/></gpu></pci> …
                                                         <nic><net name speed/></nic>

A <pci> inside another one is behind its bridge. NCCL leaves host bridges out, so that NODE and PHB cannot be told
apart: devices of one <cpu> that share no bridge are PHB, as in NCCL's own paths. RCCL writes <xgmi> for <nvlink>.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree

from paceline.errors import ClusterError
from paceline.hardware.cpu_list import parse_mask
from paceline.hardware.datasheet import PcieLanes
from paceline.hardware.pair_links import links_of_pairs, num_cores
from paceline.hardware.pci_path import PciPath, distance
from paceline.spec import Device, Node, Peripheral

SM_NAMES = {60: "P100", 70: "V100", 75: "Quadro RTX", 80: "A100", 86: "RTX A6000", 89: "L40", 90: "H100", 100: "B200"}
"""The best known GPU of each compute capability: the dump has no names, and a name decides the bandwidth of NVLink."""
SWITCH_CLASS = "0x0680"
"""PCI class "bridge": an NVSwitch, or a device that NCCL could not see in a virtual machine (NVIDIA/nccl#1182)."""


@dataclass(frozen=True)
class _Found:
    """A <gpu> or <net> and what stands around it."""

    element: ElementTree.Element
    path: PciPath
    lanes: PcieLanes | None = None
    """The PCIe connection of the device itself; None where NCCL could not read it."""
    cpus: tuple[int, ...] = ()

    @property
    def bus_id(self) -> str:
        return self.path.bridges[-1] if self.path.bridges else ""


def parse_nccl_xml(text: str) -> Node:
    """The GPUs, network cards and links of a node from an NCCL topology file.

    Raises:
        ClusterError: no XML, not NCCL's, without GPUs, or with links that contradict each other.
    """
    found = list(_found(_root(text)))
    gpus = sorted((one for one in found if one.element.tag == "gpu"), key=lambda gpu: _number(gpu.element, "dev"))
    nets = [one for one in found if one.element.tag == "net"]
    if not gpus:
        raise ClusterError("This NCCL topology has no <gpu>; dump it with NCCL_TOPO_DUMP_FILE from a run on all GPUs.")
    devices = [
        Device(
            "cuda",
            _number(gpu.element, "dev"),
            "",
            0,
            pci_bus_id=gpu.bus_id,
            numa_node=gpu.path.numa_node,
            cpus=gpu.cpus,
        )
        for gpu in gpus
    ]
    for one, other in itertools.pairwise(devices):
        if one.index == other.index:
            raise ClusterError(f"This NCCL topology has two <gpu dev={one.index}>; give the dump of one node alone.")
    nics = [_nic(number, net) for number, net in enumerate(nets)]
    labels = [device.label for device in devices] + [nic.label for nic in nics]
    ends = dict(zip(labels, [*gpus, *nets], strict=True))

    def label_of(one: str, other: str) -> str:
        return _fabric_label(ends[one], ends[other]) or distance(ends[one].path, ends[other].path)

    models = {device.label: SM_NAMES.get(_optional(ends[device.label].element, "sm"), "") for device in devices}
    lanes = {label: end.lanes for label, end in ends.items() if end.lanes}
    links = links_of_pairs(devices, nics, label_of, models, lanes)
    return Node("", num_cores(devices), 0, "", tuple(devices), tuple(nics), links)


def _root(text: str) -> ElementTree.Element:
    # Entities are how XML grows without bound or reads other files, and NCCL declares none.
    if re.search(r"<!\s*(DOCTYPE|ENTITY)", text, re.IGNORECASE):
        raise ClusterError("This XML declares a document type or entities, which no NCCL topology does.")
    try:
        root = ElementTree.fromstring(text.lstrip("\ufeff \t\r\n"))
    except (ElementTree.ParseError, ValueError) as problem:
        raise ClusterError(f"This is not valid XML: {problem}.") from None
    if root.tag != "system":
        raise ClusterError(f"The XML begins with <{root.tag[:40]}>; an NCCL topology begins with <system>.")
    return root


def _found(root: ElementTree.Element) -> Iterator[_Found]:
    """All GPUs and network ports, in the order of the file."""
    stack = [(child, _Found(child, PciPath())) for child in reversed(root)]
    num_cpus = 0
    while stack:
        element, around = stack.pop()
        path, lanes, cpus = around.path, around.lanes, around.cpus
        if element.tag == "cpu":
            numa_node = _number(element, "numaid") if element.get("numaid", "-1") != "-1" else None
            path, cpus, num_cpus = PciPath(f"cpu{num_cpus}", numa_node), _cores(element), num_cpus + 1
        elif element.tag == "pci":
            bus_id = element.get("busid", "")
            if not bus_id:
                raise ClusterError("A <pci> in this NCCL topology has no busid.")
            path, lanes = PciPath(path.root, path.numa_node, (*path.bridges, bus_id.lower())), _lanes(element)
        elif element.tag in ("gpu", "net"):
            yield _Found(element, path, lanes, cpus)
        stack += [(child, _Found(child, path, lanes, cpus)) for child in reversed(element)]


def _nic(number: int, net: _Found) -> Peripheral:
    bytes_per_s = _optional(net.element, "speed") * 1e6 / 8 or None
    name = net.element.get("name", "")
    return Peripheral("nic", f"NIC{number}", name, net.bus_id, net.path.numa_node, bytes_per_s)


def _fabric_label(one: _Found, other: _Found) -> str:
    """NVk or XGMI; empty where the two have PCIe only, as cards have."""
    if other.element.tag != "gpu":
        return ""
    there, back = _num_links(one, other.bus_id), _num_links(other, one.bus_id)
    if there != back:
        raise ClusterError(
            f"GPU {one.element.get('dev')} of this NCCL topology has {there} links to GPU {other.element.get('dev')}, "
            f"which has {back} to it; a link is the same in both directions."
        )
    if there:
        return "XGMI" if one.element.find("xgmi") is not None else f"NV{there}"
    through_switches = min(_num_links(one), _num_links(other))
    return f"NV{through_switches}" if through_switches else ""


def _num_links(gpu: _Found, target: str | None = None) -> int:
    """NVLinks from a GPU to the bus id `target`; to switches for None."""
    return sum(
        _number(link, "count")
        for link in gpu.element
        if link.tag in ("nvlink", "xgmi")
        and (
            link.get("tclass", "").startswith(SWITCH_CLASS)
            if target is None
            else link.get("target", "").lower() == target
        )
    )


def _number(element: ElementTree.Element, name: str) -> int:
    text = element.get(name, "")
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ClusterError(f"A <{element.tag}> in this NCCL topology has {name}={text[:40]!r}; it is a whole number.")
    return int(text)


def _optional(element: ElementTree.Element, name: str) -> int:
    """The number, 0 where there is no such attribute."""
    return _number(element, name) if element.get(name) else 0


def _cores(cpu: ElementTree.Element) -> tuple[int, ...]:
    try:
        return parse_mask(cpu.get("affinity", "0"))
    except ValueError as problem:
        raise ClusterError(f"The affinity of a <cpu> in this NCCL topology: {problem}.") from None


def _lanes(pci: ElementTree.Element) -> PcieLanes | None:
    """The lanes in link_speed="16.0 GT/s PCIe" and link_width="16"; None where NCCL wrote neither."""
    speed = re.match(r"([0-9]{1,3}(?:\.[0-9]{1,3})?) GT/s", pci.get("link_speed", ""))
    width = re.fullmatch(r"[0-9]{1,2}", pci.get("link_width", ""))
    if not speed or not width or not int(width[0]) or not float(speed[1]):
        return None
    return PcieLanes(float(speed[1]), int(width[0]))
