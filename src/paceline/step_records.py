"""What a training step did, as numbers that runs on different numbers of workers can compare without moving tensors.

Every worker writes a file rankK.jsonl: a header, then a line for each step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

BATCH_NORM, DROPOUT = "batch norm", "dropout"
Fingerprints = Mapping[str, list[float]]
"""By name of the tensor: [norm, projection, projection, …]."""


@dataclass
class StepRecord:
    """A step as one worker saw it, with whole tensors."""

    samples: list[int] = field(default_factory=list)
    """A digest of each sample that this worker's model was called with."""
    losses: list[float] = field(default_factory=list)
    """What `backward` was called on, or the step's loss where the run knows it."""
    weights_before: Fingerprints = field(default_factory=dict)
    """Of the first step at least."""
    gradients: Fingerprints = field(default_factory=dict)
    """As the optimizer found them."""
    options: list[dict[str, Any]] = field(default_factory=list)
    """The learning rate and other numbers of each parameter group."""
    weights: Fingerprints = field(default_factory=dict)
    """After the step, as the buffers are."""
    buffers: Fingerprints = field(default_factory=dict)
    weights_sha256: str = ""
    """Where every bit should be equal."""
    layers: list[str] = field(default_factory=list)
    """Kinds of layers whose outputs follow from a worker's own samples or draws, and computed in this step."""
    drew_from: int = 0
    """A digest of the state of torch's generator as the model was first called."""


def write(path: Path, header: Mapping[str, Any], steps: Iterable[StepRecord]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(one) for one in [header, *map(asdict, steps)]]
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
