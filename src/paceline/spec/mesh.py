"""`Mesh`: how many workers divide what, axis by axis, and how users name it."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Literal

from paceline.errors import JobError
from paceline.spec.codec import at_least, between
from paceline.spec.job import Job

AxisName = Literal["pp", "dp", "fsdp", "tp"]
AXES: tuple[AxisName, ...] = ("pp", "dp", "fsdp", "tp")
"""The order in which ranks are laid out: neighbours in the last axis are neighbours in rank, so the axis that talks
most gets the fastest links (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", section 3.2)."""

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]

STRATEGIES = ("dp", "fsdp", "zero1", "zero2", "hsdp", "pp", "tp", "dp_one_process")
"""What one word can name; others are meshes such as "dp2 x pp2"."""


@dataclass(frozen=True)
class Mesh:
    """The degree of every axis; their product is the world size."""

    dp: int = at_least(1, 1)
    """Groups that each hold everything below once: they share the batch and sum their gradients."""
    fsdp: int = at_least(1, 1)
    """Workers that share the batch and hold a part each of every parameter, gradient and optimizer state."""
    tp: int = at_least(1, 1)
    """Workers that compute a part each of every layer."""
    pp: int = at_least(1, 1)
    """Stages that hold some layers each and hand activations on."""
    zero_stage: int = between(1, 3, 3)
    """What the fsdp axis shards: 1: optimizer state; 2: gradients too; 3: parameters too."""

    @property
    def num_workers(self) -> int:
        return self.dp * self.fsdp * self.tp * self.pp

    @property
    def num_assignments(self) -> int:
        """How many ways the global batch is shared."""
        return self.dp * self.fsdp

    def degree(self, axis: AxisName) -> int:
        return {"dp": self.dp, "fsdp": self.fsdp, "tp": self.tp, "pp": self.pp}[axis]

    def place(self, rank: int) -> dict[AxisName, int]:
        """Where a rank stands on every axis."""
        found: dict[AxisName, int] = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, self.degree(axis))
        return found

    def share(self, rank: int) -> int:
        """Which share of the global batch is a rank's."""
        place = self.place(rank)
        return place["dp"] * self.fsdp + place["fsdp"]

    def leads_assignment(self, rank: int) -> bool:
        """Whether a rank is the first of those that compute with the same samples."""
        place = self.place(rank)
        return place["tp"] == place["pp"] == 0

    @property
    def is_plain(self) -> bool:
        """Whether every worker holds a whole replica."""
        return self.fsdp == self.tp == self.pp == 1

    def __str__(self) -> str:
        data = "fsdp" if self.zero_stage == 3 else f"zero{self.zero_stage}:"
        named = (("dp", self.dp), (data, self.fsdp), ("tp", self.tp), ("pp", self.pp))
        return " x ".join(f"{axis}{degree}" for axis, degree in named if degree > 1) or "one device"


_TERM = re.compile(r"(dp|fsdp|zero[123]|tp|pp):?(\d*)")


def num_named(text: str) -> int:
    """How many workers the degrees make that the text names."""
    return math.prod(int(degree) for _, degree in _TERM.findall(text) if degree)


def parse_mesh(text: str, num_workers: int, num_nodes: int = 1) -> Mesh:
    """The mesh of `num_workers` workers that a strategy's name means: "fsdp", "hsdp", "dp2 x pp2", "fsdp x tp2".

    One axis may leave its degree out: it takes the workers that are left. "hsdp" replicates over the nodes and
    shards inside of each; on one node it makes two replicas.

    Raises:
        JobError: no such strategy, an axis named twice, or degrees that do not make up the world size.
    """
    words = text.strip().lower()
    if words in ("auto", "dp_one_process"):
        raise JobError(
            f"The strategy '{words}' is for paceline train and paceline scale, which know the job before they start "
            "workers; name a mesh here, such as 'fsdp' or 'dp2 x pp2'."
        )
    if words == "hsdp":
        replicas = num_nodes if num_nodes > 1 else 2
        words = f"dp{replicas} x fsdp"
    degrees: dict[str, int] = {}
    zero_stage = 3
    is_open = None
    for word in re.split(r"\s*[x*,]\s*|\s+", words):
        term = _TERM.fullmatch(word)
        if term is None:
            raise JobError(
                f"There is no strategy '{text}'; it is one of {', '.join(STRATEGIES)}, auto, or axes with their "
                "degrees such as 'dp2 x pp2' or 'fsdp2 x tp2'."
            )
        axis, degree = term.groups()
        if axis.startswith("zero"):
            axis, zero_stage = "fsdp", int(axis[-1])
        if axis in degrees or (not degree and is_open is not None):
            raise JobError(f"The strategy '{text}' should name every axis once, and leave at most one degree out.")
        if degree:
            degrees[axis] = int(degree)
        else:
            is_open = axis
            degrees[axis] = 0
    known = math.prod(degree for axis, degree in degrees.items() if axis != is_open)
    if is_open is not None and known:
        degrees[is_open] = num_workers // known
    mesh = dataclasses.replace(Mesh(zero_stage=zero_stage), **degrees) if all(degrees.values()) else None
    if mesh is None or mesh.num_workers != num_workers:
        raise JobError(
            f"The strategy '{text}' does not make {num_workers} workers; the degrees of its axes should multiply to "
            f"{num_workers}."
        )
    return mesh


def check_mesh(job: Job, mesh: Mesh | None) -> None:
    """Raises `JobError` for a job that only whole replicas can train, where the mesh has none."""
    if mesh is None or mesh.is_plain:
        return
    spec = job.aggregation
    wrong = (
        ("parity = 'bitwise'", "parity = 'numeric'", job.parity == "bitwise"),
        (f"aggregation.method = '{spec.method}'", "'every_step'", spec.method != "every_step"),
        ("norm = 'sync'", "norm = 'shard'", job.norm == "sync"),
        ("precision = 'float16'", "precision = 'bfloat16'", job.precision == "float16"),
        (f"aggregation.wire = '{spec.wire}'", "a wire format of fixed size", spec.wire in _LOOK_AT_WHOLE_GRADIENTS),
    )
    for setting, remedy, is_set in wrong:
        if is_set:
            raise JobError(
                f"{setting} needs the whole model on every worker; use {remedy}, or the strategy dp, not {mesh}."
            )


_LOOK_AT_WHOLE_GRADIENTS = ("powersgd", "topk", "randomk")
