"""How workers aggregate their gradients: a table of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from paceline.spec.algorithm import WireName
from paceline.spec.codec import above_zero, at_least, between


@dataclass(frozen=True)
class AggregationSpec:
    """How workers aggregate their gradients, and how often.

    With the defaults the result does not depend on the number of workers, up to rounding. Other settings give up some
    of that for less communication, and a run's summary says so.
    """

    FORMER_KEYS: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "density": (0.01, 'aggregation.wire = "bfloat16" halves what is sent.'),
        "powersgd_rank": (2, 'aggregation.wire = "bfloat16" halves what is sent.'),
        "groups": (None, "every worker trains by itself between two outer steps."),
        "sync_inside_nodes": (False, "every worker trains by itself between two outer steps."),
        "overlap_steps": (0, "workers wait for the sums of an outer step."),
    }

    method: Literal["every_step", "local_sgd", "diloco", "parameter_server_async"] = "every_step"
    """When gradients are summed: every step; or weights are averaged every few steps ("local_sgd", "diloco"); or
    servers update asynchronously."""
    wire: Literal[WireName, "auto-lossy"] = "float32"
    """The wire format; "auto-lossy": "bfloat16" between nodes, "float32" on one."""
    sync_every: int = at_least(1, 16)
    """Steps between two outer steps, with local_sgd and diloco."""
    outer_lr: float = above_zero(0.7)
    """The learning rate of outer steps, with diloco."""
    outer_momentum: float = between(0, 1, 0.9)
    """The Nesterov momentum of outer steps, with diloco."""
    staleness: int = at_least(0, 1)
    """With parameter_server_async: how many updates late the parameters behind every gradient are; 0: none. More let
    slower workers fall further behind, and SGD's momentum is lowered for it."""

    @property
    def is_infrequent(self) -> bool:
        """Whether workers train by themselves between two outer steps."""
        return self.method in ("local_sgd", "diloco")
