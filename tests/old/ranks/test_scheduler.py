"""One ordered communication thread: overlap, errors, and workers that stop doing the same."""

from __future__ import annotations

import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline import env
from paceline.comm import Aggregator, Bucket, Scheduler, open_links
from paceline.comm.all_reduce import all_reduce
from paceline.comm.scheduler import CHECKED_STEPS
from paceline.errors import PacelineError
from paceline.parallel.live_bytes import LiveBytes
from paceline.spec import Job, Plan
from paceline.train.process.process_group import join, leave
from tests.kit.workers import run_ranks
from tests.old.ranks.launching import wait_until
from tests.old.ranks.training import images, loss_fn

CPU = torch.device("cpu")


def _aggregator(check_always: bool = False) -> Aggregator:
    facts = env.worker_facts()
    world = join(facts, Plan(world_size=facts.world_size, timeout_s=20))
    assert world.group is not None
    return Aggregator(all_reduce, open_links(world.group, CPU, 20), Scheduler(world.group, CPU, check_always))


def _in_order() -> tuple[list[float], bool]:
    aggregator = _aggregator()
    caller, seen = threading.get_ident(), set()

    def noting(values: Tensor, links: Any) -> None:
        seen.add(threading.get_ident())
        all_reduce(values, links)

    aggregator = replace(aggregator, algorithm=noting)
    futures = []
    for step in range(CHECKED_STEPS + 2):
        aggregator.scheduler.begin_step()
        for n in range(9):
            values = torch.full((7,), float(10 * step + n))
            futures.append(aggregator.sum_bucket(Bucket(values, ((f"bucket {n}", values),))))
    sums = [float(future.wait()[0]) for future in futures]
    aggregator.scheduler.raise_error()
    leave()
    return sums, len(seen) == 1 and caller not in seen


def test_calls_run_in_order_on_one_thread_of_their_own() -> None:
    expected = [3.0 * (10 * step + n) for step in range(CHECKED_STEPS + 2) for n in range(9)]
    assert run_ranks(_in_order, 3) == [(expected, True)] * 3


def _diverge(what: str, step: int, check_always: bool) -> str:
    aggregator = _aggregator(check_always)
    rank = env.worker_facts().rank
    message = ""
    for number in range(1, step + 1):
        aggregator.scheduler.begin_step()
        odd = rank == 1 and number == step
        name = "second.weight" if odd and what == "name" else "first.weight"
        length = 5 if odd and what == "shape" else 4
        dtype = torch.float64 if odd and what == "dtype" else torch.float32
        values = torch.ones(length, dtype=dtype)
        aggregator.sum_bucket(Bucket(values, ((name, values),))).wait()
        try:
            aggregator.scheduler.raise_error()
        except PacelineError as error:
            message = str(error)
    leave()
    return message


@pytest.mark.parametrize(
    ("what", "step", "check_always"),
    [("name", 1, False), ("shape", 2, False), ("dtype", CHECKED_STEPS, False), ("shape", 7, True)],
)
def test_a_divergence_names_rank_tensor_and_step(what: str, step: int, check_always: bool) -> None:
    messages = run_ranks(_diverge, 3, what, step, check_always)
    assert messages[0] == messages[1] == messages[2]
    assert "rank 1 is at" in messages[0]
    assert f"step {step}:" in messages[0]
    assert "first.weight" in messages[0]
    assert {"name": "second.weight", "shape": "(5 ", "dtype": "float64"}[what] in messages[0]


def _fails_on_the_thread() -> tuple[str, bool]:
    aggregator = _aggregator()

    def broken(values: Tensor, links: Any) -> None:
        raise ZeroDivisionError("in the algorithm")

    aggregator = replace(aggregator, algorithm=broken)
    values = torch.ones(3)
    first = aggregator.sum_bucket(Bucket(values, (("a", values),))).wait() is values
    aggregator.sum_bucket(Bucket(values, (("b", values),))).wait()
    try:
        aggregator.scheduler.raise_error()
    except ZeroDivisionError as error:
        return str(error), first
    return "", first


def test_an_error_on_the_thread_reaches_the_caller_and_nobody_waits_for_ever() -> None:
    assert run_ranks(_fails_on_the_thread, 2) == [("in the algorithm", True)] * 2


def _lets_values_go() -> None:
    aggregator = _aggregator()
    values = torch.ones(3)
    found = weakref.ref(values)
    aggregator.sum_bucket(Bucket(values, (("a", values),))).wait()
    del values
    wait_until(lambda: found() is None)
    leave()


def test_what_has_been_summed_is_not_kept_until_the_next_sum() -> None:
    run_ranks(_lets_values_go, 2)


def _most_copies_of_parameters() -> float:
    """The most that is alive in the second step, in which DDP arranges its buckets anew, beside the parameters,
    in sizes of the model."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 256), *[nn.Linear(256, 256) for _ in range(16)])
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    plan = Plan(world_size=2, algorithm="all_reduce", timeout_s=20)
    with (
        LiveBytes(is_real=True) as live,
        paceline.init(global_batch_size=6, virtual_shards=3, plan=plan, max_steps=3) as run,
    ):
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for number, batch in enumerate(run.batches(images(18))):
            if number == 1:
                live.begin()
            run.step(batch, loss_fn)
    peak_bytes: int = live.peak_bytes
    return peak_bytes / num_bytes


def test_replicas_let_old_buckets_go_before_there_are_new_ones() -> None:
    assert max(run_ranks(_most_copies_of_parameters, 2)) < 2.5


class _NamesDependOnTheRank(nn.Module):
    """As a user may write it by mistake: another layer on another worker, of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        layers = {"left": nn.Linear(192, 10), "right": nn.Linear(192, 10)}
        order = ["left", "right"] if env.worker_facts().rank == 0 else ["right", "left"]
        for name in order:
            self.add_module(name, layers[name])

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(1)
        difference: Tensor = self.get_submodule("left")(flat) - self.get_submodule("right")(flat)
        return difference


def _train_swapped() -> None:
    job = Job.from_mapping({"global_batch_size": 6, "virtual_shards": 3})
    plan = Plan(world_size=2, algorithm="all_reduce", timeout_s=20)
    with paceline.init(job, plan=plan, max_steps=2) as run:
        model = _NamesDependOnTheRank()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.batches(images(12)):
            run.step(batch, loss_fn)


def test_swapped_layers_of_equal_shape_are_an_error_not_a_wrong_result() -> None:
    with pytest.raises(AssertionError, match=r"DivergenceError: .*left\.weight"):
        run_ranks(_train_swapped, 2)


class _SometimesUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(192, 10), nn.Linear(192, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.used(inputs.flatten(1))
        return outputs


def _train_with_a_slow_thread() -> str:
    """DDP looks for unused parameters by a collective of its own, from the main thread, while ours is at work."""
    facts = env.worker_facts()
    do = Scheduler._do

    def slowly(self: Scheduler, task: Any) -> None:
        threading.Event().wait(0.05 * facts.rank)  # one worker's thread lags behind
        do(self, task)

    Scheduler._do = slowly  # type: ignore[method-assign]
    plan = Plan(world_size=2, algorithm="all_reduce", timeout_s=20)
    with paceline.init(global_batch_size=6, virtual_shards=3, plan=plan, max_steps=4) as run:
        model = _SometimesUsed()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), find_unused_parameters=True)
        for batch in run.batches(images(24)):
            run.step(batch, loss_fn)
        return run.weights_sha256()


def test_unused_parameters_are_looked_for_on_another_group() -> None:
    first, second = run_ranks(_train_with_a_slow_thread, 2)
    assert first == second
