"""Which property of the law holds under which engine: the table of docs/strategies.md.

What happens when a worker is lost is not a column: tests/faults has it.

`python -m tests.law.matrix` prints it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.kit.engines import ENGINES

if TYPE_CHECKING:
    from _pytest.mark.structures import ParameterSet

PROPERTIES: Mapping[str, str] = {
    "plain torch": "losses and weights are those of a plain PyTorch loop over the whole batch",
    "ragged end": "so they are where the last batch of an epoch has fewer samples than workers",
    "token mean": "a mean over tokens is that of the whole batch; shards without any count for nothing",
    "random numbers": "dropout, noise in the loss function and random transforms of samples are those of one worker",
    "batch norm": "every virtual shard is normalised by itself, and the running statistics are one worker's",
    "coupled samples": "a loss that compares samples compares those of a virtual shard",
    "clipping and schedule": "the norm is that of the whole gradient; warm-up and decay count samples",
    "frozen, unused and tied": "so are parameters that get no gradient, and one that stands in two places",
    "non-finite": "an update that is not finite is left out by all workers, who are told",
    "evaluation": "metrics count every sample once",
    "order": "each epoch reads every sample once, in the order of one worker",
    "checkpoint": "a run that ends in the middle of an epoch goes on exactly under the next engine of the table",
    "bits": '`parity = "bitwise"` gives every bit of one worker',
    "bytes sent": "a worker sends what its strategy's formula says",
    "memory": "a worker holds its part of parameters and optimizer state, and no more",
}


@dataclass(frozen=True)
class NotHeld:
    """A property that an engine does not have."""

    why: str
    refused_with: tuple[str, ...] = ()
    """Words of the error that says so before the first step; none: the run goes on, by another rule."""


_OWN_UPDATES = NotHeld("between two outer steps every worker clips and leaves out updates by its own samples")
_SLICES_ROUND = NotHeld("sums inside of layers are made in another order", ("bitwise", "tp"))
_NEEDS_EVERY_STEP = NotHeld("the bits would depend on the number of workers", ("bitwise", "aggregation.method"))

NOT_HELD: Mapping[tuple[str, str], NotHeld] = {
    **dict.fromkeys([("local_sgd", "clipping and schedule"), ("local_sgd", "non-finite")], _OWN_UPDATES),
    **dict.fromkeys([("diloco", "clipping and schedule"), ("diloco", "non-finite")], _OWN_UPDATES),
    ("asynchronous", "clipping and schedule"): NotHeld(
        "servers update slices of the parameters, and none knows the norm of the whole gradient",
        ("parameter_server_async", "clip_norm"),
    ),
    ("asynchronous", "order"): NotHeld("workers are given no batches: in a step each reads the shards that it takes"),
    ("one process", "bits"): NotHeld("its sums have no fixed tree", ("bitwise",)),
    ("asynchronous", "bytes sent"): NotHeld("how often a worker reads and sends depends on how fast the others are"),
    ("tp", "bits"): _SLICES_ROUND,
    ("fsdp x tp", "bits"): _SLICES_ROUND,
    ("local_sgd", "bits"): _NEEDS_EVERY_STEP,
    ("diloco", "bits"): _NEEDS_EVERY_STEP,
    ("asynchronous", "bits"): _NEEDS_EVERY_STEP,
}


def cells(*properties: str) -> list[ParameterSet]:
    """The cells (engine, property) of some columns that hold, as parameters of a test."""
    found = []
    for name in properties:
        for engine in ENGINES:
            if (engine, name) not in NOT_HELD:
                marks = [pytest.mark.budget(processor_s=25), pytest.mark.xdist_group(engine)]  # share a team
                found.append(pytest.param(engine, name, marks=marks, id=f"{engine}: {name}"))
    return found


BEGIN, END = "<!-- the matrix of tests/law/matrix.py begins -->", "<!-- the matrix ends -->"


def markdown() -> str:
    """The table, the notes that its cells name by number, and what each property means."""
    notes = list(dict.fromkeys(NOT_HELD.values()))

    def cell(engine: str, name: str) -> str:
        note = NOT_HELD.get((engine, name))
        return "yes" if note is None else str(notes.index(note) + 1)

    lines = [
        "| | " + " | ".join(PROPERTIES) + " |",
        "|---" * (1 + len(PROPERTIES)) + "|",
        *(f"| {engine} | " + " | ".join(cell(engine, name) for name in PROPERTIES) + " |" for engine in ENGINES),
        "",
        *(
            f"{number}. {'Refused' if note.refused_with else 'Not so'}: {note.why}."
            for number, note in enumerate(notes, start=1)
        ),
        "",
        *(f"- **{name}**: {meaning}." for name, meaning in PROPERTIES.items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(f"{BEGIN}\n{markdown()}{END}")
