"""`fuse_shards`: a worker's virtual shards go through the model together.

The job says with it that samples are independent of each other and that the forward pass draws no random numbers. Then
a loss over several shards is the weighted mean of theirs, and fewer, larger passes compute the same gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from paceline.errors import ModelError
from paceline.parallel.audit import preserved_gradients, tolerance_of
from paceline.parallel.engine import Passes
from paceline.parallel.layout import norm_of
from paceline.parallel.pass_state import BATCH_NORMS
from paceline.parallel.step_input import Assignment, StepInput
from paceline.tensors import Batch, map_tensors, tensors

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def fused(step: StepInput, most_samples: int) -> StepInput:
    """The step with neighbouring shards of each worker put together, as long as they have at most `most_samples`
    samples. Raises `ModelError` where the contents of shards cannot be put together."""
    before = step.assignment
    of_ranks = [_groups(before.shard_sizes, *own, most_samples) for own in before.shards_of_rank]
    ends = [0, *itertools.accumulate(map(len, of_ranks))]
    sizes = tuple(sum(before.shard_sizes[start:stop]) for groups in of_ranks for start, stop in groups)
    assignment = Assignment(sizes, tuple(itertools.pairwise(ends)), before.rank)
    if not before.sizes:  # a stand-in
        return replace(step, assignment=assignment)
    first = before.own[0]
    contents = [_joined(step.batch.shards[start - first : stop - first]) for start, stop in of_ranks[before.rank]]
    return replace(step, assignment=assignment, batch=Batch(tuple(contents), assignment.sizes))


def _groups(sizes: Sequence[int], start: int, stop: int, most_samples: int) -> list[tuple[int, int]]:
    """Runs (start, stop) of shards that go together."""
    groups: list[tuple[int, int]] = []
    for shard in range(start, stop):
        if groups and sum(sizes[groups[-1][0] : shard + 1]) <= most_samples:
            groups[-1] = groups[-1][0], shard + 1
        else:
            groups.append((shard, shard + 1))
    return groups


def _joined(contents: Sequence[Any]) -> Any:
    """The content of several shards as one: tensors one after the other along their first dimension."""
    parts = zip(*map(tensors, contents), strict=True)
    try:
        return map_tensors(contents[0], lambda _tensor: torch.cat(next(parts)))
    except (RuntimeError, ValueError, StopIteration) as problem:
        raise ModelError(
            f"The contents of virtual shards cannot be put together ({problem}): fuse_shards needs tensors of one "
            "shape but for the samples; leave it out, or pad all samples alike."
        ) from None


def check_fused(passes: Passes, apart: StepInput, together: StepInput) -> None:
    """Compare the first fused pass of this worker with its shards one by one; leaves no trace. Raises `ModelError`
    where the model normalises over samples or drops values; or losses or gradients differ."""
    for name, module in passes.model.named_modules():
        if module.training and isinstance(module, (*BATCH_NORMS, *_DROPOUTS)) and getattr(module, "p", 1.0):
            raise ModelError(
                f"fuse_shards is for models whose samples are independent, and '{name}' is a {type(module).__name__}, "
                "which couples a shard's samples or draws for them; leave fuse_shards out."
            )
    if not together.assignment.sizes:
        return
    num_apart = 1 + list(itertools.accumulate(apart.assignment.sizes)).index(together.assignment.sizes[0])
    found = []
    for step, num_shards in ((apart, num_apart), (together, 1)):
        first = step.assignment.own[0]
        total = 0.0
        with preserved_gradients(passes) as parameters:
            for shard in range(first, first + num_shards):
                passes.enter(step, shard)
                loss = passes.read(replace(step, reads_again=True), shard)
                loss.weighted.backward()
                total += float(loss.sums[0])
            found.append((total, [passes.like if one.grad is None else one.grad for one in parameters]))
    (loss_apart, gradients_apart), (loss_fused, gradients_fused) = found
    largest = max((float(norm_of(one)) for one in gradients_apart), default=0.0)
    tolerance = tolerance_of(passes.model, apart)
    if abs(loss_fused - loss_apart) > tolerance * max(abs(loss_apart), 1e-2) or any(
        float(norm_of(one - other)) > tolerance * max(largest, 1e-2)
        for one, other in zip(gradients_fused, gradients_apart, strict=True)
    ):
        raise ModelError(
            "The loss or the gradient of several virtual shards together is not that of one after the other, so the "
            "model or the loss function couples samples or draws random numbers; leave fuse_shards out."
        )
