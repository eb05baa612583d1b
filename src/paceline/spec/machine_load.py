"""`MachineLoad`: what else the processors did while something was measured on them."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.spec.codec import NOT_NEGATIVE, POSITIVE

MOST_FOREIGN_SHARE = 0.1
"""Other programs may keep this share of the cores busy: idle systems stay far below, one busy neighbour of a small
machine is above."""


@dataclass(frozen=True)
class MachineLoad:
    """Cores, on average over a measurement, of the node where others did most."""

    num_cores: int = field(metadata=POSITIVE)
    """Cores that the measurement could use."""
    other_cores: float = field(metadata=NOT_NEGATIVE)
    """Cores that other programs kept busy."""
    stolen_cores: float = field(metadata=NOT_NEGATIVE)
    """Cores that the machine's host gave to other virtual machines."""
    throttled: tuple[str, ...] = ()
    """A sentence for each GPU that ran slower than it could."""

    @property
    def foreign_share(self) -> float:
        return (self.other_cores + self.stolen_cores) / self.num_cores

    @property
    def disturbance(self) -> tuple[bool, float]:
        """For comparison: greater where a measurement was disturbed more, by throttled GPUs first."""
        return bool(self.throttled), self.foreign_share

    @property
    def is_disturbing(self) -> bool:
        return self.foreign_share > MOST_FOREIGN_SHARE or bool(self.throttled)

    def sentence(self) -> str:
        """What disturbed the measurement; empty if nothing did."""
        said = list(self.throttled)
        if self.foreign_share > MOST_FOREIGN_SHARE:
            stolen = (
                f", {self.stolen_cores:.1f} of them for other virtual machines" if self.stolen_cores >= 0.05 else ""
            )
            cores = self.other_cores + self.stolen_cores
            said.insert(0, f"other programs used {cores:.1f} of {self.num_cores} cores during the measurement{stolen}")
        return "; ".join(said)
