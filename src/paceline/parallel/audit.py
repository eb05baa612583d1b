"""The audit: whether the loss of the same samples is the same on every worker, and from call to call.

A step is independent of the number of workers only if the loss follows from the model, its virtual shard and the
generators that are seeded for it. A number that a loss function keeps in an attribute, a counter, a generator of its
own or a value of its first call makes it follow from what this process has computed before. So in a few steps, before
the update, every worker computes the first shard of the global batch, after its own, and workers compare its loss and
the norms of its gradient. A worker that is alone, or whose samples others cannot be sent, computes its own first shard
again and compares the loss.

Nothing of the script is hidden from it: it sees one call more. Gradients and buffers are afterwards as they were, and
the generators are seeded anew after every step.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.batch import Batch
from paceline.containers import map_tensors, tensors
from paceline.errors import ModelError
from paceline.object_collectives import all_gather_objects
from paceline.parallel.assignment import Assignment
from paceline.parallel.buffers import buffers_kept, standing_in
from paceline.parallel.dtensor import reshard
from paceline.parallel.gradient_norms import norm_of
from paceline.parallel.passes import Passes
from paceline.parallel.step_input import StepInput
from paceline.process_groups import device_of

_REMEDY = (
    "Besides the model and the samples it follows from a rank, from weights or buffers that a script has changed on "
    "some workers, or from what a process keeps from call to call: a number in an attribute, a counter, a generator of "
    "its own, a value of the first call. Let it follow from the model, the samples and run.steps alone, draw random "
    "numbers from torch, NumPy or Python's random, which are seeded for every virtual shard, and take what all workers "
    "share from run.values."
)


def audit(passes: Passes, step: StepInput, group: dist.ProcessGroup | None, *, has_gradients: bool = True) -> None:
    """Compare the loss of the same samples on all workers; a collective, after their own passes of this step.

    Args:
        group: the workers that have the same weights; None: this worker is compared with itself.
        has_gradients: whether to compare gradients too; not where workers hold parts of them.

    Raises:
        ModelError: on all workers, if losses or gradients differ.
    """
    is_shared = False
    content = step.batch.shards[0] if step.assignment.sizes else None
    if group is not None:
        template = step.batch.shards[0]
        forms = _common_forms(template, group)
        is_shared = forms is not None
        content = content if forms is None else _broadcast(template, forms, group)
    tolerance = tolerance_of(passes.model, step)
    if is_shared and group is not None:
        found = _compute(passes, step, 0, content, has_gradients=has_gradients)
        first = found.new_full((1,), math.nan)
        if dist.get_rank(group) == 0:
            first[0] = passes.first_loss
        _compare(torch.cat([first, found]), group, tolerance)
        return
    if content is None:  # no samples; others may wait in its layers
        with standing_in(passes.model):
            _compute(passes, step, 0, step.batch.shards[0], has_gradients=False)
        losses = [math.nan, math.nan]
    else:
        again = _compute(passes, step, step.assignment.own[0], content, has_gradients=False)
        losses = [float(passes.first_loss), float(again[0])]
    everyone = all_gather_objects([str(loss) for loss in losses], group)
    for rank, (one, other) in enumerate(map(float, pair) for pair in everyone):
        if not _is_close(one, other, tolerance):
            raise ModelError(_differs(f"from call to call on rank {rank}", one, other))


def _compute(passes: Passes, step: StepInput, shard: int, content: Any, *, has_gradients: bool) -> Tensor:
    """[loss, the norm of each parameter's gradient] of a shard, in float64; of its loss alone without gradients.

    Raises:
        ModelError: the loss function left a gradient: it calls `backward` itself.
    """
    sizes = step.assignment.shard_sizes
    alone = replace(
        step,
        assignment=Assignment(sizes, ((shard, shard + 1),), rank=0),
        batch=Batch((content,), (sizes[shard],)),
    )
    parameters = list(passes.model.parameters())
    before = [parameter.grad for parameter in parameters]
    with buffers_kept(passes.model):
        try:
            for parameter in parameters:
                parameter.grad = None
            passes.enter(alone, shard)
            loss = passes.read(alone, passes.model, shard)
            if any(parameter.grad is not None for parameter in parameters):
                raise ModelError("The loss function calls backward() itself; return the loss, run.step calls backward.")
            numbers = [loss.mean.detach().double()]
            if has_gradients:
                loss.mean.backward()
                gradients = [parameter.grad for parameter in parameters]
                numbers += [loss.mean.new_zeros(()) if one is None else norm_of(one) for one in gradients]
        finally:
            passes.seeds.end()
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
            reshard(passes.model)
    return torch.stack([number.to(numbers[0]) for number in numbers])


def _compare(found: Tensor, group: dist.ProcessGroup, tolerance: float) -> None:
    """Compare what workers found: [loss in the step (of rank 0), loss in the audit, norms of gradients]."""
    found = found.to(device_of(group))
    of_ranks = [torch.empty_like(found) for _ in range(dist.get_world_size(group))]
    dist.all_gather(of_ranks, found, group=group)
    rows = [row.tolist() for row in of_ranks]
    (first, loss, *norms), others = rows[0], rows[1:]
    if not _is_close(first, loss, tolerance):
        raise ModelError(_differs("from call to call on rank 0", first, loss))
    largest = max(norms, default=0.0)
    for rank, (_, other_loss, *other_norms) in enumerate(others, start=1):
        if not _is_close(loss, other_loss, tolerance):
            raise ModelError(_differs(f"between rank 0 and rank {rank}, or from call to call", loss, other_loss))
        for one, other in zip(norms, other_norms, strict=True):
            if math.isfinite(one) and abs(one - other) > tolerance * max(largest, 1e-2):
                where = f"between rank 0 and rank {rank}, or from call to call"
                raise ModelError(_differs(where, one, other, what="norm of a gradient"))


def _is_close(one: float, other: float, tolerance: float) -> bool:
    both_finite = math.isfinite(one) and math.isfinite(other)
    return not both_finite or math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance * 1e-2)


def _differs(where: str, one: float, other: float, what: str = "loss") -> str:
    return f"The {what} of the same samples differs {where} ({one:g} and {other:g}). {_REMEDY}"


def tolerance_of(model: torch.nn.Module, step: StepInput) -> float:
    """The relative difference that rounding may explain: kernels choose the order of their sums by where a tensor lies
    in memory, and layers amplify what that changes."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if dtypes & {torch.bfloat16, torch.float16} or step.is_low_precision:
        return 0.1
    return 1e-9 if dtypes == {torch.float64} else 1e-3


# --- the first worker's samples, on all workers ---

_Forms = Sequence[tuple[torch.dtype, Sequence[int]]]
"""The type and the shape of each tensor."""


def _common_forms(content: Any, group: dist.ProcessGroup) -> _Forms | None:
    """The forms of the tensors of rank 0's samples; None where workers' samples differ in more than tensors."""
    found = list(tensors(content))
    is_plain = all(one.layout == torch.strided and not one.is_nested for one in found)
    around = zlib.crc32(repr(map_tensors(content, lambda one: one.new_empty(0))).encode())
    forms = [[str(one.dtype).removeprefix("torch."), *one.shape] for one in found]
    everyone = all_gather_objects([is_plain, around, forms], group)
    if not all(plain and crc == everyone[0][1] for plain, crc, _ in everyone):
        return None
    return [(getattr(torch, name), shape) for name, *shape in everyone[0][2]]


def _broadcast(content: Any, forms: _Forms, group: dist.ProcessGroup) -> Any:
    """Samples like `content`, with the tensors of rank 0's."""
    device, left = device_of(group), iter(forms)

    def of_first(own: Tensor) -> Tensor:
        dtype, shape = next(left)
        sent = torch.empty(shape, dtype=dtype, device=device)
        if dist.get_rank(group) == 0:
            sent.copy_(own.detach())
        dist.broadcast(sent.view(-1).view(torch.uint8), group_src=0, group=group)
        return sent.to(own.device)

    return map_tensors(content, of_first)
