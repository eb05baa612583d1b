"""The law: on how many workers a run happens to be, and how they share it, does not change what it learns.

Each case is a cell of the table in `matrix`: an engine, and a property that it has, or does not have and why. What is right is
what `tests.kit.oracle` learns, a loop that knows nothing of Paceline.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.kit.engines import ENGINES, Engine
from tests.kit.oracle import Learned, Task, learn
from tests.kit.train import Outcome, trained
from tests.law.matrix import BEGIN, END, NOT_HELD, markdown
from tests.law.tasks import BITS, BY_SHARD, CHECKPOINT, PLAIN

ONE_WORKER = ENGINES["one worker"]
RELATIVE_ROUNDING = 1e-12
"""Of float64, relative to the largest number of a tensor."""
BROKEN = {
    ("asynchronous", "non-finite"): "servers make updates that are not finite, whatever `nonfinite` says",
}


def cells(*properties: str) -> list[object]:
    """Parameters (engine, property) for every engine."""
    found = []
    for name in properties:
        for engine in ENGINES:
            reason = BROKEN.get((engine, name))
            marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
            if ENGINES[engine].num_workers > 2:
                marks.append(pytest.mark.budget(processor_s=12))
            if (engine, name) not in NOT_HELD:
                found.append(pytest.param(engine, name, marks=marks, id=f"{engine}: {name}"))
    return found


def task_of(name: str) -> Task:
    return (PLAIN | BY_SHARD)[name]


@cache
def expected(name: str, *, in_own_order: bool) -> Learned:
    """What the oracle learns; in the job's own order of samples it has to be told by one worker."""
    task = task_of(name)
    orders = own_order(name) if in_own_order else []
    return learn(task, num_shards=1 if name in PLAIN else None, orders=orders)


def own_order(name: str) -> list[list[int]]:
    """The samples of each epoch on one worker, in the job's own order."""
    task = task_of(name)
    (alone,) = trained(ONE_WORKER, task, in_own_order=True)
    samples = [sample for batch in alone.samples for sample in batch]
    size = len(task.data)  # type: ignore[arg-type]
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def assert_learned(engine: Engine, outcomes: list[Outcome], right: Learned) -> None:
    """All workers have learned the same, and what is right."""
    assert len({one.weights_sha256 for one in outcomes}) == 1
    found = outcomes[0].learned
    if not engine.has_own_losses:
        assert all(str(one.learned.losses) == str(found.losses) for one in outcomes)  # as texts, NaN equals itself
        assert len(found.losses) == len(right.losses)
        assert all(map(is_close, found.losses, right.losses)), (found.losses, right.losses)
    assert found.weights.keys() == right.weights.keys()
    for name, value in right.weights.items():
        difference = (found.weights[name] - value).abs().max()
        assert difference <= RELATIVE_ROUNDING * value.abs().max(), (name, difference)
    assert all(one.learned.metrics == found.metrics for one in outcomes)
    assert found.metrics.keys() == right.metrics.keys()
    assert all(is_close(found.metrics[name], right.metrics[name]) for name in right.metrics), (found, right)


def is_close(found: float, right: float) -> bool:
    return (math.isnan(found) and math.isnan(right)) or math.isclose(found, right, rel_tol=RELATIVE_ROUNDING)


@pytest.mark.parametrize(("engine_name", "name"), cells(*PLAIN, *BY_SHARD))
def test_a_run_learns_what_the_oracle_learns(engine_name: str, name: str) -> None:
    engine = ENGINES[engine_name]
    outcomes = trained(engine, task_of(name), in_own_order=engine.reads_in_step)
    assert_learned(engine, outcomes, expected(name, in_own_order=engine.reads_in_step))
    if name == "non-finite":
        assert any("nan" in sentence.lower() for sentence in outcomes[0].said), outcomes[0].said


@pytest.mark.parametrize(("engine_name", "name"), cells("order"))
def test_each_epoch_reads_every_sample_once_in_an_order_that_no_engine_changes(engine_name: str, name: str) -> None:
    task = task_of("plain torch")
    (alone,) = trained(ONE_WORKER, task, in_own_order=True)
    outcomes = trained(ENGINES[engine_name], task, in_own_order=True)
    for step, batch in enumerate(alone.samples):
        of_workers = dict.fromkeys(one.samples[step] for one in outcomes)  # some have the same samples
        assert tuple(sample for samples in of_workers for sample in samples) == batch
    first, second = own_order("plain torch")
    assert first != second
    assert sorted(first) == sorted(second) == list(range(len(task.data)))  # type: ignore[arg-type]


def successor(engine_name: str) -> str:
    """The next engine of the table that trains the same job; after the last comes the first."""
    names = [name for name, engine in ENGINES.items() if engine.job == ENGINES[engine_name].job]
    return names[(names.index(engine_name) + 1) % len(names)]


@pytest.mark.parametrize(("engine_name", "name"), cells("checkpoint"))
def test_a_checkpoint_goes_on_exactly_under_the_next_engine(engine_name: str, name: str, tmp_path: Path) -> None:
    before, after = ENGINES[engine_name], ENGINES[successor(engine_name)]
    num_steps = 2
    trained(before, CHECKPOINT, max_steps=num_steps, checkpoint_dir=tmp_path, in_own_order=before.reads_in_step)
    outcomes = trained(after, CHECKPOINT, checkpoint_dir=tmp_path, in_own_order=after.reads_in_step)
    right = learn(CHECKPOINT)
    assert_learned(after, outcomes, Learned(right.losses[num_steps:], right.weights))


@cache
def bits_of_one_worker() -> str:
    (alone,) = trained(ONE_WORKER, BITS, parity="bitwise", precision="float32")
    return alone.weights_sha256


@pytest.mark.parametrize(("engine_name", "name"), cells("bits"))
def test_bitwise_parity_gives_the_bits_of_one_worker(engine_name: str, name: str) -> None:
    outcomes = trained(ENGINES[engine_name], BITS, parity="bitwise", precision="float32")
    assert {one.weights_sha256 for one in outcomes} == {bits_of_one_worker()}
