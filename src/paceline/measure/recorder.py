"""Records what the steps of a run did, as fingerprints of its tensors, which workers and runs can compare.

    python -m paceline.measure.recorder RUN_DIR    (with PACELINE_TRACE_DIR and PACELINE_MAX_STEPS)

trains as `python -m paceline.train RUN_DIR` does; every worker writes a file rankK.jsonl.

A tensor's fingerprint is its norm and its inner products with a few fixed vectors s of random signs. Since
E[(s.a - s.b)^2] = |a - b|^2, two fingerprints give the distance of two tensors without keeping either (Achlioptas,
"Database-friendly random projections", 2003). s is an outer product of two such vectors, whose products of two entries
have a mean of 0 as well: a projection is then a product of matrices. They are linear: the fingerprint of a sum, but for
the norm, is the sum of the fingerprints.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline import env
from paceline.measure.step_record import StepRecord, write_steps
from paceline.tensors import Batch, tensors
from paceline.train.model_state import Trained, weights_sha256
from paceline.train.run import Run, recorded_by

NUM_PROJECTIONS = 8
_BLOCK = 1024
"""The length of the inner one of the two vectors of signs."""
_PIECE = 1 << 22
"""How many numbers are projected at a time: a copy of so many stands in float64."""
_DIGITS = 1e4
"""Two rows of floating numbers are the same sample where their projections agree to one part in so many."""


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """The fingerprint of each tensor, in float64."""
    return {name: fingerprint(tensor) for name, tensor in tensors.items()}


def fingerprint(tensor: Tensor) -> list[float]:
    """[norm, projection, projection, …]."""
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    flat = (torch.view_as_real(dense) if dense.is_complex() else dense).reshape(1, -1)
    square, projections = 0.0, torch.zeros(NUM_PROJECTIONS, dtype=torch.float64, device="cpu")
    for number, piece in enumerate(flat.split(_PIECE, dim=1)):
        exact = piece.to("cpu" if piece.device.type == "mps" else piece.device, torch.float64)
        square += float(exact.square().sum())
        projections += _projections(exact, number)[0].cpu()
    return [math.sqrt(square), *projections.tolist()]


def difference(one: list[float], other: list[float]) -> list[float]:
    """The fingerprint of one tensor minus another, from theirs; its norm is estimated."""
    projections = [a - b for a, b in zip(one[1:], other[1:], strict=True)]
    return [math.hypot(*projections) / math.sqrt(NUM_PROJECTIONS), *projections]


def _projections(rows: Tensor, seed: int = 0) -> Tensor:
    """(rows, numbers) in float64 -> (rows, NUM_PROJECTIONS). Zeros at the end change nothing."""
    num_blocks = -(-rows.shape[1] // _BLOCK)
    padded = torch.nn.functional.pad(rows, (0, num_blocks * _BLOCK - rows.shape[1]))
    draw, shape = torch.Generator("cpu").manual_seed(seed), (_BLOCK + num_blocks, NUM_PROJECTIONS)
    drawn = torch.randint(0, 2, shape, generator=draw, dtype=torch.int8, device="cpu")
    inner, outer = (2 * drawn - 1).to(rows.device, torch.float64).split([_BLOCK, num_blocks])
    projections: Tensor = (padded.reshape(len(rows), num_blocks, _BLOCK) @ inner) * outer
    return projections.sum(1)


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The numbers of every parameter group."""
    return [
        {
            name: [float(one) for one in value] if isinstance(value, tuple | list) else float(value)
            for name, value in group.items()
            if isinstance(value, bool | int | float | tuple) or (isinstance(value, Tensor) and value.numel() == 1)
        }
        for group in optimizer.param_groups
    ]


def sample_digests(leaves: Iterable[Tensor]) -> Iterator[int]:
    """A number for each row of the tensors of a batch that have as many rows as the first one.

    Zeros at the end of a row are padding, of which batches with other samples have more or fewer; floating numbers are
    rounded, as features of a frozen model differ by rounding from batch to batch.
    """
    found = [leaf.detach().cpu() for leaf in leaves if leaf.dim() > 0]
    columns = [_row_bytes(leaf) for leaf in found if len(leaf) == len(found[0])]
    for row in zip(*columns, strict=True):
        yield zlib.crc32(b"|".join(row))


def _row_bytes(leaf: Tensor) -> list[bytes]:
    rows = (torch.view_as_real(leaf) if leaf.is_complex() else leaf).reshape(len(leaf), -1)
    if rows.dtype.is_floating_point:
        exact = rows.to(torch.float64)
        norms = exact.norm(dim=1, keepdim=True)
        found = torch.cat([norms.log(), _projections(exact)[:, :2] / norms], dim=1).nan_to_num(0.0, 0.0, 0.0)
        return [row.numpy().tobytes() for row in found.mul(_DIGITS).round().to(torch.int64)]
    exact_rows = rows.numpy()  # torch has no `nonzero` of unsigned integers
    ends = [int(row.nonzero()[0].max()) + 1 if row.any() else 0 for row in exact_rows]
    return [row[:end].tobytes() for row, end in zip(exact_rows, ends, strict=True)]


class RunRecorder:
    """Writes a record of each update of a run of `paceline.init`; of a model that is spread rank 0 writes all."""

    def __init__(self, run: Run) -> None:
        self._path = record_file(run.rank)
        self._header = {"precision": run.job.precision, "is_bitwise": run.job.parity == "bitwise"}
        self._steps: list[StepRecord] = []
        self._step = StepRecord()

    def before_update(self, trained: Trained, loss: Tensor, batch: Batch | None) -> None:
        whole, named = trained.engine.whole, dict(trained.model.named_parameters())
        self._step = StepRecord(
            samples=[] if batch is None else [one for shard in batch for one in sample_digests(tensors(shard))],
            losses=[float(loss)],
            initial_weights={} if self._steps else fingerprints(whole(named)),
            gradients=fingerprints(whole({name: one.grad for name, one in named.items() if one.grad is not None})),
            options=options_of(trained.optimizer),
        )

    def after_update(self, trained: Trained) -> None:
        if not self._step.losses:  # servers make updates without a gradient of all workers
            return
        step, self._step = self._step, StepRecord()
        model, whole = trained.model, trained.engine.whole
        step.weights = fingerprints(whole(dict(model.named_parameters())))
        step.buffers = fingerprints(whole(dict(model.named_buffers())))
        step.weights_sha256 = weights_sha256(whole(model.state_dict(keep_vars=True)))
        self._steps.append(step)

    def close(self) -> None:
        write_steps(self._path, self._header, self._steps)


def record_file(rank: int) -> Path:
    """Where this worker's record belongs."""
    return (env.value(env.TRACE_DIR, Path) or Path()) / f"rank{rank}.jsonl"


if __name__ == "__main__":
    from paceline.train.loop import main

    with recorded_by(RunRecorder):
        main()
