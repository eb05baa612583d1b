"""`DeviceChoice`: which devices of a node work together, and in which order around the ring."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.spec.cluster import Link


@dataclass(frozen=True)
class DeviceRing:
    """Devices in the order in which they pass data on; the last passes it to the first."""

    devices: tuple[int, ...]
    bottleneck: Link | None
    """The slowest link; None for one device, and if a link is unknown."""

    def all_reduce_s(self, size_bytes: float) -> float | None:
        """2 (n - 1) / n * size / bottleneck (Patarasuk and Yuan 2009), without latency; None without a bandwidth."""
        n = len(self.devices)
        if n == 1:
            return 0.0
        if self.bottleneck is None or not self.bottleneck.bytes_per_s:
            return None
        return 2 * (n - 1) / n * size_bytes / self.bottleneck.bytes_per_s


@dataclass(frozen=True)
class DeviceChoice:
    """The chosen devices, and for comparison the first ones by id."""

    ring: DeviceRing
    naive: DeviceRing
    """The first ones, in the order of their ids."""
    is_exact: bool
    """Whether the choice is optimal; False: found by local search, so a better one may exist."""

    @property
    def devices(self) -> tuple[int, ...]:
        """Ascending."""
        return tuple(sorted(self.ring.devices))
