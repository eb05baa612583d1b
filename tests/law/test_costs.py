"""What a worker sends in a step, what it holds, and what it asks of torch: the table of docs/strategies.md, in bytes.

Bytes are counted by the kernel, for each TCP connection of a worker. There is one virtual shard for each worker that
divides the batch, so a step is one pass; stages have four, and so has zero1, which sends once a step.
"""

from __future__ import annotations

import functools
import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.kit import losses, models, step_costs
from tests.kit.engines import ENGINES, Engine
from tests.kit.oracle import Task
from tests.kit.train import PATIENCE_S, init, prepare
from tests.kit.workers import run_ranks
from tests.law.matrix import cells
from tests.law.tasks import rows

WIDTH, BATCH_SIZE = 128, 64
WHOLE = 8 * (3 * WIDTH * (WIDTH + 1) + models.NUM_CLASSES * (WIDTH + 1))
"""Bytes of the model's parameters, and so of its gradient, in float64."""
PAIR = 8 * 2 * WIDTH * (WIDTH + 1)
"""Bytes of the first two layers: those that `TENSOR_PLAN` divides, and the larger one of two stages."""
SLICE = WHOLE - PAIR // 2 + 8 * WIDTH // 2
"""Bytes of a worker of two that divide these; the second one's bias stays whole."""
ACTIVATIONS = 8 * WIDTH * BATCH_SIZE
"""Bytes of the activations between two layers, for the whole batch."""
TASK = Task(
    functools.partial(models.layers, width=WIDTH),
    losses.classes,
    rows(8 * BATCH_SIZE, WIDTH),
    functools.partial(torch.optim.Adam, lr=0.001),
    global_batch_size=BATCH_SIZE,
    epochs=1,
)
FIRST_STEP, LAST_STEP = 5, 7
"""The steps whose bytes are counted: the first ones, and the last one of the run, may also compare workers."""
ROUNDING, MESSAGES = 1.01, 8192
"""How much more may be sent, in proportion and in bytes: the headers of messages, and a step's loss and status."""


def all_reduce(degree: int, num_bytes: float) -> float:
    """Bytes that each worker sends (Patarasuk and Yuan 2009); over Gloo those of a reduce-scatter too."""
    return 2 * gather(degree, num_bytes)


def gather(degree: int, num_bytes: float) -> float:
    """Bytes that each worker sends so that all have the whole of `num_bytes`."""
    return (degree - 1) / degree * num_bytes


@dataclass(frozen=True)
class Costs:
    """Of the busiest, and of the fullest worker, in bytes."""

    sent: float
    """In a step."""
    parameters: float
    gradients: float
    state: float
    """Of Adam: two numbers for each parameter."""


def spread(sent: float, part: float = WHOLE, **others: float) -> Costs:
    """Of workers that hold this part of everything, but for the others named."""
    return replace(Costs(sent, part, part, 2 * part), **others)


def sharded(degree: int, part: float) -> float:
    """Bytes that a worker sends in a pass over sharded parameters: gathered twice, gradients summed once."""
    return 2 * gather(degree, part) + all_reduce(degree, part)


STAGE = spread(ACTIVATIONS, PAIR)
ZERO = spread(gather(2, WHOLE) + all_reduce(2, WHOLE), WHOLE, state=WHOLE)
COSTS = {
    "one worker": spread(0),
    "one process": spread(0),
    "dp on 2": spread(all_reduce(2, WHOLE)),
    "dp on 3": spread(all_reduce(3, WHOLE)),
    "dp, bitwise": spread(all_reduce(2, WHOLE)),
    "zero1": ZERO,
    "zero2": replace(ZERO, gradients=WHOLE / 2),
    "fsdp": spread(sharded(2, WHOLE), WHOLE / 2),
    "fsdp, bitwise": spread(sharded(2, WHOLE), WHOLE / 2),
    "hsdp": spread(sharded(2, WHOLE) + all_reduce(2, WHOLE / 2), WHOLE / 2),
    "pp, gpipe": STAGE,
    "pp, 1f1b": STAGE,
    # The first worker's stages send activations twice and gradients once.
    "pp, interleaved": replace(STAGE, sent=3 * ACTIVATIONS),
    "pp, zero_bubble": STAGE,
    "tp": spread(all_reduce(2, ACTIVATIONS), SLICE),
    "fsdp x tp": spread(sharded(2, SLICE) + all_reduce(2, ACTIVATIONS / 2), SLICE / 2),
    "dp x pp": replace(STAGE, sent=all_reduce(2, PAIR) + ACTIVATIONS / 2),
    "local_sgd": spread(all_reduce(2, WHOLE)),
    "diloco": spread(all_reduce(2, WHOLE)),
    "asynchronous": spread(0),
}


