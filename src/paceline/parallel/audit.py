"""The audit: whether the loss of the same samples is the same on every worker, and from call to call.

A step is independent of the number of workers only if the loss follows from the model, its virtual shard and the
generators that are seeded for it. A number that a loss function keeps in an attribute, a counter, a generator of its
own or a value of its first call makes it follow from what this process has computed before. So in a few steps, before
the update, every worker computes the first shard of the global batch, after its own, and workers compare its loss and
the norms of its gradient. The first step, for which people wait, compares the loss alone. A worker that is alone, or
whose samples others cannot be sent, computes its own first shard again and compares the loss.

Nothing of the script is hidden from it: it sees one call more. Gradients and buffers are afterwards as they were, and
the generators are seeded anew after every step.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import ModelError
from paceline.object_collectives import all_gather_objects, broadcast_object
from paceline.parallel.dtensor import reshard
from paceline.parallel.layout import norm_of
from paceline.parallel.pass_state import frozen_batch_norms, preserved_buffers
from paceline.parallel.step_input import Assignment, StepInput
from paceline.tensors import Batch, map_tensors, tensors

if TYPE_CHECKING:
    from paceline.parallel.engine import Passes

_REMEDY = (
    "Besides the model and the samples it follows from a rank, from weights or buffers that a script has changed on "
    "some workers or added after run.prepare, or from what a process keeps from call to call: a number in an "
    "attribute, a counter, a generator of its own, a value of the first call. Let it follow from the model, the "
    "samples and run.steps alone, draw random numbers from torch, NumPy or Python's random, which are seeded for every "
    "virtual shard, and take what all workers share from run.values."
)


def audit(passes: Passes, step: StepInput, group: dist.ProcessGroup | None, *, has_gradients: bool) -> None:
    """Compare the loss of the same samples on all workers; a collective, after their own passes of this step. Raises
    `ModelError` on all workers, if losses or gradients differ.

    Args:
        group: the workers that have the same weights; None: this worker is compared with itself.
        has_gradients: whether to compare gradients too; not in the first step, nor where workers hold parts of them.
    """
    samples = None if group is None else _samples_of_first(step.batch.shards[0], group)
    is_shared, has_samples = samples is not None, bool(step.assignment.sizes)
    shard = 0 if is_shared or not has_samples else step.assignment.own[0]
    sizes = step.assignment.shard_sizes
    batch = Batch((samples if is_shared else step.batch.shards[0],), (sizes[shard],))
    alone = replace(step, assignment=Assignment(sizes, ((shard, shard + 1),), rank=0), batch=batch)
    norms: list[Any] = [0.0 for _ in passes.model.parameters()] if has_gradients and is_shared else []

    def note(place: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        norms[place] = norms[place] + norm_of(parameter.grad)
        parameter.grad = None  # at once, so that there is memory for one and no more

    with preserved_gradients(passes) as parameters, ExitStack() as contexts:
        if not (is_shared or has_samples):
            contexts.enter_context(frozen_batch_norms(passes.model))  # others may wait in its layers
        passes.enter(alone, shard)
        loss = passes.read(alone, shard)
        if any(parameter.grad is not None for parameter in parameters):
            raise ModelError("The loss function calls backward() itself; return the loss, run.step calls backward.")
        if norms:
            for place, one in enumerate(parameters):
                if one.requires_grad:
                    contexts.enter_context(one.register_post_accumulate_grad_hook(partial(note, place)))
            loss.weighted.backward()
    first = passes.first_loss if has_samples and step.assignment.own[0] == shard else math.nan
    again = loss.mean.detach() if is_shared or has_samples else math.nan
    found = [passes.like + number for number in (first, again, *(norm / loss.weight for norm in norms))]
    everyone = all_gather_objects([str(number) for number in torch.stack(found).tolist()], group)
    _compare([[float(number) for number in one] for one in everyone], tolerance_of(passes.model, step), is_shared)


def _compare(everyone: Sequence[Sequence[float]], tolerance: float, is_shared: bool) -> None:
    """Compare what each worker found: the loss in the step, if it computed it, the loss again, norms of gradients.
    `is_shared`: whether all have computed with the same samples."""
    _, loss_of_first, *norms_of_first = everyone[0]
    for rank, (first, loss, *norms) in enumerate(everyone):
        if not _is_close(first, loss, tolerance):
            raise ModelError(_differs(f"from call to call on rank {rank}", first, loss))
        if not is_shared:
            continue
        where = f"between rank 0 and rank {rank}, or from call to call"
        if not _is_close(loss_of_first, loss, tolerance):
            raise ModelError(_differs(where, loss_of_first, loss))
        for one, other in zip(norms_of_first, norms, strict=True):
            if math.isfinite(one) and abs(one - other) > tolerance * max(*norms_of_first, 1e-2):
                raise ModelError(_differs(where, one, other, what="norm of a gradient"))


@contextmanager
def preserved_gradients(passes: Passes) -> Iterator[list[nn.Parameter]]:
    """A context for passes that are made once more, with the list of parameters, which have no gradients at first.
    Gradients and buffers are afterwards as before."""
    parameters = list(passes.model.parameters())
    before = [parameter.grad for parameter in parameters]
    with preserved_buffers(passes.model):
        try:
            for parameter in parameters:
                parameter.grad = None
            yield parameters
        finally:
            passes.seeds.end()
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
            reshard(passes.model)


def _is_close(one: float, other: float, tolerance: float) -> bool:
    both_finite = math.isfinite(one) and math.isfinite(other)
    return not both_finite or math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance * 1e-2)


def _differs(where: str, one: float, other: float, what: str = "loss") -> str:
    return f"The {what} of the same samples differs {where} ({one:g} and {other:g}). {_REMEDY}"


def tolerance_of(model: nn.Module, step: StepInput) -> float:
    """The relative difference that rounding may explain: kernels choose the order of their sums by where a tensor lies
    in memory, and layers amplify what that changes."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if dtypes & {torch.bfloat16, torch.float16} or step.is_low_precision:
        return 0.1
    return 1e-9 if dtypes == {torch.float64} else 1e-3


def _samples_of_first(content: Any, group: dist.ProcessGroup) -> Any:
    """Samples like `content`, with the tensors of rank 0's; None where workers' samples differ in more than tensors."""
    own = list(tensors(content))
    is_plain = all(one.layout == torch.strided and not one.is_nested for one in own)
    around = zlib.crc32(repr(map_tensors(content, lambda one: one.new_empty(0))).encode())
    everyone = all_gather_objects([is_plain, around], group)
    if any(one != [True, everyone[0][1]] for one in everyone):
        return None
    sent = iter(broadcast_object([one.detach() for one in own], group))
    return map_tensors(content, lambda one: next(sent).to(one.device))
