"""The links of a node from the labels that some source gives to pairs of its devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from paceline.hardware.datasheet import PcieLanes, link_bytes_per_s
from paceline.spec import Device, Link, Peripheral


def links_of_pairs(
    devices: Sequence[Device],
    peripherals: Sequence[Peripheral],
    label_of: Callable[[str, str], str],
    models: Mapping[str, str],
    lanes: Mapping[str, PcieLanes] | None = None,
) -> tuple[Link, ...]:
    """A link from each device to the devices after it and to every card and disk.

    Args:
        label_of: the label of the link between two ends, which are `Device.label` and `Peripheral.label`; empty where
            nobody knows it, and then there is no link.
        models: names of GPU models by label, which decide the bandwidth.
        lanes: PCIe connections by label, as far as they are known.
    """
    links = []
    for position, device in enumerate(devices):
        others: list[Device | Peripheral] = [*devices[position + 1 :], *peripherals]
        for other in others:
            ends = (device.label, other.label)
            if label := label_of(*ends):
                names = [models[end] for end in ends if end in models]
                known_lanes = [lanes[end] for end in ends if lanes and end in lanes]
                links.append(Link(ends, label, link_bytes_per_s(label, names, known_lanes)))
    return tuple(links)


def num_cores(devices: Sequence[Device]) -> int:
    """The cores that some device is next to, each once."""
    return len({core for device in devices for core in device.cpus})