def measure(engine: Engine) -> Costs:
    """Train `TASK`, and see what this worker sends and holds."""
    num_shards = engine.mesh.get("dp", 1) * engine.mesh.get("fsdp", 1) if engine.mesh else engine.num_workers
    num_shards = 4 if engine.has_stages or engine.mesh.get("zero_stage") == 1 else num_shards
    sent = []
    with init(engine, TASK, virtual_shards=num_shards) as run:
        prepare(run, engine, TASK)
        for batch in run.batches(TASK.data):
            float(run.step(batch, TASK.loss))  # type: ignore[arg-type]
            sent.append(written_bytes())
        parameters = list(run.model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        state = [value for values in run.optimizer.state.values() for value in values.values()]
        return Costs(
            (sent[LAST_STEP - 1] - sent[FIRST_STEP - 2]) / (LAST_STEP - FIRST_STEP + 1),
            *(held_bytes(tensors) for tensors in (parameters, gradients, state)),
        )


def held_bytes(tensors: Iterable[Tensor]) -> int:
    return sum((one.to_local() if isinstance(one, DTensor) else one).nbytes for one in tensors if one.ndim)


def written_bytes() -> int:
    """Bytes written so far into all open TCP connections of this process."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            one = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # no socket
            continue
        with one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                # struct tcp_info of <linux/tcp.h>: tcpi_notsent_bytes; tcpi_bytes_sent, tcpi_bytes_retrans.
                facts = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216)
                (waiting,) = struct.unpack_from("I", facts, 144)
                sent, repeated = struct.unpack_from("QQ", facts, 200)
                total += sent - repeated + waiting
    return total


@functools.cache
def costs_of(engine_name: str) -> list[Costs]:
    engine = ENGINES[engine_name]
    return run_ranks(measure, engine.num_workers, engine, timeout_s=PATIENCE_S)


@pytest.mark.parametrize(("engine_name", "name"), cells("bytes sent"))
def test_a_worker_sends_what_the_formula_of_its_strategy_says(engine_name: str, name: str) -> None:
    right = COSTS[engine_name].sent
    found = max(costs.sent for costs in costs_of(engine_name))
    assert right <= found <= ROUNDING * right + MESSAGES


@pytest.mark.parametrize(("engine_name", "name"), cells("memory"))
def test_a_worker_holds_its_part_and_no_more(engine_name: str, name: str) -> None:
    right = COSTS[engine_name]
    for found in costs_of(engine_name):
        assert 0 < found.parameters <= ROUNDING * right.parameters
        assert found.gradients <= ROUNDING * right.gradients
        assert found.state <= ROUNDING * right.state


MOST_OPERATORS = 1.1
"""How many operators of torch a step may have for each one of a plain loop over the same shards."""


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("model", ["lenet", "resnet20", "gpt"])
def test_a_step_asks_torch_for_hardly_more_than_a_plain_loop_over_its_shards(model: str, num_workers: int) -> None:
    for loop, step in run_ranks(step_costs.count, num_workers, model, 8, 16, timeout_s=PATIENCE_S):
        assert step.total() <= MOST_OPERATORS * loop.total(), step - loop
