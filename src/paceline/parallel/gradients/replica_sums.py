"""The dp axis of a mesh: replicas add their gradients up in buckets, while backward computes the next ones.

DistributedDataParallel does so for plain replicas; it does not take DTensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.comm import Aggregator, Bucket
from paceline.dtensor_type import local_shard
from paceline.parallel.gradients.buckets import FIRST_BUCKET_BYTES, buckets


class ReplicaSums:
    """The sums of one worker's gradients over the replicas.

    All replicas have the same buckets and begin them in the same order, so a bucket also waits for those before it.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: Sequence[nn.Module],
        shared: Iterable[str],
        aggregator: Aggregator,
        device: torch.device,
    ) -> None:
        """
        Args:
            module: all that this worker holds.
            stages: the modules in it whose backward passes end at different times.
            shared: names of parameters that other stages have too: their gradients change after backward.
        """
        self._module = module
        self._aggregator = aggregator
        self._device = device
        uses = Counter(parameter for stage in stages for parameter in stage.parameters())
        named = dict(module.named_parameters(remove_duplicate=False))
        self._late = {named[name] for name in shared} | {parameter for parameter, num in uses.items() if num > 1}
        self._trained: list[tuple[str, nn.Parameter]] = []
        self._hooks: list[RemovableHandle] = []

    def close(self) -> None:
        """Leave the parameters alone: garbage collection does not see what a hook on their gradients holds."""
        for hook in self._hooks:
            hook.remove()

    def begin_step(self) -> None:
        trained = [(name, p) for name, p in self._module.named_parameters() if p.requires_grad]
        if [name for name, _ in trained] != [name for name, _ in self._trained]:
            self._arrange(trained)
        self._awaited: set[Tensor] = set()
        self._num_missing = [len(bucket) for bucket in self._buckets]
        self._under_way: list[tuple[torch.futures.Future[Tensor], tuple[tuple[str, Tensor], ...]]] = []

    def _arrange(self, trained: list[tuple[str, nn.Parameter]]) -> None:
        """Form the buckets, again where a user has frozen or unfrozen parameters."""
        self._trained = trained
        # Backward computes the last ones first; late ones must not hold the others up.
        early = [(name, p) for name, p in reversed(trained) if p not in self._late]
        late = [(name, p) for name, p in trained if p in self._late]
        self._buckets = list(
            buckets([*early, *late], lambda named: (named[1].dtype, local_shard(named[1]).nbytes), FIRST_BUCKET_BYTES)
        )
        self._bucket_of: dict[Tensor, int] = {p: place for place, bucket in enumerate(self._buckets) for _, p in bucket}
        self.close()
        self._hooks = [p.register_post_accumulate_grad_hook(self._on_gradient) for _, p in early]

    def await_last(self, stage: nn.Module) -> None:
        """Say that the next gradients of this stage's parameters are the step's last ones."""
        self._awaited.update(stage.parameters())

    def finish(self) -> None:
        """Leave the sums in `.grad` of every parameter that has one."""
        while len(self._under_way) < len(self._buckets):
            self._begin_next()
        for bucket, (arrived, slices) in zip(self._buckets, self._under_way, strict=True):
            arrived.wait()
            self._aggregator.scheduler.raise_error()
            for (_, parameter), (_, total) in zip(bucket, slices, strict=True):
                if parameter.grad is not None:
                    mine = local_shard(parameter.grad)
                    mine.copy_(total.view(mine.shape))
                if total.is_cuda:  # of another stream's memory, where fully_shard has called from its own
                    total.record_stream(torch.cuda.current_stream(self._device))
        self._under_way = []

    def _on_gradient(self, parameter: Tensor) -> None:
        if parameter in self._awaited:
            self._awaited.remove(parameter)
            self._num_missing[self._bucket_of[parameter]] -= 1
            while len(self._under_way) < len(self._buckets) and not self._num_missing[len(self._under_way)]:
                self._begin_next()

    def _begin_next(self) -> None:
        bucket = self._buckets[len(self._under_way)]
        # Of one that this replica did not use, zeros; `.grad` itself may be read until all is summed.
        gradients = [
            local_shard(p).new_zeros(local_shard(p).shape) if p.grad is None else local_shard(p.grad) for _, p in bucket
        ]
        values = torch.cat([gradient.reshape(-1) for gradient in gradients]).to(self._device)
        names = [name for name, _ in bucket]
        slices = tuple(zip(names, values.split([gradient.numel() for gradient in gradients]), strict=True))
        self._under_way.append((self._aggregator.sum_bucket(Bucket(values, slices)), slices))
