"""Fingerprints of every step, for `paceline verify` to compare runs on different numbers of workers.

A tensor's fingerprint is its norm and its inner products with a few fixed vectors of random signs s. Since
E[(s.a - s.b)^2] = |a - b|^2, two fingerprints give the distance of two tensors without keeping either
(Achlioptas, "Database-friendly random projections", 2003).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self, TextIO

import torch
from torch import Tensor, nn

from paceline import env
from paceline.batch import Batch
from paceline.containers import tensors
from paceline.spec import Job, Mesh
from paceline.train.process.process_group import World
from paceline.train.records.digest import weights_sha256

NUM_PROJECTIONS = 8

Whole = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""Makes all tensors of a model, unsharded, from those that this worker holds: `Engine.whole`."""


class ParityTracer:
    """Writes one JSON line a step and worker, where a trace was asked for; else does nothing."""

    def __init__(self, file: TextIO | None) -> None:
        self._file = file
        self._line: dict[str, Any] = {}

    @classmethod
    def from_environment(cls, world: World, job: Job, mesh: Mesh | None) -> Self:
        directory = env.path(env.TRACE_DIR)
        if directory is None:
            return cls(None)
        directory.mkdir(parents=True, exist_ok=True)
        file = open(directory / f"rank{world.rank}.jsonl", "w", encoding="utf-8")  # noqa: SIM115 - close() ends it
        tp = 1 if mesh is None else mesh.tp
        file.write(json.dumps({"parity": job.parity, "precision": job.precision, "tp": tp}) + "\n")
        return cls(file)

    def before_update(self, step: int, model: nn.Module, whole: Whole, loss: Tensor, batch: Any, *, idle: bool) -> None:
        """Note the loss, a scalar. Where the model is spread: a collective, and rank 0 writes for all."""
        if self._file is None:
            return
        gradients = whole({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        self._line = {
            "step": step,
            "loss": float(loss),
            "batch_digest": 0 if idle else batch_digest(batch),
            "gradients": fingerprints(gradients.items()),
        }

    def after_update(self, model: nn.Module, whole: Whole) -> None:
        if self._file is None or not self._line:  # servers make updates without a gradient of all workers
            return
        self._line["parameters"] = fingerprints(whole(dict(model.named_parameters())).items())
        self._line["buffers"] = fingerprints(whole(dict(model.named_buffers())).items())
        self._line["weights_sha256"] = weights_sha256(whole(model.state_dict(keep_vars=True)))
        self._file.write(json.dumps(self._line) + "\n")
        self._line = {}

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def fingerprints(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, list[float]]:
    """[norm, projection, projection, …] of each tensor, in float64."""
    return {name: _fingerprint(tensor.detach().to("cpu", torch.float64).reshape(-1)) for name, tensor in tensors}


def _fingerprint(flat: Tensor) -> list[float]:
    signs = torch.Generator().manual_seed(flat.numel())
    values = [float(flat.norm())]
    for _ in range(NUM_PROJECTIONS):
        bits = torch.randint(0, 2, flat.shape, generator=signs, dtype=torch.int8)
        values.append(float(flat @ (2 * bits - 1).to(torch.float64)))
    return values


def batch_digest(batch: Any) -> int:
    """A number for the samples of a batch that does not depend on their order, so workers' digests can be added."""
    if isinstance(batch, Batch):
        return sum(batch_digest(shard) for shard in batch.shards)
    leaves = [leaf.detach().cpu() for leaf in tensors(batch) if leaf.dim() > 0]
    total = 0
    for row in zip(*leaves, strict=False):
        crc = 0
        for leaf in row:
            crc = zlib.crc32(leaf.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), crc)
        total += crc
    return total
