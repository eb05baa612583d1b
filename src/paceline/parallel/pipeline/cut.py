"""What limits the cut of a model into stages, and a cut for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.parallel.pipeline.schedules import make_schedule, simulate
from paceline.partition import StageLimits
from paceline.spec import Mesh, PipelineSpec
from paceline.spec.model_cost import LayerCost


def stage_limits(
    mesh: Mesh,
    pipeline: PipelineSpec,
    num_micro_batches: int,
    memory_bytes: float,
    *,
    optimizer_copies: int,
    micro_batch_share: float = 1.0,
    recomputes: bool = False,
) -> StageLimits:
    """What stages have to respect so that each fits into a worker's memory.

    A worker holds parameters, gradients and the optimizer's state in parts along tp and fsdp, below stage 3 of ZeRO the
    gathered parameters too, and the activations of as many micro-batches as its schedule has under way at once.
    Activations count as if tp shared all of them, and not at all where they are computed again; but what one layer
    keeps as its output and the next as its input counts twice, and 16-bit precisions as 32 bits.

    Args:
        memory_bytes: of one worker; infinite where nobody knows it.
        optimizer_copies: numbers that the optimizer keeps for each parameter.
        micro_batch_share: a micro-batch, in those that the layers were measured with.
    """
    if math.isinf(memory_bytes) or pipeline.stages_per_worker > 1:  # a worker's stages share what there is
        return StageLimits()
    schedule = make_schedule(pipeline.schedule, mesh.pp, num_micro_batches)
    copies = (2 + optimizer_copies) / mesh.fsdp + (mesh.fsdp > 1 and mesh.zero_stage < 3)
    share = 0.0 if recomputes else micro_batch_share / mesh.tp
    return StageLimits(
        memory_bytes=memory_bytes,
        copies_of_parameters=copies / mesh.tp,
        micro_batches_kept=tuple(share * kept for kept in simulate(schedule, lambda _action: 1.0).most_kept),
    )


def cut_table(layers: Sequence[LayerCost], starts: Sequence[int], num_workers: int) -> str:
    """The cut for people: a line a stage, with its layers, its share of the time, and what it is sent."""
    stops = [*starts[1:], len(layers)]
    total_s = sum(layer.time_s for layer in layers) or 1.0
    rows = [("stage", "worker", "layers", "first", "last", "time", "ms", "parameters", "receives")]
    for stage, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        part = layers[start:stop]
        time_s = sum(layer.time_s for layer in part)
        rows.append(
            (
                str(stage),
                str(stage % num_workers),
                str(len(part)),
                part[0].name,
                part[-1].name,
                f"{time_s / total_s:.1%}",
                f"{time_s * 1e3:.2f}",
                f"{sum(layer.parameter_bytes for layer in part) / 1e6:.2f} MB",
                f"{layers[start - 1].output_bytes / 1e3:.1f} kB" if stage else "",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
