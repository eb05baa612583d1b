"""Records of every step, for `paceline verify` to compare runs on different numbers of workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.batch import Batch
from paceline.containers import tensors
from paceline.fingerprints import fingerprints, options_of, sample_digests
from paceline.spec import Job, Mesh
from paceline.step_records import StepRecord, write
from paceline.train.state import weights_sha256

Whole = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""Makes all tensors of a model, unsharded, from those that this worker holds: `Engine.whole`."""


class ParityTracer:
    """Writes a record of each step of this worker."""

    def __init__(self, directory: Path, rank: int, job: Job, mesh: Mesh) -> None:
        self._path = directory / f"rank{rank}.jsonl"
        self._header = {"precision": job.precision, "is_bitwise": job.parity == "bitwise", "tp": mesh.tp}
        self._steps: list[StepRecord] = []
        self._step = StepRecord()
        write(self._path, self._header, [])  # `verify.observe` sees that this run records itself

    def before_update(
        self, model: nn.Module, optimizer: Optimizer, whole: Whole, loss: Tensor, batch: Batch | None
    ) -> None:
        """Note the loss, a scalar, and the samples of a batch. Where the model is spread: a collective, and rank 0
        writes for all."""
        weights = {} if self._steps else fingerprints(whole(dict(model.named_parameters())).items())
        self._step = StepRecord(
            [] if batch is None else [one for shard in batch for one in sample_digests(tensors(shard))],
            [float(loss)],
            weights,
            fingerprints(whole({name: p.grad for name, p in model.named_parameters() if p.grad is not None}).items()),
            options_of(optimizer),
        )

    def after_update(self, model: nn.Module, whole: Whole) -> None:
        if not self._step.losses:  # servers make updates without a gradient of all workers
            return
        step, self._step = self._step, StepRecord()
        step.weights = fingerprints(whole(dict(model.named_parameters())).items())
        step.buffers = fingerprints(whole(dict(model.named_buffers())).items())
        step.weights_sha256 = weights_sha256(whole(model.state_dict(keep_vars=True)))
        self._steps.append(step)

    def close(self) -> None:
        write(self._path, self._header, self._steps)
