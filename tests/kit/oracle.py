"""What a run has to learn: a plain PyTorch loop on one device, in float64, without a line of Paceline
but the rule which modules are blocks.

With one virtual shard this is the loop that everyone writes. With several it is the law of virtual shards, spelled out:
each begins with the step's buffers and with generators seeded for it, goes through the model alone, and counts by its
weight; and before a block of the model the generator is seeded for that block.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, default_collate

from paceline.parallel.blocks import blocks_of

Loss = Callable[[nn.Module, Any], "Tensor | tuple[Tensor, Tensor]"]
"""The mean over a batch's samples; or a mean and its weight, such as the number of tokens."""
Measure = Callable[[nn.Module, Any], Mapping[str, Any]]
"""For each metric one number a sample; or a mean and its weight; or what a `Metric` takes."""
Metric = tuple[Callable[..., Any], Callable[[Any, Any], Any], Callable[[Any], float]]
"""(update, merge, compute): a state of one batch, a state of two, the number of a state."""


@dataclass(frozen=True)
class Task:
    """What is trained, and by which rule. Its functions are those of modules, so that workers can be sent it."""

    model: Callable[[], nn.Module]
    loss: Loss
    data: Dataset[Any]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    measure: Measure | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    test_data: Dataset[Any] | None = None
    global_batch_size: int = 8
    virtual_shards: int = 4
    epochs: int = 2
    seed: int = 7
    clip_norm: float | None = None
    warmup_epochs: float = 0.0
    is_cosine: bool = False


@dataclass(frozen=True)
class Learned:
    """What must not depend on where a run happens."""

    losses: tuple[float, ...]
    """Of the global batch, for each step."""
    weights: Mapping[str, Tensor]
    """The state_dict: parameters and buffers."""
    metrics: Mapping[str, float] = field(default_factory=dict)


def order(seed: int, epoch: int, num_samples: int) -> list[int]:
    """The samples of an epoch; runs are given it as their sampler."""
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(1000 * seed + epoch)).tolist()


def cut(samples: Sequence[int], num_shards: int) -> list[Sequence[int]]:
    """The non-empty virtual shards of a global batch: sizes differ by one at most, larger ones first."""
    small, extra = divmod(len(samples), num_shards)
    starts = [shard * small + min(shard, extra) for shard in range(num_shards + 1)]
    return [samples[start:stop] for start, stop in itertools.pairwise(starts) if stop > start]


_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mixed_bits(*keys: int) -> int:
    """64 random bits that belong to these keys: SplitMix64 (Steele, Lea, Flood 2014) of one after the other."""
    state = 0
    for place, key in enumerate(keys, 1):
        state += (key + 1) * _GOLDEN if place == len(keys) else key + _GOLDEN
        state %= 2**64
        state = (state ^ (state >> 30)) * _MIX_1 % 2**64
        state = (state ^ (state >> 27)) * _MIX_2 % 2**64
        state ^= state >> 31
    return state


def mixed(*keys: int) -> int:
    """The seed that belongs to these keys."""
    return mixed_bits(*keys) >> 1


OF_SAMPLES, OF_SHARDS = 7, 8
"""Which uses of random numbers are kept apart: the reading of a sample, a shard's way through the model."""


def as_double(batch: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.double() if tensor.is_floating_point() else tensor for tensor in batch]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


_shard_seed = [0]
"""The seed of the virtual shard on its way through the model."""


def seed_blocks(model: nn.Module) -> None:
    """Let each block draw random numbers that belong to the shard and to the path of the block."""
    for path, block in blocks_of(model).items():
        number = int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest())
        block.register_forward_pre_hook(partial(_seed_block, number))


def _seed_block(number: int, *_given: Any) -> None:
    torch.manual_seed(mixed(_shard_seed[0], number))


