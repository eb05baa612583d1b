"""Finds out whether a loss is a mean over its samples: if so, virtual shards may go through the model together.

A mean over valid tokens, a load-balancing term of a mixture of experts or a contrastive loss is not: then the loss of
two shards together is another number than the mean of their own losses, and the result would depend on how many shards
a worker computes. So where shards could go together for the first time, their loss is computed both ways.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from paceline.errors import ModelError
from paceline.parallel.losses import ShardLoss

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
"""The relative difference of two losses that rounding may explain."""
_LOW_PRECISION_TOLERANCE = 2e-3
_TF32_TOLERANCE = 2e-4


def tolerance(model: nn.Module, device: torch.device, loss_dtype: torch.dtype) -> float:
    """The relative difference between two ways to compute a loss that is put down to rounding; call it in the context
    of a forward pass (autocast)."""
    if torch.is_autocast_enabled(device.type):
        return _LOW_PRECISION_TOLERANCE
    dtypes = {loss_dtype, *(parameter.dtype for parameter in model.parameters())}
    if torch.float32 in dtypes and device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return _TF32_TOLERANCE
    return max(TOLERANCE.get(dtype, _LOW_PRECISION_TOLERANCE) for dtype in dtypes)


def check_repeatable(first: ShardLoss, again: ShardLoss, tolerance: float, made: Sequence[str] = ()) -> None:
    """
    Args:
        made: the names of what the first call made where nothing was, and another call made before the later one.

    Raises:
        ModelError: two calls of a loss function with the same samples and random numbers, and other calls in between,
            gave different losses.
    """
    before, now = float(first.mean), float(again.mean)
    is_known = math.isfinite(before) and math.isfinite(now)
    if not is_known or abs(before - now) <= tolerance * max(abs(before), abs(now)):
        return
    values = f" (the first call makes {', '.join(made)})" if made else ""
    raise ModelError(
        f"The loss of the same samples was {before:.6g} in one call of the loss function and {now:.6g} in a later one: "
        "it follows from what earlier calls left behind, such as a running mean of losses in an attribute, a variable "
        f"or a list{values}. Which calls a worker makes depends on the number of workers: return such a number beside "
        "the loss, and move the mean after run.step by run.values, the same on every worker; make before the first "
        "step what stays, of chosen samples, or by a generator with a seed."
    )


def describe_coupling(together: ShardLoss, singles: Sequence[ShardLoss], tolerance: float) -> str:
    """A sentence if a loss of several shards is not the weighted mean of theirs; else empty."""
    weights = [float(one.weight) for one in singles]
    losses = [float(one.mean.detach()) for one in singles]
    total, whole = sum(weights), float(together.mean.detach())
    if not total:
        return ""
    mean = sum(weight * loss for weight, loss in zip(weights, losses, strict=True) if weight) / total
    largest = max(abs(whole), *(abs(loss) for loss, weight in zip(losses, weights, strict=True) if weight))
    if not math.isfinite(whole):
        return ""
    if abs(float(together.weight) - total) > 1e-4 * total:
        return (
            f"The weight of {len(singles)} virtual shards together is {float(together.weight) / total:.4g} times the "
            "sum of their own weights, so every shard goes through the model alone, which gives the same result on any "
            "number of workers: a paceline.Mean over tokens has the number of tokens in its samples as its weight."
        )
    if math.isfinite(mean) and abs(whole - mean) <= tolerance * largest:
        return ""
    if are_zero([together, *singles]):
        return (
            f"The loss of {len(singles)} virtual shards together is 0 but for rounding ({whole:.2g}), as a policy's is "
            "in its first update, and does not show whether it is the mean of their own losses, so every shard goes "
            "through the model alone, which gives the same result on any number of workers."
        )
    return (
        f"The loss of {len(singles)} virtual shards together, {whole:.6g}, is not the mean of their own losses, "
        f"{mean:.6g}, so every shard goes through the model alone, which gives the same result on any number of "
        "workers: if it is a mean over valid tokens, return paceline.Mean(loss, weight=number of tokens), or with "
        "weights for classes their sum; if a term couples samples (a mixture of experts' aux_loss, a contrastive "
        "loss), shard_by_shard = true says so."
    )


def are_zero(losses: Sequence[ShardLoss]) -> bool:
    """Whether losses are 0 but for rounding, so that their differences show nothing."""
    return all(abs(float(one.mean.detach())) <= torch.finfo(one.mean.dtype).eps for one in losses)


AUX_LOSS = (
    "The model returns an aux_loss (output_router_logits), which couples the samples of a batch, so every virtual "
    "shard goes through the model alone, which gives the same result on any number of workers; shard_by_shard = true "
    "says so."
)


def returns_aux_loss(outputs: Sequence[object]) -> bool:
    """Whether a model's output has a loss of its router, as the mixtures of experts of transformers do."""
    return any(getattr(output, "aux_loss", None) is not None for output in outputs)


def needs_gradients(problem: BaseException) -> bool:
    """Whether an error says that autograd records nothing where a loss function or a model needs it to: for a gradient
    penalty or an adversarial sample, or for `register_hook` and `retain_grad` on a tensor."""
    return isinstance(problem, RuntimeError) and re.search("requires?[ _]grad", str(problem)) is not None


@contextmanager
def leaving_no_trace(model: nn.Module, device: torch.device, *, with_gradients: bool = False) -> Iterator[None]:
    """A context in which the model computes without gradients; random generators are afterwards as before.

    A compiled model runs uncompiled, because it would be compiled again for this.

    Args:
        with_gradients: whether autograd records all the same, for a loss function that differentiates.
    """
    compiled = model.__dict__.get("_compiled_call_impl")
    if compiled is not None:
        model._compiled_call_impl = None
    numpy_state, python_state = np.random.get_state(), random.getstate()
    devices = [device] if device.type == "cuda" else []
    try:
        with (
            torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"),
            torch.set_grad_enabled(with_gradients),
        ):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        if compiled is not None:
            model._compiled_call_impl = compiled
