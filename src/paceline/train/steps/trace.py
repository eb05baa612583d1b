"""Records of every step, for `paceline verify` to compare runs on different numbers of workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline import env
from paceline.batch import Batch
from paceline.containers import tensors
from paceline.fingerprints import fingerprints, options_of, sample_digests
from paceline.spec import Job, Mesh
from paceline.step_records import StepRecord, write
from paceline.train.process.process_group import World
from paceline.train.records.digest import weights_sha256

Whole = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""Makes all tensors of a model, unsharded, from those that this worker holds: `Engine.whole`."""


class ParityTracer:
    """Writes a record of each step and worker, where a trace was asked for; else does nothing."""

    def __init__(self, path: Path | None, header: Mapping[str, Any]) -> None:
        if path is not None:
            write(path, header, [])  # `verify.observe` sees that this run records itself
        self._path = path
        self._header = header
        self._steps: list[StepRecord] = []
        self._step = StepRecord()

    @classmethod
    def from_environment(cls, world: World, job: Job, mesh: Mesh | None) -> Self:
        directory = env.path(env.TRACE_DIR)
        tp = 1 if mesh is None else mesh.tp
        header = {"precision": job.precision, "is_bitwise": job.parity == "bitwise", "tp": tp}
        return cls(None if directory is None else directory / f"rank{world.rank}.jsonl", header)

    def before_update(
        self, model: nn.Module, optimizer: Optimizer, whole: Whole, loss: Tensor, batch: Any, *, idle: bool
    ) -> None:
        """Note the loss, a scalar. Where the model is spread: a collective, and rank 0 writes for all."""
        if self._path is None:
            return
        weights = {} if self._steps else fingerprints(whole(dict(model.named_parameters())).items())
        self._step = StepRecord(
            [] if idle else _digests(batch),
            [float(loss)],
            weights,
            fingerprints(whole({name: p.grad for name, p in model.named_parameters() if p.grad is not None}).items()),
            options_of(optimizer),
        )

    def after_update(self, model: nn.Module, whole: Whole) -> None:
        if self._path is None or not self._step.losses:  # servers make updates without a gradient of all workers
            return
        step, self._step = self._step, StepRecord()
        step.weights = fingerprints(whole(dict(model.named_parameters())).items())
        step.buffers = fingerprints(whole(dict(model.named_buffers())).items())
        step.weights_sha256 = weights_sha256(whole(model.state_dict(keep_vars=True)))
        self._steps.append(step)

    def close(self) -> None:
        if self._path is not None:
            write(self._path, self._header, self._steps)
            self._path = None


def _digests(batch: Any) -> list[int]:
    if isinstance(batch, Batch):
        return [digest for shard in batch.shards for digest in _digests(shard)]
    return list(sample_digests(tensors(batch)))
