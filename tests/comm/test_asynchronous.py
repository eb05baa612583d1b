"""Servers for asynchronous training: each shard counts once and is as late as allowed, though workers die, are
slow or deliver twice; parts of the parameters are updated as the whole would be."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from paceline.comm.asynchronous.ledger import Ledger, ShardSum, Task
from paceline.comm.asynchronous.server import ParameterServer, Push, divide
from tests.comm.test_tree import tree_of

UNTIL = 4  # batches that are trained
DISTURBED = 150  # actions in which anything may happen; after them nothing goes wrong but that leases run out


def push_of(task: Task, version: int, gradient: Tensor, weight: float = 1.0) -> Push:
    return Push(task, version, 0, gradient, (), weight, is_weighted=False)


@given(st.integers(0, 10**6), st.integers(0, 3), st.integers(1, 7), st.integers(1, 3))
def test_each_shard_counts_once_though_workers_die_are_slow_or_deliver_twice(
    seed: int, staleness: int, num_shards: int, num_servers: int
) -> None:
    """A shard's gradient is -1, so that the parameter tells how many have been counted."""
    pick, now_s, next_worker = random.Random(seed), 0.0, 3
    ledger = Ledger(lambda _batch: num_shards, staleness, lease_s=12.0)
    zero = [nn.Parameter(torch.zeros(1))]
    servers = [
        ParameterServer(SGD(zero, lr=1.0), range(1), lambda _batch: num_shards, lambda _batch: 1.0, first_batch=0)
        for _ in range(num_servers)
    ]
    held: dict[int, tuple[Task, int] | None] = dict.fromkeys(range(3))  # and how many servers have the shard
    for number in count():
        if ledger.finished == UNTIL:
            break
        assert number < 20 * DISTURBED, "there is no end"
        is_calm = number >= DISTURBED
        worker, chance = pick.choice(sorted(held)), pick.random()
        if chance < 0.16 and (chance < 0.02 or not is_calm):
            now_s += 5.0
        elif chance < 0.24 and not is_calm:  # it dies, perhaps between two deliveries, and a new one comes
            del held[worker]
            ledger.give_back(worker)
            held[next_worker] = None
            next_worker += 1
        elif (work := held[worker]) is None:
            task = ledger.take(worker, UNTIL, now_s)
            held[worker] = (task, 0) if task else None
            assert task is None or ledger.finished <= task.batch <= ledger.finished + staleness < UNTIL + staleness
        elif work[1] < num_servers:
            task, num_sent = work
            servers[num_sent].push(push_of(task, max(0, task.batch - staleness), -torch.ones(1)))
            held[worker] = task, num_sent + 1
        else:
            ledger.arrive(work[0])
            held[worker] = None
        for server in servers:
            values = server.pull(ledger.finished)
            assert values is not None and values.item() == ledger.finished * num_shards


@given(num_shards=st.integers(1, 20), seed=st.integers(0, 2**31))
def test_a_sum_has_the_bits_of_the_tree_in_any_order_with_any_repeats(num_shards: int, seed: int) -> None:
    shards = torch.randn(num_shards, 3, generator=torch.Generator().manual_seed(seed))
    order = [*range(num_shards), *range(0, num_shards, 2)]
    random.Random(seed).shuffle(order)
    total = ShardSum(num_shards)
    for shard in order:
        total.add(shard, shards[shard].clone())
    assert total.is_complete
    assert torch.equal(total.total(), tree_of(shards))


@pytest.mark.parametrize(
    ("kind", "options"), [(SGD, {"momentum": 0.9, "weight_decay": 0.1}), (AdamW, {}), (Adafactor, {})]
)
@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=4), num_servers=st.integers(1, 3))
def test_parts_are_updated_as_the_whole_in_whichever_order_gradients_come(
    kind: Callable[..., Optimizer], options: dict[str, float], sizes: list[int], num_servers: int
) -> None:
    generator = torch.Generator().manual_seed(3)
    whole = [nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]
    gradients = torch.randn(5, sum(sizes), generator=generator)
    optimizer = kind(whole, lr=0.1, **options)

    def step(batch: int) -> None:
        for parameter, part in zip(whole, gradients[batch].split(sizes), strict=True):
            parameter.grad = part.clone()
        optimizer.step()

    step(0)  # servers take over a state that is there already
    held = divide(sizes, num_servers)
    assert [number for numbers in held for number in numbers] == list(range(len(sizes)))
    servers = [
        ParameterServer(optimizer, numbers, lambda _batch: 1, lambda _batch: 1.0, first_batch=1) for numbers in held
    ]
    for batch in (2, 3, 4, 1):
        weight = torch.nan if batch == 3 else 1.0  # no update is made by this batch
        parts = gradients[batch].split([sum(sizes[one.start : one.stop]) for one in held])
        for server, part in zip(servers, parts, strict=True):
            server.push(push_of(Task(batch, 0), batch, part.clone(), weight))
    for batch in (1, 2, 4):
        step(batch)
    pulled = [server.pull(5) for server in servers]
    assert torch.equal(torch.cat([part for part in pulled if part is not None]), torch.cat([p.data for p in whole]))
    states = [state for server in servers for state in server.state()]
    assert str(states) == str([optimizer.state[parameter] for parameter in whole])
