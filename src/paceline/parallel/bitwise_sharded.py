"""`parity = "bitwise"` with parameters and optimizer sharded over the fsdp axis, and replicas of that over the dp axis.

Parameters are gathered, which copies them exactly, and the gradients of every virtual shard are whole: they go into the
tree of `bitwise.py`, so that every number is added as on one worker. A worker then keeps its shard of the sum, which
the optimizer updates element by element. So parameters and optimizer take a part of the memory, gradients all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from paceline.parallel.axes import Axes
from paceline.parallel.bitwise import BitwiseDataParallel
from paceline.parallel.dtensor import shard_like
from paceline.parallel.engine import StepInput
from paceline.parallel.losses import StepLoss
from paceline.parallel.norm import ShardBatchNorm, replace_batch_norm
from paceline.parallel.sharded import sharded_modules
from paceline.parallel.spread_model import SpreadModel
from paceline.spec import Job, Plan


class BitwiseSharded(BitwiseDataParallel):
    """The engine of the meshes of dp and fsdp whose results are equal, bit for bit, to those of one worker."""

    def __init__(
        self, model: nn.Module, job: Job, plan: Plan, device: torch.device, axes: Axes, *, may_skip: bool = False
    ) -> None:
        """The arguments are `MeshParallel`'s."""
        model = replace_batch_norm(model, ShardBatchNorm)
        self._spread = SpreadModel(
            model, job, plan, device, axes, None, may_skip=may_skip, before_last_backward=lambda _stage: None
        )
        self.notes = self._spread.notes
        self._keeps_gathered = axes.mesh.zero_stage == 1
        for sharded in sharded_modules(self._spread.module):
            sharded.set_requires_gradient_sync(False, recurse=False)
            sharded.set_reshard_after_backward(False, recurse=False)  # whole gradients are with whole parameters
        super().__init__(self._spread.module, device, axes.data)
        self._norm = torch.zeros((), dtype=self._shards.dtype, device=device)

    def gradients(self, step: StepInput) -> StepLoss:
        try:
            return super().gradients(replace(step, loss_of=self._spread.checked(step.loss_of)))
        finally:
            self._reshard()

    def _take_gradients(self) -> list[Tensor | None]:
        whole = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        gradients = [parameter.grad for parameter in whole]
        self._end_pass()
        return gradients

    def _accompany(self, step: StepInput) -> None:
        """All workers of an fsdp axis gather in every pass, so each makes as many as the busiest one."""
        of_ranks = [stop - start for start, stop in step.assignment.shards_of_rank]
        for _ in range(max(of_ranks) - of_ranks[step.assignment.rank]):
            self._shards.stand_in(step)
            self._end_pass()

    def _end_pass(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None
        if not self._keeps_gathered:
            self._reshard()

    def _reshard(self) -> None:
        for sharded in sharded_modules(self.module):
            sharded.reshard()

    def _keep(self, gradients: Sequence[Tensor | None]) -> None:
        self._norm = nn.utils.get_total_norm([one for one in gradients if one is not None])
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            # Copies: a view would keep all gradients in memory.
            parameter.grad = None if gradient is None else shard_like(gradient, parameter).clone()

    def gradient_norm(self) -> Tensor:
        return self._norm

    @property
    def holds_all(self) -> bool:
        return False

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._spread.whole(tensors)
