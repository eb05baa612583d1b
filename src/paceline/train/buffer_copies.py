"""The buffers of a model as they were before a step, for one that fails before its update."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.parallel.dtensor import alike, local_shard
from paceline.parallel.forward_buffers import ForwardBuffers


class BufferCopies:
    """Copies of all buffers of a model: forward passes change some, and a sum over workers the running statistics."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._buffers: list[Tensor] = []
        self._kept: list[tuple[list[Tensor], list[Tensor]]] = []
        """Buffers and their copies, those of one device and dtype together: so a GPU copies them by one kernel."""

    @torch.no_grad()
    def remember(self) -> None:
        """Copy the present values."""
        present = list(self._model.buffers())
        if list(map(id, present)) != list(map(id, self._buffers)):
            self._buffers = present
            groups = alike(map(local_shard, present)).values()
            self._kept = [(same, [torch.empty_like(one) for one in same]) for same in groups]
        for buffers, copies in self._kept:
            torch._foreach_copy_(copies, buffers)

    @torch.no_grad()
    def restore(self, changed: ForwardBuffers) -> None:
        """Have the model hold the copied values again.

        Args:
            changed: knows the tensors in whose place forward passes have put others.
        """
        changed.start_over()
        for buffers, copies in self._kept:
            torch._foreach_copy_(buffers, copies)
