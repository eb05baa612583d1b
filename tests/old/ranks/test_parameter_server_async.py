"""Asynchronous training by real worker processes: the same bits on any number of them, and it survives its workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore, HashStore, Store  # type: ignore[attr-defined]
from torch.optim import SGD, AdamW, Optimizer

from paceline import env
from paceline.comm.fixed_tree import TreeSum
from paceline.comm.parameter_server_async import ParameterServerAsync, ServerSettings, UpdateSchedule
from paceline.comm.parameter_server_async.server import late_momentum
from paceline.errors import JobError, ModelError, PeerLost
from paceline.spec import Plan
from paceline.train.process.process_group import join, leave
from tests.kit.workers import run_ranks

pytestmark = pytest.mark.slow

MakeOptimizer = Callable[[nn.Module], Optimizer]
TERMS = ServerSettings(staleness=0, num_servers=1, timeout_s=20)
NUM_BATCHES = 6
REST_AT = 2
"""The batch before which all workers pause in `_train`."""


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return AdamW(groups)


def lbfgs(model: nn.Module) -> Optimizer:
    return torch.optim.LBFGS(model.parameters())


class Net(nn.Module):
    """Sizes that divide by nothing, a parameter that nobody uses and one that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.hidden = nn.Linear(7, 37)
        self.unused = nn.Parameter(torch.ones(11))
        self.extra = nn.Parameter(torch.ones(()))
        self.out = nn.Linear(37, 3)

    def forward(self, inputs: Tensor, with_extra: bool) -> Tensor:
        hidden = self.hidden(inputs).tanh()
        logits: Tensor = self.out(hidden * self.extra if with_extra else hidden)
        return logits


def num_shards(batch: int) -> int:
    return 5 if batch % 3 else 4


COURSE = UpdateSchedule(num_shards, lr_factor=lambda batch: 1 / (1 + batch))


def compute_with(model: nn.Module) -> Callable[[int, int], Tensor]:
    """The gradient of a shard: a function of its numbers and the parameters alone."""

    def compute(batch: int, shard: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * batch + shard)
        inputs = torch.randn(6, 7, generator=generator)
        targets = torch.randint(3, (6,), generator=generator)
        loss = nn.functional.cross_entropy(model(inputs, with_extra=batch % 2 == 1), targets) / num_shards(batch)
        loss.backward()
        return loss.detach().view(1)

    return compute


def bits_of(model: nn.Module) -> list[Any]:
    return [p.detach().tolist() for p in model.parameters()]


