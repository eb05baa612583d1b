"""`paceline.memory`: what a device would hold of a job's model under each strategy, before there are any devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import JobError, ModelError, shown
from paceline.plan.memory import device_memory, fits, state_bytes
from paceline.spec import Job, Mesh, parse_mesh
from paceline.spec.model_cost import DeviceMemory, ModelCost
from paceline.words import size
from paceline.workflows.arguments import checked
from paceline.workflows.jobs import check_counts, resolve_job
from paceline.workflows.traced_model import trace_model

if TYPE_CHECKING:
    from rich.console import RenderableType

_STRATEGIES = ("dp", "zero1", "zero2", "fsdp", "tp", "pp")


@dataclass(frozen=True)
class StrategyMemory:
    """The memory of the fullest device under one strategy."""

    strategy: str
    memory: DeviceMemory | None
    """None: the model cannot be spread this way."""
    problem: str = ""
    """Why it cannot."""


@dataclass(frozen=True)
class MemoryTable:
    """What each of a number of devices would hold, by strategy."""

    num_devices: int
    micro_batch_size: int
    """Samples in one forward pass of a device."""
    rows: tuple[StrategyMemory, ...]
    device_bytes: int | None = None
    """The memory of one device; None: not stated."""

    def fits(self, row: StrategyMemory) -> bool | None:
        """Whether a row fits into a device, as the planner judges; None: not stated, or not possible."""
        if row.memory is None or self.device_bytes is None:
            return None
        return fits(row.memory, self.device_bytes)

    def table(self) -> RenderableType:
        """A table with a row for each strategy, and what cannot be done below it."""
        from rich.console import Group

        from paceline.report.tables import table

        parts = ("parameters", "gradients", "optimizer", "activations", "gathered", "sums", "total")
        headings = ("strategy", *parts, "fits")
        rows = table(*(headings if self.device_bytes else headings[:-1]), left=["strategy"])
        words = {True: "yes", False: "no", None: ""}
        for row in self.rows:
            if row.memory is not None:
                one = row.memory
                held = (one.parameter_bytes, one.gradient_bytes, one.optimizer_bytes, one.activation_bytes)
                cells = [size(num) for num in (*held, one.gathered_bytes, one.transit_bytes, one.total_bytes)]
                rows.add_row(row.strategy, *cells, *([words[self.fits(row)]] if self.device_bytes else []))
        devices = "1 device" if self.num_devices == 1 else f"each of {self.num_devices} devices"
        return Group(
            f"Memory of {devices}, {self.micro_batch_size} samples in a forward pass:",
            rows,
            *(f"{row.strategy}: {row.problem}" for row in self.rows if row.problem),
        )

    def _repr_html_(self) -> str:
        from paceline.report.tables import html_of

        return html_of(self.table())


@checked
def memory(
    job: Job | str | Path,
    devices: int = 8,
    *,
    micro_batch_size: int | None = None,
    device_bytes: int | None = None,
    model: str | Callable[..., Any] | None = None,
    data: str | Path | Callable[..., Any] | None = None,
    settings: Sequence[str] = (),
) -> MemoryTable:
    """What each of some devices would hold of a job's model, its gradients, optimizer and activations.

    The model is traced without memory for its parameters, and the planner's formulas say what a device holds of it, in
    a step of the whole global batch. What kernels need while they run, and what a framework takes for itself, is not
    counted.

    Example: `paceline.memory("digits-lenet", 4)`.

    Args:
        job: a job, a job file (TOML) or the name of a recipe.
        devices: the number of devices.
        micro_batch_size: samples in one forward pass of a device; None: a virtual shard.
        device_bytes: memory of one device in bytes (on a command line also as 80GiB), to say what fits.
        model, data, settings: as for `train`.

    Raises:
        JobError: an invalid job or number, or no data set to take a sample from.
    """
    check_counts(devices=devices, micro_batch_size=micro_batch_size)
    if device_bytes is not None and not device_bytes >= 1:
        raise JobError(f"device_bytes = {shown(device_bytes)} should be the memory of a device in bytes.")
    resolved = resolve_job(job, settings, data, model)
    if (micro_batch_size or 0) > resolved.global_batch_size:
        raise JobError(
            f"micro_batch_size = {micro_batch_size} is more than the global batch of {resolved.global_batch_size} "
            "samples; use that many at most, or set global_batch_size."
        )
    num_samples = micro_batch_size or resolved.shard_size
    strategies = ("dp",) if devices == 1 else _STRATEGIES
    cost = trace_model(resolved)
    rows = tuple(_row(resolved, cost, parse_mesh(name, devices), name, num_samples) for name in strategies)
    return MemoryTable(devices, num_samples, rows, device_bytes)


def _row(job: Job, cost: ModelCost, mesh: Mesh, strategy: str, num_samples: int) -> StrategyMemory:
    if mesh.tp > 1 and not any(layer.is_sharded_by(mesh.tp) for layer in cost.layers):
        problem = f"the model has no tensor plan of its own by which {mesh.tp} workers can divide its layers."
        return StrategyMemory(strategy, None, problem)
    try:
        found = device_memory(
            cost.num_parameters,
            state_bytes(job),
            mesh,
            cost.activations,
            num_samples,
            num_micro_batches=max(1, -(-job.global_batch_size // (num_samples * mesh.num_assignments))),
            layers=cost.layers,
        )
    except ModelError as problem:
        return StrategyMemory(strategy, None, str(problem))
    return StrategyMemory(strategy, found)
