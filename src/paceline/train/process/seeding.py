"""Seeds of the generators of Python, NumPy and torch that do not depend on which worker does the work."""

from __future__ import annotations

import torch

from paceline.data import random_streams
from paceline.data.counter_random import key
from paceline.parallel.generators import seed_generators


def shard_seed(seed: int, step: int, shard: int, nth: int = 0) -> int:
    """The seed of the generators for a virtual shard of a step: its dropout masks are its own.

    Args:
        step: the number of the global batch.
        nth: the number of the step among those on this batch.
    """
    own = key(seed, random_streams.LATER_STEP, nth, step) if nth else seed
    return key(own, random_streams.FORWARD, step, shard)


def seed_map(seed: int, step: int, nth: int, shard: int, device: torch.device) -> None:
    """Before a function is called with a virtual shard by `Batch.map`, and after all of them (-1).

    Args:
        step: the number of the global batch.
        nth: the number of this call of `map` on it.
    """
    seed_generators(key(key(seed, random_streams.IN_LOOP, nth, step), random_streams.IN_LOOP, step, shard), device)


def seed_between_steps(seed: int, step: int, device: torch.device, nth: int = 0) -> None:
    """After a step: what a script draws then must not depend on the shards that this worker has computed.

    Args:
        step: the number of global batches trained on.
        nth: how many steps have been made on the last of them, if there may be more; 0: it is done.
    """
    seed_generators(key(seed, random_streams.BETWEEN_STEPS, nth, step), device)


def seed_update(seed: int, index: int, device: torch.device, nth: int) -> None:
    """Before an optimizer that may draw random numbers: every worker makes the same update.

    Args:
        index: the number of the global batch.
        nth: the number of the step on it.
    """
    seed_generators(key(seed, random_streams.UPDATE, nth, index), device)


def seed_evaluation(seed: int, step: int, chunk: int, device: torch.device) -> None:
    """Before a chunk of an evaluation set is measured."""
    seed_generators(key(seed, random_streams.EVALUATION, step, chunk), device)