def alone(
    make: MakeOptimizer, num_batches: int = NUM_BATCHES, staleness: int = 0
) -> tuple[list[Any], list[float], dict[str, Any]]:
    """Weights, losses and optimizer state after a plain loop over the same shards in the same tree.

    The gradient of a batch is that at the weights from `staleness` updates before, but from after the last rest.
    """
    torch.set_num_threads(1)
    model = Net()
    optimizer = make(model)
    compute, parameters = compute_with(model), list(model.parameters())
    base_lrs = [group["lr"] for group in optimizer.param_groups]
    losses = []
    history: list[list[Tensor]] = []
    for batch in range(num_batches):
        history.append([p.detach().clone() for p in parameters])
        version = max(REST_AT if batch >= REST_AT else 0, batch - staleness)
        assign(parameters, history[version])
        trees = [TreeSum(0) for _ in [None, *parameters]]
        used = [False] * len(parameters)
        for shard in range(num_shards(batch)):
            optimizer.zero_grad(set_to_none=True)
            trees[0].push(compute(batch, shard))
            for number, parameter in enumerate(parameters):
                used[number] |= parameter.grad is not None
                trees[number + 1].push(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        # Two blocks at most here: the tree's root is their sum.
        loss, *grads = [sum(tree.partials[1:], start=tree.partials[0]) for tree in trees]
        for parameter, grad, is_used in zip(parameters, grads, used, strict=True):
            parameter.grad = grad if is_used else None
        assign(parameters, history[batch])
        for group, lr in zip(optimizer.param_groups, base_lrs, strict=True):
            group["lr"] = lr * COURSE.lr_factor(batch)
            if "momentum" in group:
                group["momentum"] = late_momentum(0.9, batch - version)
        optimizer.step()
        losses.append(loss.item())
    return bits_of(model), losses, optimizer.state_dict()["state"]


def assign(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def own_store(name: str) -> Store:
    """A store beside the one of the process group, for workers without a group."""
    facts = env.worker_facts()
    store = FileStore(facts.init_method.removeprefix("file://") + name, facts.world_size)
    store.set_timeout(timedelta(seconds=20))
    return store


def each_alone(world_size: int) -> Sequence[Sequence[int]]:
    return [(rank,) for rank in range(world_size)]


def prepare_rpc() -> env.WorkerFacts:
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    return env.worker_facts()


def _train(
    make: MakeOptimizer, num_servers: int, nodes: Sequence[Sequence[int]] | None = None, staleness: int = 0
) -> Any:
    facts = prepare_rpc()
    world = join(facts, Plan(world_size=facts.world_size, timeout_s=20))
    store: Store = HashStore() if world.group is None else world.group.get_group_store()
    groups = [dist.new_group(list(node), timeout=timedelta(seconds=20)) for node in nodes or []]
    node_group = next((group for node, group in zip(nodes or [], groups, strict=True) if facts.rank in node), None)
    model = Net()
    losses: list[float] = []
    with ParameterServerAsync(
        make(model),
        COURSE,
        replace(TERMS, num_servers=num_servers, staleness=staleness),
        store=store,
        rank=facts.rank,
        nodes=nodes or each_alone(facts.world_size),
        node_group=node_group,
    ) as server:
        for until in (REST_AT, NUM_BATCHES):
            for batch, loss in server.work(compute_with(model), until):
                assert batch == len(losses)
                losses.append(loss.item())
    if world.group is not None:
        dist.barrier()  # the process group works as before
    leave()
    return bits_of(model), losses


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize(("world_size", "num_servers"), [(1, 1), (2, 1), (3, 2), (3, 3)])
def test_staleness_0_is_synchronous_training_bit_for_bit(
    make: MakeOptimizer, world_size: int, num_servers: int
) -> None:
    weights, losses, _ = alone(make)
    for worker in run_ranks(_train, world_size, make, num_servers):
        assert worker == (weights, losses)


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize(("world_size", "num_servers"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("staleness", [1, 3])
def test_every_gradient_is_late_by_the_staleness_on_any_number_of_workers(
    make: MakeOptimizer, world_size: int, num_servers: int, staleness: int
) -> None:
    weights, losses, _ = alone(make, staleness=staleness)
    for worker in run_ranks(_train, world_size, make, num_servers, None, staleness):
        assert worker == (weights, losses)


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("nodes", [((0, 1), (2, 3)), ((0, 1, 2), (3,))])
def test_nodes_that_act_as_one_worker_give_the_same_bits(nodes: Sequence[Sequence[int]], staleness: int) -> None:
    weights, losses, _ = alone(sgd, staleness=staleness)
    for worker in run_ranks(_train, 4, sgd, 2, nodes, staleness):
        assert worker == (weights, losses)


def _with_one_that_waits(staleness: int) -> tuple[int, bool]:
    """The last worker keeps its first shard until the others can do no more; how many shards each computed."""
    facts = prepare_rpc()
    store = own_store("stale")
    model = Net()
    compute, num_computed, in_bound = compute_with(model), 0, True
    ahead = staleness + 1
    # All shards of batches 0 … staleness, but for the one that is kept.
    possible = sum(num_shards(batch) for batch in range(ahead)) - 1

    def observed(batch: int, shard: int) -> Tensor:
        nonlocal num_computed, in_bound
        num_computed += 1
        if facts.rank == 2 and num_computed == 1:
            store.set("kept", "")
            if batch == 0:
                store.wait(["all"])
            store.set("given", "")
        else:
            store.wait(["kept"])  # nobody empties the first batch before the last worker has its shard
            in_bound &= batch < ahead or bool(store.check(["given"]))
            if facts.rank != 2 and store.add("computed", 1) == possible:
                store.set("all", "")
        return compute(batch, shard)

    with ParameterServerAsync(
        sgd(model),
        COURSE,
        replace(TERMS, staleness=staleness),
        store=store,
        rank=facts.rank,
        nodes=each_alone(facts.world_size),
    ) as server:
        list(server.work(observed, NUM_BATCHES + ahead))
    return num_computed, in_bound


@pytest.mark.parametrize("staleness", [0, 2])
def test_others_run_ahead_of_a_slow_worker_as_far_as_the_bound(staleness: int) -> None:
    results = run_ranks(_with_one_that_waits, 3, staleness)
    total = sum(num_shards(batch) for batch in range(NUM_BATCHES + staleness + 1))
    assert sum(count for count, _ in results) == total
    assert all(in_bound for _, in_bound in results)


@dataclass(frozen=True)
class Death:
    """Worker `rank` kills itself when it has computed one shard of the batch and has to compute another.

    The others keep their first shards of that batch until then: they would leave it none if it were slow.
    """

    rank: int
    batch: int = 1
    num_servers: int = 2


def _survive(death: Death) -> Any:
    facts = prepare_rpc()
    if facts.rank != death.rank:
        return _live(death)
    # The death must not be that of the process the harness waits for.
    child = multiprocessing.get_context("fork").Process(target=_live, args=(death,))
    child.start()
    child.join(30)
    return child.exitcode


def _live(death: Death) -> Any:
    facts = env.worker_facts()
    model = Net()
    store = own_store("kill")
    compute, num_computed = compute_with(model), 0

    def mortal(batch: int, shard: int) -> Tensor:
        nonlocal num_computed
        if batch == death.batch:
            if facts.rank != death.rank:
                store.wait(["dying"])
            elif num_computed == 1:
                store.set("dying", "yes")
                os.kill(os.getpid(), signal.SIGKILL)
            num_computed += 1
        return compute(batch, shard)

    try:
        with ParameterServerAsync(
            sgd(model),
            COURSE,
            replace(TERMS, num_servers=death.num_servers),
            store=store,
            rank=facts.rank,
            nodes=each_alone(facts.world_size),
        ) as server:
            losses = [loss.item() for _, loss in server.work(mortal, NUM_BATCHES)]
    except PeerLost as error:
        return error.rank, str(error)
    return bits_of(model), losses


def test_a_killed_worker_changes_no_bit() -> None:
    weights, losses, _ = alone(sgd)
    first, second, died = run_ranks(_survive, 3, Death(rank=2))
    assert died == -signal.SIGKILL
    assert first == (weights, losses)
    assert second == (weights, losses)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_server_ends_the_run_with_its_rank(rank: int) -> None:
    results = run_ranks(_survive, 3, Death(rank=rank))
    assert results.pop(rank) == -signal.SIGKILL
    for lost, message in results:
        assert lost == rank
        assert f"Worker {rank}, which" in message


def _stop_and_go_on(make: MakeOptimizer, stop_at: int) -> Any:
    facts = prepare_rpc()
    saved: dict[str, Any] = {}
    model = Net()
    optimizer = make(model)
    store = own_store("resume")

    def opened(course: UpdateSchedule, num_servers: int) -> ParameterServerAsync:
        return ParameterServerAsync(
            optimizer,
            course,
            replace(TERMS, num_servers=num_servers),
            store=store,
            rank=facts.rank,
            nodes=each_alone(facts.world_size),
        )

    path = Path(facts.init_method.removeprefix("file://") + "saved")
    with opened(COURSE, 2) as server:
        list(server.work(compute_with(model), stop_at))
        server.collect()
        if facts.rank == 1:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        server.barrier()
    saved = torch.load(path)
    model = Net()
    model.load_state_dict(saved["model"])
    optimizer = make(model)
    optimizer.load_state_dict(saved["optimizer"])
    with opened(replace(COURSE, first_batch=stop_at), 3) as server:
        losses = [loss.item() for _, loss in server.work(compute_with(model), NUM_BATCHES)]
    state = {
        number: {name: value.tolist() if isinstance(value, Tensor) else value for name, value in values.items()}
        for number, values in saved["optimizer"]["state"].items()
    }
    return bits_of(model), losses, state


@pytest.mark.parametrize("make", [sgd, adamw])
def test_what_one_run_leaves_another_goes_on_with_on_other_servers(make: MakeOptimizer) -> None:
    stop_at = 4
    weights, losses, _ = alone(make)
    expected_state = {
        number: {name: value.tolist() if isinstance(value, Tensor) else value for name, value in values.items()}
        for number, values in alone(make, stop_at)[2].items()
    }
    for worker in run_ranks(_stop_and_go_on, 3, make, stop_at):
        assert worker == (weights, losses[stop_at:], expected_state)


def _open_wrongly(make: MakeOptimizer, terms: ServerSettings) -> str:
    prepare_rpc()
    try:
        ParameterServerAsync(make(Net()), COURSE, terms, store=own_store("no"), rank=0, nodes=[(0,)])
    except (JobError, ModelError) as error:
        return str(error)
    return ""


def test_what_cannot_be_meant_is_said_in_a_sentence() -> None:
    (message,) = run_ranks(_open_wrongly, 1, sgd, replace(TERMS, num_servers=2))
    assert "num_servers = 2 should be between 1 and 1" in message
    (message,) = run_ranks(_open_wrongly, 1, lbfgs, TERMS)
    assert "LBFGS" in message
