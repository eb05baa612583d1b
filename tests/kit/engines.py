"""Every engine that a run can have: what `paceline.init` is told, and on how many workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.kit.models import CUTS, TENSOR_PLAN


@dataclass(frozen=True)
class Engine:
    """One way to spread a run."""

    num_workers: int
    mesh: Mapping[str, int] = field(default_factory=dict)
    """The degrees of the axes, as in a plan file; empty: data parallelism."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of a plan file."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a job."""
    has_own_losses: bool = False
    """Whether a worker knows the losses of its own samples only."""
    reads_in_step: bool = False
    """Whether workers choose in the step which shards they read: always in the job's own order of samples."""

    @property
    def has_stages(self) -> bool:
        return self.mesh.get("pp", 1) > 1


def _pipeline(schedule: str, num_stages: int = 2) -> dict[str, Any]:
    cuts = CUTS[1:2] if num_stages == 2 else CUTS
    return {"pipeline": {"schedule": schedule, "stages_per_worker": num_stages // 2, "cuts": list(cuts)}}


def _method(name: str, **keys: Any) -> dict[str, Any]:
    return {"aggregation": {"method": name, **keys}}


ENGINES = {
    "one worker": Engine(1),
    "dp on 2": Engine(2),
    "dp on 3": Engine(3),
    "dp, bitwise": Engine(2, job={"parity": "bitwise"}),
    "one process": Engine(1, plan={"devices_in_process": 2}),
    "zero1": Engine(2, {"fsdp": 2, "zero_stage": 1}),
    "zero2": Engine(2, {"fsdp": 2, "zero_stage": 2}),
    "fsdp": Engine(2, {"fsdp": 2}),
    "fsdp, bitwise": Engine(2, {"fsdp": 2}, job={"parity": "bitwise"}),
    "hsdp": Engine(4, {"dp": 2, "fsdp": 2}),
    "pp, gpipe": Engine(2, {"pp": 2}, _pipeline("gpipe")),
    "pp, 1f1b": Engine(2, {"pp": 2}, _pipeline("1f1b")),
    "pp, interleaved": Engine(2, {"pp": 2}, _pipeline("interleaved", num_stages=4)),
    "pp, zero_bubble": Engine(2, {"pp": 2}, _pipeline("zero_bubble")),
    "tp": Engine(2, {"tp": 2}, {"tensor_plan": TENSOR_PLAN}),
    "fsdp x tp": Engine(4, {"fsdp": 2, "tp": 2}, {"tensor_plan": TENSOR_PLAN}),
    "dp x pp": Engine(4, {"dp": 2, "pp": 2}, _pipeline("1f1b")),
    "local_sgd": Engine(2, job=_method("local_sgd", sync_every=1), has_own_losses=True),
    "diloco": Engine(2, job=_method("diloco", sync_every=1, outer_lr=1.0, outer_momentum=0.0), has_own_losses=True),
    "asynchronous": Engine(2, job=_method("parameter_server_async", staleness=0), reads_in_step=True),
}
