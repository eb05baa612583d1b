"""How workers aggregate their gradients: a table of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from paceline.errors import JobError
from paceline.spec.codec import above_zero, at_least, between
from paceline.spec.wire import WireName


@dataclass(frozen=True)
class AggregationSpec:
    """How workers aggregate their gradients, and how often.

    With the defaults the result does not depend on the number of workers, up to rounding. Other settings give up some
    of that for less communication, and a run's summary says so.
    """

    FORMER_KEYS: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "density": (0.01, 'aggregation.wire = "bfloat16" halves what is sent.'),
        "powersgd_rank": (2, 'aggregation.wire = "bfloat16" halves what is sent.'),
    }

    method: Literal["every_step", "local_sgd", "diloco", "parameter_server_async"] = "every_step"
    """When gradients are summed: every step; or weights are averaged every few steps ("local_sgd", "diloco"); or
    servers update asynchronously."""
    wire: Literal[WireName, "auto-lossy"] = "float32"
    """The wire format; "auto-lossy": the elementwise format that is fastest at the start of the run."""
    sync_every: int = at_least(1, 16)
    """Steps between two outer steps, with local_sgd and diloco."""
    sync_inside_nodes: bool = False
    """Whether the workers of one node synchronise every step, and nodes every `sync_every` steps, with local_sgd and
    diloco."""
    groups: int | None = at_least(1, None)
    """The number of groups of workers that synchronise every step, and each other every `sync_every` steps, with
    local_sgd and diloco: the same for any number of workers, which then changes nothing; None: every worker is one, or
    every node."""
    overlap_steps: int = at_least(0, 0)
    """Steps that workers train on while the sums of an outer step are sent, with local_sgd and diloco; 0: they wait."""
    outer_lr: float = above_zero(0.7)
    """The learning rate of outer steps, with diloco."""
    outer_momentum: float = between(0, 1, 0.9)
    """The Nesterov momentum of outer steps, with diloco."""
    staleness: int = at_least(0, 1)
    """With parameter_server_async: how many updates late the parameters behind every gradient are; 0: none. More let
    slower workers fall further behind, and SGD's momentum is lowered for it."""

    def __post_init__(self) -> None:
        for key, value in ("overlap_steps", self.overlap_steps), ("groups", self.groups):
            if value and not self.is_infrequent:
                raise JobError(
                    f"aggregation.{key} = {value} is for the methods local_sgd and diloco, not {self.method}; leave it "
                    "out."
                )
        if self.groups and self.sync_inside_nodes:
            raise JobError(
                f"aggregation.groups = {self.groups} says which workers synchronise every step, and so does "
                "aggregation.sync_inside_nodes; leave one of them out."
            )
        if self.is_infrequent and self.overlap_steps >= self.sync_every:
            raise JobError(
                f"aggregation.overlap_steps = {self.overlap_steps} has to be less than aggregation.sync_every = "
                f"{self.sync_every}: the sums of an outer step arrive before the next one begins."
            )

    @property
    def is_infrequent(self) -> bool:
        """Whether workers, or groups of them, train by themselves between two outer steps."""
        return self.method in ("local_sgd", "diloco")

    def check_groups(self, num_workers: int) -> None:
        """Raise `JobError` if so many workers cannot be divided into `groups`."""
        if self.groups and num_workers % self.groups:
            raise JobError(
                f"aggregation.groups = {self.groups} needs a multiple of {self.groups} workers, and there are "
                f"{num_workers}; the groups are part of the job: as many for every number of workers."
            )
