"""Real workers over Gloo: with each algorithm and wire format a step leaves the same bits on all workers, those of the
whole batch's gradient; asynchronous training learns the same on any number of workers and servers."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.comm.asynchronous import AsynchronousWorker
from paceline.errors import PeerLost
from paceline.spec import AlgorithmName
from paceline.train.process_group import GLOO_THREAD
from tests.kit.train import StreamOf
from tests.kit.workers import in_turn, join_world, run_ranks
from tests.unit.data.reading import Numbers, numbers_in, read_batches

ALGORITHMS = ["all_reduce", "ring", "parameter_server", "hierarchical", "tree_exact"]
LOSSY = ["all_reduce", "ring", "parameter_server", "hierarchical"]
SIZE = 24


def _linear_loss(model: nn.Module, shard: list[Tensor]) -> Tensor:
    """Its gradient is the mean of the samples, so that a step of rate 1 subtracts that from the weights."""
    loss: Tensor = model(shard[0]).sum(1).mean()
    return loss


def _inputs() -> Tensor:
    return torch.randn(SIZE, 5, generator=torch.Generator().manual_seed(3))


def _one_step(algorithm: AlgorithmName, wire: str) -> list[float]:
    plan = paceline.Plan(algorithm=algorithm, num_servers=2)
    with paceline.init(
        global_batch_size=SIZE, virtual_shards=6, max_steps=1, plan=plan, aggregation={"wire": wire}, progress=False
    ) as run:
        model = nn.Linear(5, 1)
        nn.init.zeros_(model.weight)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for batch in run.batches(TensorDataset(_inputs())):
            run.step(batch, _linear_loss)
        found: list[float] = model.weight.detach().flatten().tolist()
        return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_algorithm_steps_by_the_mean_gradient(world_size: int) -> None:
    cases = [(name, "float32") for name in ALGORITHMS] + [(name, "bfloat16") for name in LOSSY]
    by_rank = run_ranks(in_turn, world_size, _one_step, cases)
    mean, magnitude = _inputs().double().mean(0), _inputs().double().abs().mean(0)
    for (algorithm, wire), weights in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert all(theirs == weights[0] for theirs in weights), (algorithm, wire)
        error = (torch.tensor(weights[0], dtype=torch.float64) + mean).abs()
        # One node: two levels are one, and nothing travels between nodes.
        is_lossy = wire == "bfloat16" and algorithm != "hierarchical"
        rounding = world_size * 2**-8 if is_lossy else SIZE * 2**-24
        assert bool((error <= rounding * magnitude).all()), (algorithm, wire)
        assert is_lossy == bool((error > SIZE * 2**-24 * magnitude).any()), "something was rounded, or nothing was"


WAYS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"mesh": {"fsdp": 2}}, {}),
    ({}, {"aggregation": {"method": "parameter_server_async"}}),
]


def _threads_after_rounds(folder: Path) -> list[int]:
    """The number of Gloo's threads after each of three rounds of runs: with checkpoints, of a stream."""
    counted: list[int] = []
    fully_sharded: list[nn.Module] = []
    for number in range(3):
        for plan, keys in WAYS:
            made = paceline.Plan.from_mapping(plan | {"world_size": 2, "timeout_s": 60})
            save = folder / f"{number}-{len(fully_sharded)}-{len(keys)}"
            init: dict[str, Any] = {
                "global_batch_size": 4,
                "virtual_shards": 2,
                "max_steps": 2,
                "plan": made,
                "checkpoint_dir": save,
            }
            with paceline.init(**init, **keys, progress=False) as run:
                model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1))
                model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
                for batch in run.batches(TensorDataset(_inputs()) if keys else StreamOf([(row,) for row in _inputs()])):
                    run.step(batch, _linear_loss)
            if "mesh" in plan:
                fully_sharded.append(model)
                with torch.no_grad():
                    outputs = [one(_inputs()) for one in fully_sharded]
                assert all(torch.equal(outputs[0], one) for one in outputs), "a model of a run that is over"
        counted.append(0)
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # another one may be ending
                counted[-1] += (thread / "comm").read_text().strip() == GLOO_THREAD
    return counted


def test_a_process_with_many_runs_has_the_threads_of_one(tmp_path: Path) -> None:
    """Models of runs that are over work on."""
    for after_one, *after_more in run_ranks(_threads_after_rounds, 2, tmp_path, timeout_s=120):
        assert after_more == [after_one, after_one]


@dataclass(frozen=True)
class Asynchronous:
    """How asynchronous training is set up; momentum is that of the optimizer."""

    staleness: int
    num_servers: int = 1
    momentum: float = 0.0


NUM_STEPS = 5
RATE = 0.1


def _net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def _samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return (
        torch.randn(SIZE * NUM_STEPS, 5, generator=generator, dtype=torch.float64),
        torch.randint(3, (SIZE * NUM_STEPS,), generator=generator),
    )


