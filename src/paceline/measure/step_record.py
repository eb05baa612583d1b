"""What a step did, as numbers that runs on different numbers of workers can compare without moving tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Fingerprints = dict[str, list[float]]
"""[norm, projection, projection, …] of each tensor, by name; empty where there is no tensor."""


@dataclass
class StepRecord:
    """A step as one worker saw it, with whole tensors. A run of `paceline.init` leaves some fields empty."""

    samples: list[int] = field(default_factory=list)
    """A digest of each sample that this worker's model was called with."""
    columns: list[int] = field(default_factory=list)
    """A digest of each column of the same tensor: the batch may be its second dimension."""
    losses: list[float] = field(default_factory=list)
    """The values that `backward` was called on, or the step's loss where the run knows it."""
    initial_weights: Fingerprints = field(default_factory=dict)
    """Tensors of which no earlier step has a record, as this step began."""
    changes_before: Fingerprints = field(default_factory=dict)
    """Weights as the step began minus weights after the last one: changed by something beside the optimizer."""
    local_gradients: Fingerprints = field(default_factory=dict)
    """Gradients of this worker's own samples, of whole parameters only. Norms and projections are each summed over
    micro-steps."""
    gradients: Fingerprints = field(default_factory=dict)
    """Gradients as the optimizer found them."""
    options: list[dict[str, Any]] = field(default_factory=list)
    """The learning rate and other numbers of each parameter group."""
    update: Fingerprints = field(default_factory=dict)
    """Weights after the step minus before it, where the gradient is more than rounding."""
    weights: Fingerprints = field(default_factory=dict)
    """Weights after the step."""
    buffers: Fingerprints = field(default_factory=dict)
    """Buffers and frozen parameters after the step."""
    weights_sha256: str = ""
    """A digest of all weights after the step, where every bit should be equal."""
    switched_off: list[str] = field(default_factory=list)
    """Layers that follow from a worker's own samples or draws, and did not: batch norm, dropout."""
    draws: bool = False
    """Whether the forward pass drew random numbers nevertheless."""
    generator_state: int = 0
    """A digest of the state of torch's generator as the model was first called."""


def write_steps(path: Path, header: Mapping[str, Any], steps: Iterable[StepRecord]) -> None:
    """Write the record of a worker: a header, then a line for each step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(one) for one in [header, *map(asdict, steps)]]
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
