"""Servers for asynchronous training: each shard counts once and is as late as allowed, though workers die, are
slow or deliver twice; slices of the parameters are updated as the whole would be."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from paceline.comm.fixed_tree import aligned_blocks
from paceline.comm.parameter_server_async.ledger import Ledger
from paceline.comm.parameter_server_async.messages import Task
from paceline.comm.parameter_server_async.server import ParameterSlice, spans

UNTIL = 4  # batches that are trained
DISTURBED = 150  # actions in which anything may happen; after them nothing goes wrong but that leases run out


@given(st.integers(0, 10**6), st.integers(0, 3), st.integers(1, 7), st.integers(1, 3))
def test_each_shard_counts_once_though_workers_die_are_slow_or_deliver_twice(
    seed: int, staleness: int, num_shards: int, num_servers: int
) -> None:
    """A shard's gradient is -1, so that the parameter tells how many have been counted."""
    pick, now_s, next_worker = random.Random(seed), 0.0, 3
    ledger = Ledger(lambda _batch: num_shards, staleness, lease_s=12.0)
    zero = [nn.Parameter(torch.zeros(1))]
    servers = [
        ParameterSlice(SGD(zero, lr=1.0), (0, 1), lambda _batch: num_shards, lambda _batch: 1.0, first_batch=0)
        for _ in range(num_servers)
    ]
    held: dict[int, tuple[Task, list[bool]] | None] = dict.fromkeys(range(3))  # and what servers said of the task
    for number in count():
        if ledger.finished == UNTIL:
            break
        assert number < 20 * DISTURBED, "there is no end"
        is_calm = number >= DISTURBED
        worker, chance = pick.choice(sorted(held)), pick.random()
        if chance < 0.16 and (chance < 0.02 or not is_calm):
            now_s += 5.0
            ledger.expire(now_s)
        elif chance < 0.24 and not is_calm:  # it dies, perhaps between two deliveries, and a new one comes
            del held[worker]
            ledger.give_back(worker)
            held[next_worker] = None
            next_worker += 1
        elif (work := held[worker]) is None:
            task = ledger.take(worker, 4 if is_calm else pick.randint(1, 4), UNTIL, now_s)
            held[worker] = (task, []) if task else None
            assert task is None or ledger.finished <= task.batch <= ledger.finished + staleness < UNTIL + staleness
        elif len(work[1]) < num_servers:
            task, said = work
            blocks = aligned_blocks(task.start, task.stop)
            sums = [torch.full((1,), -float(size)) for _, size in blocks]
            version = max(0, task.batch - staleness)
            said.append(servers[len(said)].push(task.batch, version, 0, blocks, sums, torch.tensor([True])))
        else:
            ledger.finish(work[0], all(work[1]))
            held[worker] = None
        for server in servers:
            values = server.pull(ledger.finished)
            assert values is not None and values.item() == ledger.finished * num_shards


@pytest.mark.parametrize(("kind", "options"), [(SGD, {"momentum": 0.9, "weight_decay": 0.1}), (AdamW, {})])
@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=4), num_servers=st.integers(1, 3))
def test_slices_are_updated_as_the_whole_in_whichever_order_gradients_come(
    kind: Callable[..., Optimizer], options: dict[str, float], sizes: list[int], num_servers: int
) -> None:
    generator = torch.Generator().manual_seed(3)
    whole = [nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]
    gradients = torch.randn(4, sum(sizes), generator=generator)
    optimizer = kind(whole, lr=0.1, **options)

    def step(batch: int) -> None:
        for parameter, part in zip(whole, gradients[batch].split(sizes), strict=True):
            parameter.grad = part.clone()
        optimizer.step()

    step(0)  # slices take over a state that is there already
    cuts = spans(sum(sizes), num_servers)
    assert max(stop - start for start, stop in cuts) - min(stop - start for start, stop in cuts) <= 1
    servers = [ParameterSlice(optimizer, cut, lambda _batch: 1, lambda _batch: 1.0, first_batch=1) for cut in cuts]
    for batch in (2, 3, 1):
        for cut, server in zip(cuts, servers, strict=True):
            part = gradients[batch][slice(*cut)].clone()
            assert server.push(batch, batch, 1, [(0, 1)], [part], torch.ones(len(sizes), dtype=torch.bool))
    for batch in (1, 2, 3):
        step(batch)
    sliced = [server.pull(4) for server in servers]
    assert torch.equal(torch.cat([part for part in sliced if part is not None]), torch.cat([p.data for p in whole]))