def learn(task: Task, num_shards: int | None = None, orders: Sequence[Sequence[int]] = ()) -> Learned:
    """Train as `task` says.

    Args:
        num_shards: into how many a global batch is cut; None: as `task` says; 1: it goes through the model at once.
        orders: the samples of each epoch; empty: those of `order`.
    """
    model = task.model().double()
    seed_blocks(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = task.optimizer(trained)
    base_rates = [group["lr"] for group in optimizer.param_groups]
    num_samples = len(task.data)  # type: ignore[arg-type]
    losses: list[float] = []
    for epoch in range(task.epochs):
        samples = orders[epoch] if orders else order(task.seed, epoch, num_samples)
        for start in range(0, num_samples, task.global_batch_size):
            batch = samples[start : start + task.global_batch_size]
            optimizer.zero_grad()
            losses.append(add_gradients(task, model, batch, epoch, len(losses), num_shards or task.virtual_shards))
            gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
            if not all(map(math.isfinite, (losses[-1], *(float(one.sum()) for one in gradients)))):
                continue  # an update that is not finite is left out
            if task.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(trained, task.clip_norm)
            for group, rate in zip(optimizer.param_groups, base_rates, strict=True):
                group["lr"] = rate * rate_factor(task, epoch * num_samples + start, num_samples)
            optimizer.step()
    return Learned(tuple(losses), model.state_dict(), evaluate(task, model))


def add_gradients(task: Task, model: nn.Module, batch: Sequence[int], epoch: int, step: int, num_shards: int) -> float:
    """Put the gradient of a global batch into `.grad`, move the buffers, and return its loss."""
    begin = {name: buffer.clone() for name, buffer in model.named_buffers()}
    end = {name: buffer.clone() for name, buffer in model.named_buffers()}
    total, total_weight = 0.0, 0.0
    for shard, samples in enumerate(cut(batch, num_shards)):
        inputs = [read(task.data, sample, mixed(task.seed, OF_SAMPLES, epoch, sample)) for sample in samples]
        for name, buffer in model.named_buffers():
            buffer.copy_(begin[name])
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm1d):  # over a single value it uses its running statistics
                layer.train(len(samples) > 1)
        _shard_seed[0] = mixed(task.seed, OF_SHARDS, step, shard)
        seed_all(_shard_seed[0])
        found = task.loss(model, as_double(default_collate(inputs)))
        loss, weight = found if isinstance(found, tuple) else (found, torch.tensor(len(samples)))
        # Buffers count here, since a backward pass that repeats the forward pass (checkpointing) moves them again.
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                end[name] += len(samples) / len(batch) * (buffer - begin[name])
            elif shard == 0:
                end[name].copy_(buffer)
        if weight > 0:  # what counts for nothing may be the mean of nothing, NaN
            (weight * loss).backward()
            total += (weight * loss).item()
            total_weight += weight.item()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= total_weight
    for name, buffer in model.named_buffers():
        buffer.copy_(end[name])
    return total / total_weight


def read(data: Dataset[Any], sample: int, seed: int) -> Any:
    seed_all(seed)
    return data[sample]


def rate_factor(task: Task, samples_seen: int, num_samples: int) -> float:
    """What the learning rate is multiplied by: a schedule counts samples, a warm-up those to the end of the step."""
    decay = 0.5 * (1 + math.cos(math.pi * samples_seen / (task.epochs * num_samples))) if task.is_cosine else 1.0
    warmup = task.warmup_epochs * num_samples
    return decay if samples_seen >= warmup else decay * min(1.0, (samples_seen + task.global_batch_size) / warmup)


@torch.no_grad()
def evaluate(task: Task, model: nn.Module) -> dict[str, float]:
    """The mean of every metric over the test set, all of which goes through the model at once."""
    if task.measure is None or task.test_data is None:
        return {}
    inputs = [task.test_data[sample] for sample in range(len(task.test_data))]  # type: ignore[arg-type]
    everything = as_double(default_collate(inputs))
    found: dict[str, float] = {}
    for name, values in task.measure(copy.deepcopy(model).eval(), everything).items():
        if name in task.metrics:
            update, _, compute = task.metrics[name]
            found[name] = compute(update(*values))
        else:
            found[name] = float(values[0] if isinstance(values, tuple) else values.mean())
    return found
