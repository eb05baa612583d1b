"""`MachineLoad`: what else the processors of a node do."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.spec.codec import NOT_NEGATIVE, POSITIVE

MOST_FOREIGN_SHARE = 0.1
"""Other programs may keep this share of the cores busy: idle systems stay far below, one busy neighbour of a small
machine is above."""


@dataclass(frozen=True)
class MachineLoad:
    """Cores that are not free, on average over some time."""

    num_cores: int = field(metadata=POSITIVE)
    other_cores: float = field(metadata=NOT_NEGATIVE)
    """Cores that other programs kept busy."""
    stolen_cores: float = field(metadata=NOT_NEGATIVE)
    """Cores that the machine's host gave to other virtual machines."""