def _classify(model: nn.Module, shard: list[Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(shard[0]), shard[1])


def _flat(model: nn.Module) -> list[float]:
    found: list[float] = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return found


def _train(case: Asynchronous) -> list[float]:
    aggregation: dict[str, Any] = {"method": "parameter_server_async", "staleness": case.staleness}
    with paceline.init(
        global_batch_size=SIZE,
        virtual_shards=6,
        epochs=1,
        plan=paceline.Plan(num_servers=case.num_servers),
        aggregation=aggregation,
        progress=False,
    ) as run:
        model = _net()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE, momentum=case.momentum))
        for batch in run.batches(TensorDataset(*_samples())):
            run.step(batch, _classify)
        return _flat(model)


def _plain(case: Asynchronous, order: list[int]) -> list[float]:
    """A loop in which the gradient of batch k is that at the weights after k - staleness updates. SGD's momentum m is
    m / (m + (1 - m)(1 + t)) for a gradient that is t updates late."""
    model, (inputs, targets) = _net(), _samples()
    parameters = list(model.parameters())
    history = [[p.detach().clone() for p in parameters]]
    velocity = [torch.zeros_like(p) for p in parameters]
    for step in range(NUM_STEPS):
        version = max(0, step - case.staleness)
        with torch.no_grad():
            for parameter, value in zip(parameters, history[version], strict=True):
                parameter.copy_(value)
        chosen = order[step * SIZE : (step + 1) * SIZE]
        gradients = torch.autograd.grad(_classify(model, [inputs[chosen], targets[chosen]]), parameters)
        late = step - version
        momentum = case.momentum
        if momentum and late:
            momentum = momentum / (momentum + (1 - momentum) * (1 + late))
        velocity = [momentum * v + g for v, g in zip(velocity, gradients, strict=True)]
        history.append([w - RATE * v for w, v in zip(history[-1], velocity, strict=True)])
    return torch.cat([values.flatten() for values in history[-1]]).tolist()


@pytest.mark.budget(processor_s=8)
def test_asynchronous_gradients_are_as_late_as_the_staleness_says_on_any_number_of_workers() -> None:
    cases = [
        Asynchronous(staleness=0),
        Asynchronous(staleness=1, num_servers=2),
        Asynchronous(staleness=2, momentum=0.9),
        Asynchronous(staleness=9),
    ]
    order = list(itertools.chain(*read_batches(Numbers(SIZE * NUM_STEPS), SIZE, numbers_in)))
    on_two, on_three = (run_ranks(in_turn, world_size, _train, [(case,) for case in cases]) for world_size in (2, 3))
    for weights in (*on_two, *on_three):
        assert weights == on_two[0]
    for case, weights in zip(cases, on_two[0], strict=True):
        np.testing.assert_allclose(weights, _plain(case, order), rtol=0, atol=1e-13, err_msg=str(case))


def _train_until_killed(victim: int, num_servers: int, folder: Path) -> None:
    """A worker of asynchronous training, of which one ends in its second shard; notes what it has learned."""
    world = join_world(60)
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer, num_computed = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 0

    def compute(batch: int, shard: int) -> tuple[Tensor, float]:
        nonlocal num_computed
        num_computed += 1
        if world.rank() == victim and num_computed == 2:
            os._exit(9)
        inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(100 * batch + shard))
        model(inputs).square().mean().backward()
        time.sleep(0.02)  # others come to compute as well
        return torch.zeros(1), 1.0

    group = torch.distributed.new_group(timeout=timedelta(days=1))
    worker = AsynchronousWorker(optimizer, group, lambda _batch: 4, num_servers=num_servers, timeout_s=20.0)
    lost = None
    try:
        num_updates = sum(1 for _ in worker.work(compute, 6))
    except PeerLost as error:
        num_updates, lost = 0, error
    worker.close(lost)
    found = {"lost": lost and lost.rank, "weights": model.weight.tolist(), "updates": num_updates}
    (folder / str(world.rank())).write_text(json.dumps(found))


@pytest.mark.parametrize(("victim", "num_servers"), [(2, 2), (1, 2), (0, 1)])
def test_a_lost_worker_changes_no_bit_until_the_pause_and_a_lost_server_ends_the_run(
    victim: int, num_servers: int, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    run_ranks(_train_until_killed, 3, -1, num_servers, whole)
    run_ranks(_train_until_killed, 3, victim, num_servers, killed, may_die=[victim])
    learned = json.loads((whole / "0").read_text())
    assert (learned["lost"], learned["updates"]) == (None, 6)
    for rank in {0, 1, 2} - {victim}:
        found = json.loads((killed / str(rank)).read_text())
        assert found["lost"] == victim
        assert (found["weights"] == learned["weights"]) == (victim >= num_servers)
