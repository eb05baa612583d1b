"""`CommRequest` and `CommTimings`: which sums over all workers to time, and their timings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from paceline.errors import JobError
from paceline.spec.algorithm import AlgorithmName, algorithm_names
from paceline.spec.cluster import DeviceKind
from paceline.spec.codec import NOT_NEGATIVE, POSITIVE, JsonValue, above_zero, at_least, between
from paceline.spec.job import MOST_SAMPLES, MOST_WORKERS
from paceline.spec.machine_load import MachineLoad
from paceline.spec.wire import WireName

TIMINGS_FILE = "timings.json"
"""The file name of `CommTimings` in a benchmark's folder."""

VectorType = Literal["float32", "bfloat16", "float16", "float64"]
"""The type of the values that are summed."""
NodeOrder = Literal["by_node", "alternating"]
"""The order of workers: node after node, or one of each node in turn, to show the cost of that."""

SMALLEST_BYTES, LARGEST_BYTES, GROWTH = 4 << 10, 256 << 20, 4


@dataclass(frozen=True)
class CommCase:
    """One algorithm with a wire format and an order of workers."""

    algorithm: AlgorithmName
    wire: WireName = "float32"
    order: NodeOrder = "by_node"

    def __str__(self) -> str:
        wire = "" if self.wire == "float32" else f" in {self.wire}"
        return f"{self.algorithm}{wire}" + (", nodes in turn" if self.order == "alternating" else "")


def message_sizes(min_bytes: int = SMALLEST_BYTES, max_bytes: int = LARGEST_BYTES) -> tuple[int, ...]:
    """Sizes in bytes from the smallest to the largest in steps of 4; the last step may be longer, up to 8.

    Raises:
        JobError: a smallest size of less than 1.
    """
    if min_bytes < 1:
        raise JobError(f"The smallest message has {min_bytes} bytes; it should have 1 or more.")
    sizes = [min_bytes]
    while sizes[-1] * GROWTH * 2 <= max_bytes:
        sizes.append(sizes[-1] * GROWTH)
    return (*sizes, max_bytes) if sizes[-1] < max_bytes else tuple(sizes)


@dataclass(frozen=True)
class CommRequest(JsonValue):
    """What to time; an empty table asks for every algorithm, 4 KiB to 256 MiB, within a minute."""

    cases: tuple[CommCase, ...] = tuple(CommCase(name) for name in algorithm_names())
    sizes_bytes: tuple[int, ...] = at_least(0, message_sizes())
    """Sizes of the vector that is summed, in `dtype`."""
    dtype: VectorType = "float32"
    """Type of the vector; 16 bits are widened to float32, summed and rounded once, as gradients are."""
    device_kind: DeviceKind | None = None
    """None: GPUs if there are any."""
    num_servers: int = between(1, MOST_WORKERS, 1)
    num_rounds: int = between(1, MOST_SAMPLES, 20)
    """The maximum number of rounds per size; every case is timed once per round."""
    budget_s: float = above_zero(60.0)
    """Seconds for all timings. Long calls get fewer rounds, and cases that do not fit are left out."""
    timeout_s: float = at_least(1, 600.0)
    """How long a call waits for a silent worker."""
    link_rate_bytes_per_s: float | None = above_zero(None)
    """Bandwidth in one direction of links between nodes, or workers of one node; None: unknown."""
    interface: str | None = None
    """Network interface of the nodes whose bytes are to be counted, such as "eth0", or several as "eth0,eth1"."""

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> CommRequest:
        request = super().from_mapping(mapping)
        if not request.cases or any(case.algorithm == "auto" for case in request.cases):
            raise JobError(f"cases should name algorithms: one or more of {', '.join(algorithm_names())}.")
        if not request.sizes_bytes or min(request.sizes_bytes) < 8:
            raise JobError(f"sizes_bytes = {list(request.sizes_bytes)} should be sizes of at least 8 bytes.")
        return request


@dataclass(frozen=True)
class CommTiming:
    """One case at one size: seconds of the slowest worker, a round each, from when all were ready."""

    case: CommCase
    size_bytes: int = field(metadata=POSITIVE)
    times_s: tuple[float, ...] = field(metadata=NOT_NEGATIVE)
    link_bytes: float | None = at_least(0, None)
    """What went over the busiest node's interface in one direction in a call, headers included; None: not counted."""

    @property
    def median_s(self) -> float:
        return median(self.times_s)

    @property
    def min_s(self) -> float:
        return min(self.times_s)


@dataclass(frozen=True)
class CommFit:
    """The line through a case's median times: alpha_s + bytes * beta_s_per_byte."""

    case: CommCase
    alpha_s: float = field(metadata=NOT_NEGATIVE)
    beta_s_per_byte: float = field(metadata=NOT_NEGATIVE)


@dataclass(frozen=True)
class UntimedCases:
    """Requested cases that were not timed, and the reason."""

    case: CommCase
    sizes_bytes: tuple[int, ...] = field(metadata=POSITIVE)
    reason: str


@dataclass(frozen=True)
class CommTimings(JsonValue):
    """What one benchmark measured, in ascending order of sizes; a sum that was wrong would have been an error."""

    request: CommRequest
    nodes: tuple[tuple[int, ...], ...] = field(metadata=NOT_NEGATIVE)
    """The ranks on each node."""
    device_kind: DeviceKind
    timings: tuple[CommTiming, ...]
    fits: tuple[CommFit, ...]
    left_out: tuple[UntimedCases, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    machine_load: MachineLoad | None = None
    """What else the processors did meanwhile; None: it was not measured, or the system does not tell."""

    @property
    def world_size(self) -> int:
        return sum(map(len, self.nodes))
