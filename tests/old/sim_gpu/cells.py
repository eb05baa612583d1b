"""The matrix: every way to train, as a short run of a small model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.spec import Job, PipelineSpec, parse_mesh
from paceline.spec.algorithm import algorithm_names
from tests.old.ranks.training import Outcome, images, train

_LENET: dict[str, Any] = {"model": {"name": "lenet"}}
_RESNET: dict[str, Any] = {"model": {"name": "resnet20"}}


@dataclass(frozen=True)
class Cell:
    """One way to train."""

    name: str
    job: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-5
    """The largest relative difference of weights between simulated GPUs and CPUs."""

    def fits(self, device_kind: str) -> bool:
        """Whether there are as many devices as one worker takes."""
        return device_kind == "cpu" or self.plan.get("devices_in_process", 1) <= torch.cuda.device_count()

    def train(self, device_kind: str, **where: Any) -> Outcome:
        """One epoch of three steps, with evaluation."""
        values = {"global_batch_size": 16, "virtual_shards": 4, "epochs": 1, "optim": {"lr": 0.01, "momentum": 0.9}}
        values["tf32"] = False  # a CPU has none
        job = Job.from_mapping(values | _LENET | self.job)
        shape = (1, 28, 28) if job.model.name == "lenet" else (3, 8, 8)
        plan = {"timeout_s": 120, "device_kind": device_kind, **self.plan}
        return train(job, images(48, shape), images(19, shape), **plan, **where)


def cells(num_workers: int) -> list[Cell]:
    """Those that `num_workers` can run."""
    found = [*_data_parallel(), *_other_kinds()]
    if num_workers == 1:
        return [*found, Cell("one process, two devices", plan={"devices_in_process": 2})]
    found += [_summed_by(name) for name in algorithm_names() if name != "tree_exact"]
    found += [Cell(f"wire {wire}", {"aggregation": {"wire": wire}}, tolerance=1e-3) for wire in ("bfloat16", "float16")]
    found += [_meshed(name, num_workers) for name in ("fsdp", "hsdp", "tp", "pp")]
    found += [_pipelined(schedule, num_workers) for schedule in ("gpipe", "interleaved", "zero_bubble")]
    return found + [_meshed(mesh, num_workers) for mesh in _TWO_AXES if num_workers == 4]


def cells_of_tests(num_workers: int) -> list[Cell]:
    """All of them on one worker and on two; on four what needs four, or sums and pipelines with more steps."""
    needed = {"bitwise", "all_reduce", "ring", "parameter_server_two_level", "pp zero_bubble"}
    needed |= {"hsdp", *_TWO_AXES}
    return [cell for cell in cells(num_workers) if num_workers < 4 or cell.name in needed]


_TWO_AXES = ("fsdp2 x tp2", "dp2 x pp2", "dp2 x tp2", "pp2 x tp2", "fsdp2 x pp2", "dp2 x fsdp2")


def _data_parallel() -> list[Cell]:
    return [
        Cell("bitwise", {"parity": "bitwise"}),
        Cell("bitwise, batch norm", {"parity": "bitwise", **_RESNET}),
        Cell("batch norm of shards", _RESNET),
        # Shards are normalised one by one on CPUs, together on GPUs: in float32 a ReLU may tell their rounding apart.
        Cell("channels last", {"channels_last": True, "precision": "float64", **_RESNET}),
        Cell("float64", {"precision": "float64"}),
        Cell("bfloat16", {"precision": "bfloat16"}, tolerance=2e-2),
        Cell("float16", {"precision": "float16"}, tolerance=2e-2),
    ]


def _other_kinds() -> list[Cell]:
    def aggregation(method: str, tolerance: float = 1e-5) -> Cell:
        return Cell(method, {"aggregation": {"method": method}}, tolerance=tolerance)

    return [
        Cell("noise scale", {"measure_noise": True}),
        aggregation("local_sgd"),
        aggregation("diloco"),
        aggregation("parameter_server_async", tolerance=1.0),  # updates come in the order of time
    ]


def _summed_by(algorithm: str) -> Cell:
    return Cell(algorithm, plan={"algorithm": algorithm})


def _pipelined(schedule: Any, num_workers: int) -> Cell:
    return _meshed("pp", num_workers, pipeline=PipelineSpec(schedule=schedule))


def _meshed(mesh: str, num_workers: int, **plan: Any) -> Cell:
    schedule = f" {plan['pipeline'].schedule}" if plan else ""
    return Cell(f"{mesh}{schedule}", plan={"mesh": parse_mesh(mesh, num_workers, 1), **plan})


def run_cells(device_kind: str, chosen: Sequence[Cell]) -> dict[str, Outcome]:
    """The outcome of each cell, on whatever workers run this."""
    torch.manual_seed(0)
    return {cell.name: _run(cell, device_kind) for cell in chosen if cell.fits(device_kind)}


def _run(cell: Cell, device_kind: str) -> Outcome:
    try:
        return cell.train(device_kind)
    except Exception as error:
        raise AssertionError(f"The cell '{cell.name}' failed on {device_kind}.") from error
