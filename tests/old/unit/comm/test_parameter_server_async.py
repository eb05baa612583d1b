"""The bookkeeping of asynchronous training: every shard counted once, whoever dies, dawdles or delivers twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from paceline.comm.fixed_tree import Block, TreeSum, aligned_blocks, finish_tree
from paceline.comm.parameter_server_async.ledger import Ledger, ShardSum
from paceline.comm.parameter_server_async.messages import ParameterRange, Task
from paceline.comm.parameter_server_async.node import NodeWorkers, ShardResult
from paceline.comm.parameter_server_async.server import ParameterSlice, late_momentum, ranges_in, spans
from paceline.comm.parameter_server_async.worker import ParameterServerAsync


def leaf(shard: int) -> Tensor:
    return torch.randn(9, generator=torch.Generator().manual_seed(shard))


def run_sums(start: int, stop: int) -> tuple[list[Block], list[Tensor]]:
    tree = TreeSum(start)
    for shard in range(start, stop):
        tree.push(leaf(shard))
    return tree.blocks, tree.partials


@given(num_shards=st.integers(1, 20), seed=st.integers(0, 1000))
def test_a_sum_has_the_bits_of_the_tree_in_any_order_with_any_repeats(num_shards: int, seed: int) -> None:
    pick = random.Random(seed)
    runs = []
    for _ in range(8):
        start, stop = sorted((pick.randint(0, num_shards), pick.randint(0, num_shards)))
        runs.append((start, stop))
    runs += [(shard, shard + 1) for shard in range(num_shards)]
    pick.shuffle(runs)
    total = ShardSum(num_shards)
    arrived: set[int] = set()
    for start, stop in runs:
        blocks, sums = run_sums(start, stop)
        for first, size in blocks:  # the whole block counts or nothing of it
            if arrived.isdisjoint(range(first, first + size)):
                arrived.update(range(first, first + size))
        assert total.add(blocks, sums) == arrived.issuperset(range(start, stop))
        assert total.is_complete == (len(arrived) == num_shards)
    expected = finish_tree({(shard, 1): leaf(shard) for shard in range(num_shards)}, num_shards)
    assert torch.equal(total.total(), expected)


@dataclass
class Workers:
    """A world of workers and servers in which anything may happen at any time, by the choices of `pick`."""

    pick: random.Random
    ledger: Ledger
    staleness: int
    num_shards: int
    until: int
    servers: list[dict[int, ShardSum]]
    now_s: float = 0.0
    next_worker: int = 3
    tasks: dict[int, tuple[Task, list[int]] | None] = field(default_factory=lambda: {0: None, 1: None, 2: None})
    """Of every living worker its task, and the servers that have not got it yet."""

    def act(self, calm: bool) -> None:
        worker = self.pick.choice(sorted(self.tasks))
        held = self.tasks[worker]
        chance = 1.0 if calm else self.pick.random()
        if chance < 0.08:  # dies, perhaps in the middle of a delivery, and a new one comes
            del self.tasks[worker]
            self.ledger.give_back(worker)
            self.tasks[self.next_worker] = None
            self.next_worker += 1
        elif chance < 0.16:
            self.wait(5.0)
        elif held is None:
            self.take(worker, most=4 if calm else self.pick.randint(1, 4))
        elif held[1]:
            self.push(*held)
        else:
            self.finish(worker, held[0])

    def wait(self, duration_s: float) -> None:
        self.now_s += duration_s
        self.ledger.expire(self.now_s)

    def take(self, worker: int, most: int) -> None:
        task = self.ledger.take(worker, most, self.until, self.now_s)
        if task is None:
            return
        assert 0 <= task.start < task.stop <= self.num_shards
        assert self.ledger.finished <= task.batch <= min(self.ledger.finished + self.staleness, self.until - 1)
        order = list(range(len(self.servers)))
        self.pick.shuffle(order)
        self.tasks[worker] = task, order

    def push(self, task: Task, remaining: list[int]) -> None:
        server = self.servers[remaining.pop()]
        blocks = aligned_blocks(task.start, task.stop)
        of_batch = server.setdefault(task.batch, ShardSum(self.num_shards))
        of_batch.add(blocks, [torch.ones(1) * size for _, size in blocks])

    def finish(self, worker: int, task: Task) -> None:
        blocks = aligned_blocks(task.start, task.stop)
        nothing = [torch.zeros(1)] * len(blocks)
        self.ledger.finish(task, all(server[task.batch].add(blocks, nothing) for server in self.servers))
        self.tasks[worker] = None
        for batch in range(self.ledger.finished):
            assert all(server[batch].is_complete for server in self.servers)


@given(
    seed=st.integers(0, 10**6),
    staleness=st.integers(0, 3),
    num_shards=st.integers(1, 7),
    num_servers=st.integers(1, 3),
)
@settings(deadline=None, max_examples=200)
def test_all_batches_end_with_every_shard_counted_once(
    seed: int, staleness: int, num_shards: int, num_servers: int
) -> None:
    until = 4
    ledger = Ledger(lambda _batch: num_shards, staleness, lease_s=12.0)
    servers: list[dict[int, ShardSum]] = [{} for _ in range(num_servers)]
    workers = Workers(random.Random(seed), ledger, staleness, num_shards, until, servers)
    for _ in range(150):
        workers.act(calm=False)
    # From here on nothing goes wrong but that leases run out, and all take what they can: there is an end.
    for _ in range(4000):
        if ledger.finished == until:
            break
        workers.act(calm=True)
        if workers.pick.random() < 0.02:
            workers.wait(13.0)
    assert ledger.finished == until
    for server in servers:
        for batch in range(until):
            assert server[batch].total().item() == num_shards


def test_work_is_given_out_in_order_and_no_further_than_the_bound() -> None:
    ledger = Ledger(lambda _batch: 3, staleness=1, first_batch=5)
    taken = [ledger.take(0, 2, 100, 0.0) for _ in range(5)]
    tasks = [task for task in taken if task is not None]
    assert [(task.batch, task.start, task.stop) for task in tasks] == [(5, 0, 2), (5, 2, 3), (6, 0, 2), (6, 2, 3)]
    for task in (tasks[0], tasks[2], tasks[3]):
        ledger.finish(task, arrived=True)
    assert ledger.finished == 5
    assert ledger.take(0, 2, 100, 0.0) is None
    ledger.finish(tasks[1], arrived=True)
    assert ledger.finished == 7


def test_what_comes_after_its_lease_counts_and_is_not_given_out_again() -> None:
    ledger = Ledger(lambda _batch: 2, staleness=0, lease_s=10.0)
    late = ledger.take(0, 1, 9, now_s=0.0)
    assert late is not None
    ledger.expire(10.0)
    again = ledger.take(1, 1, 9, now_s=10.0)
    assert again is not None
    assert again.shards == late.shards
    ledger.finish(late, arrived=True)
    ledger.give_back(1)
    other = ledger.take(2, 2, 9, now_s=11.0)
    assert other is not None
    assert other.shards == range(1, 2)


def test_what_a_dead_worker_left_on_a_server_does_not_block_a_node_that_sums_more() -> None:
    ledger, server = Ledger(lambda _batch: 2, staleness=0), ShardSum(2)
    dead = ledger.take(0, 1, 9, 0.0)
    assert dead is not None
    assert server.add([(0, 1)], [torch.ones(1)])
    ledger.give_back(0)
    taken: list[range] = []
    while ledger.finished == 0 and len(taken) < 5:
        task = ledger.take(1, 2, 9, 0.0)
        assert task is not None
        taken.append(task.shards)
        blocks = aligned_blocks(task.start, task.stop)
        ledger.finish(task, server.add(blocks, [torch.ones(1) * size for _, size in blocks]))
    assert [(shards.start, shards.stop) for shards in taken] == [(0, 2), (0, 1), (1, 2)]
    assert server.total().item() == 2.0


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(1, 5))
def test_slices_are_equal_and_hold_every_element_once(sizes: list[int], num_servers: int) -> None:
    cuts = spans(sum(sizes), num_servers)
    lengths = [stop - start for start, stop in cuts]
    assert max(lengths) - min(lengths) <= 1
    found = [piece for span in cuts for piece in ranges_in(sizes, span)]
    elements = [(piece.parameter, at) for piece in found for at in range(piece.start, piece.stop)]
    assert elements == [(parameter, at) for parameter, size in enumerate(sizes) for at in range(size)]


def make_parameters(sizes: list[int]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]


def values_after(server: ParameterSlice, num_updates: int) -> Tensor:
    found = server.pull(num_updates)
    assert found is not None
    return found


@pytest.mark.parametrize(("kind", "options"), [(SGD, {"momentum": 0.9, "weight_decay": 0.1}), (AdamW, {})])
@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=4), num_servers=st.integers(1, 3))
@settings(deadline=None, max_examples=30)
def test_slices_update_as_the_whole(
    kind: Callable[..., Optimizer], options: dict[str, float], sizes: list[int], num_servers: int
) -> None:
    whole = make_parameters(sizes)
    optimizer = kind(whole, lr=0.1, **options)
    num_elements = sum(sizes)
    gradients = [torch.randn(num_elements, generator=torch.Generator().manual_seed(k)) for k in range(4)]

    def step(gradient: Tensor) -> None:
        for parameter, part in zip(whole, gradient.split(sizes), strict=True):
            parameter.grad = part.clone()
        optimizer.step()

    step(gradients[0])  # slices take over a state that is there already
    servers = [
        (span, ParameterSlice(optimizer, span, lambda _batch: 1, lambda _batch: 1.0, first_batch=1))
        for span in spans(num_elements, num_servers)
    ]
    used = torch.ones(len(sizes), dtype=torch.bool)
    for batch in (2, 3, 1):  # they come in any order and count in the right one
        for (start, stop), server in servers:
            assert server.push(batch, batch, 1, [(0, 1)], [gradients[batch][start:stop].clone()], used)
    for batch in (1, 2, 3):
        step(gradients[batch])
    sliced = torch.cat([values_after(server, 4) for _, server in servers])
    assert torch.equal(sliced, torch.cat([p.detach() for p in whole]))


def test_values_stay_until_nobody_needs_them() -> None:
    parameters = make_parameters([5])
    optimizer = SGD(parameters, lr=1.0)
    server = ParameterSlice(optimizer, (0, 5), lambda _batch: 2, lambda batch: 1.0 / (batch + 1), first_batch=0)

    def push(batch: int, shard: int, oldest: int) -> bool:
        return server.push(batch, batch, oldest, [(shard, 1)], [torch.ones(5)], torch.tensor([True]))

    start = parameters[0].detach()
    assert push(0, 0, 0)
    assert push(0, 0, 0)  # once more: counts once
    assert server.pull(1) is None  # no update yet
    assert push(0, 1, 0)
    assert torch.equal(values_after(server, 0), start)
    assert torch.equal(values_after(server, 1), start - 2)
    assert push(0, 1, 1)  # late: it is in already, and nothing happens
    assert server.pull(0) is None
    assert push(1, 0, 1)
    assert push(1, 1, 1)
    assert torch.equal(values_after(server, 2), start - 2 - 1)  # the rate was halved


def test_a_server_says_when_it_could_not_count_all_shards() -> None:
    """The ledger gives them out again then; told otherwise, everybody would wait for the batch for ever."""
    server = ParameterSlice(
        SGD(make_parameters([5]), lr=1.0), (0, 5), lambda _batch: 2, lambda _batch: 1.0, first_batch=0
    )
    used = torch.tensor([True])
    assert server.push(0, 0, 0, [(1, 1)], [torch.ones(5)], used)
    assert not server.push(0, 0, 0, [(0, 2)], [torch.ones(5)], used)  # of a worker that was given both earlier
    assert server.push(0, 0, 0, [(0, 1)], [torch.ones(5)], used)


def test_a_block_that_overlaps_what_came_before_is_refused_as_a_whole() -> None:
    total = ShardSum(4)
    assert total.add([(1, 1)], [torch.ones(1)])
    assert not total.add([(0, 2)], [torch.full((1,), 50.0)])
    assert total.add([(0, 1)], [torch.ones(1)])
    assert total.add([(2, 2)], [torch.full((1,), 2.0)])
    assert total.add([(0, 2)], [torch.full((1,), 50.0)])
    assert total.total().item() == 4.0


def test_one_worker_is_a_node_of_its_own() -> None:
    node = NodeWorkers([4], 4, None)
    assert node.leads
    assert node.on_leader(lambda: "said") == "said"
    result = node.add(3, ShardResult(torch.ones(2), torch.tensor([True]), torch.zeros(1)))
    assert result is not None
    assert result.blocks == ((3, 1),)


def test_optimizer_state_of_a_parameter_in_channels_last_comes_back() -> None:
    parameter = nn.Parameter(torch.randn(6, 1, 5, 5).to(memory_format=torch.channels_last))
    optimizer = SGD([parameter], lr=0.1, momentum=0.9)
    worker = object.__new__(ParameterServerAsync)
    worker._parameters, worker._optimizer = [parameter], optimizer
    values = torch.arange(150.0)
    for start, stop in ((0, 70), (70, 150)):
        worker._put_back(ParameterRange(0, start, stop), {"momentum_buffer": values[start:stop]})
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"].flatten(), values)


def _distance_after(num_updates: int, lateness: int, *, is_told: bool) -> float:
    """From the minimum of a parabola, where it begins at 1; each gradient is `lateness` updates late."""
    parameters = [nn.Parameter(torch.ones(1, dtype=torch.float64))]
    optimizer = SGD(parameters, lr=0.05, momentum=0.9)
    server = ParameterSlice(optimizer, (0, 1), lambda _batch: 1, lambda _batch: 1.0, first_batch=0)
    for batch in range(num_updates):
        version = max(0, batch - lateness)
        values = values_after(server, version)
        told = version if is_told else batch
        assert server.push(batch, told, version, [(0, 1)], [values.clone()], torch.tensor([True]))
    return abs(float(values_after(server, num_updates)))


def test_momentum_falls_where_gradients_are_late() -> None:
    assert _distance_after(200, lateness=4, is_told=False) > 10  # it diverges
    assert _distance_after(200, lateness=4, is_told=True) < 1e-2
    assert _distance_after(200, lateness=0, is_told=True) == _distance_after(200, lateness=0, is_told=False)


@given(momentum=st.floats(0.01, 0.999), lateness=st.integers(0, 100))
def test_late_momentum_spreads_a_gradient_over_fewer_updates(momentum: float, lateness: int) -> None:
    found = late_momentum(momentum, lateness)
    assert 0 < found <= momentum
    assert found / (1 - found) * (1 + lateness) == pytest.approx(momentum / (1 - momentum))
