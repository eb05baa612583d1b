"""The law: on how many workers a run happens to be, and how they share it, does not change what it learns.

Each case is a cell of the table in `matrix`: an engine, and a property that it has, or does not have and why. What is
right is what `tests.kit.oracle` learns, a loop that knows nothing of Paceline.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.kit.engines import ENGINES, Engine
from tests.kit.oracle import Learned, learn
from tests.kit.train import Outcome, train, trained
from tests.kit.workers import in_turn, run_ranks
from tests.law import golden
from tests.law.golden import bits_of_one_worker
from tests.law.matrix import BEGIN, END, NOT_HELD, PROPERTIES, cells, markdown
from tests.law.tasks import TASKS, WHOLE_BATCH

RELATIVE_ROUNDING = 1e-12
"""Of float64, relative to the largest number of a tensor."""
LEARNED = [name for name in PROPERTIES if name in TASKS and name not in ("order", "checkpoint", "bits")]
BITWISE = {"parity": "bitwise", "precision": "float32"}


def train_cell(engine: Engine, name: str) -> Outcome:
    options = BITWISE if name == "bits" else {}
    return train(engine, TASKS[name], in_own_order=engine.reads_in_step or name == "order", **options)


@cache
def outcomes_of(engine_name: str) -> dict[str, tuple[Outcome, ...]]:
    """Of each worker, by the engine's cells: one team trains them in turn, since it takes as long to start one."""
    engine = ENGINES[engine_name]
    names = [name for name in (*LEARNED, "order", "bits") if (engine_name, name) not in NOT_HELD]
    by_rank = run_ranks(in_turn, engine.num_workers, train_cell, [(engine, n) for n in names], timeout_s=240)
    return dict(zip(names, zip(*by_rank, strict=True), strict=True))


@cache
def expected(name: str, *, in_own_order: bool) -> Learned:
    """What the oracle learns; the job's own order of samples is that of one worker."""
    orders = orders_of_one_worker(name) if in_own_order else ()
    return learn(TASKS[name], num_shards=1 if name in WHOLE_BATCH else None, orders=orders)


@cache
def orders_of_one_worker(name: str) -> tuple[list[int], ...]:
    """The samples of each epoch, in the job's own order."""
    (alone,) = trained(ENGINES["one worker"], TASKS[name], in_own_order=True)
    samples = [sample for batch in alone.samples for sample in batch]
    size = len(samples) // TASKS[name].epochs
    return tuple(samples[start : start + size] for start in range(0, len(samples), size))


def assert_learned(engine: Engine, outcomes: Sequence[Outcome], right: Learned) -> None:
    """All workers have learned the same, and what is right."""
    assert len({one.weights_sha256 for one in outcomes}) == 1
    found = outcomes[0].learned
    assert len(found.losses) == len(right.losses)
    if not engine.has_own_losses:
        assert all(map(is_close, found.losses, right.losses)), (found.losses, right.losses)
        assert len({str(one.learned.losses) for one in outcomes}) == 1  # as texts: NaN equals itself
    assert found.weights.keys() == right.weights.keys()
    for name, value in right.weights.items():
        difference = (found.weights[name] - value).abs().max()
        assert difference <= RELATIVE_ROUNDING * value.abs().max(), (name, difference)
    assert found.metrics.keys() == right.metrics.keys()
    assert all(is_close(found.metrics[name], right.metrics[name]) for name in right.metrics), (found, right)
    assert all(one.learned.metrics == found.metrics for one in outcomes)


def is_close(found: float, right: float) -> bool:
    return (math.isnan(found) and math.isnan(right)) or math.isclose(found, right, rel_tol=RELATIVE_ROUNDING)


@pytest.mark.parametrize(("engine_name", "name"), cells(*LEARNED))
def test_a_run_learns_what_the_oracle_learns(engine_name: str, name: str) -> None:
    engine, outcomes = ENGINES[engine_name], outcomes_of(engine_name)[name]
    assert_learned(engine, outcomes, expected(name, in_own_order=engine.reads_in_step))
    if name == "non-finite":
        assert any("nan" in sentence.lower() for sentence in outcomes[0].said)


@pytest.mark.parametrize(("engine_name", "name"), cells("order"))
def test_each_epoch_reads_every_sample_once_in_an_order_that_no_engine_changes(engine_name: str, name: str) -> None:
    found: list[int] = []
    for batches in zip(*(one.samples for one in outcomes_of(engine_name)[name]), strict=True):
        distinct = dict.fromkeys(batches)  # workers of one pipeline, or of one tensor axis, have the same samples
        found += (sample for samples in distinct for sample in samples)
    first, second = orders_of_one_worker(name)
    assert found == [*first, *second]
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second


def test_a_tensor_plan_that_divides_one_place_of_a_tied_weight_is_refused() -> None:
    engine = Engine(2, {"tp": 2}, {"tensor_plan": {"head": "colwise_gather_output"}})
    with pytest.raises(AssertionError, match=r"paceline\.errors\.ModelError: 'head\.weight' is the same weight"):
        trained(engine, TASKS["frozen, unused and tied"])


def successor(engine_name: str) -> str:
    """The next engine of the table that trains the same job; after the last comes the first."""
    names = [name for name, engine in ENGINES.items() if engine.job == ENGINES[engine_name].job]
    return names[(names.index(engine_name) + 1) % len(names)]


@pytest.mark.parametrize(("engine_name", "name"), cells("checkpoint"))
def test_a_checkpoint_goes_on_exactly_under_the_next_engine(engine_name: str, name: str, tmp_path: Path) -> None:
    before, after = ENGINES[engine_name], ENGINES[successor(engine_name)]
    num_steps = 2  # of three in the epoch
    name = "checkpoint, without momentum" if before.has_own_losses else name
    trained(before, TASKS[name], max_steps=num_steps, checkpoint_dir=tmp_path, in_own_order=before.reads_in_step)
    outcomes = trained(after, TASKS[name], checkpoint_dir=tmp_path, in_own_order=after.reads_in_step)
    right = expected(name, in_own_order=after.reads_in_step)
    assert_learned(after, outcomes, Learned(right.losses[num_steps:], right.weights))


@pytest.mark.parametrize(("engine_name", "name"), cells("bits"))
def test_bitwise_parity_gives_the_bits_of_one_worker(engine_name: str, name: str) -> None:
    assert {one.weights_sha256 for one in outcomes_of(engine_name)[name]} == {bits_of_one_worker()}


def test_the_bits_of_one_worker_are_those_of_before() -> None:
    known, processor = golden.known(), golden.processor()
    if processor not in known:
        warnings.warn(f"no bits are known of {processor}; engines are compared with each other alone", stacklevel=1)
    assert known.get(processor, bits_of_one_worker()) == bits_of_one_worker()


@pytest.mark.parametrize(("engine_name", "name"), [cell for cell, found in NOT_HELD.items() if found.refused_with])
def test_what_an_engine_cannot_hold_is_refused_with_its_reason(engine_name: str, name: str) -> None:
    bitwise = {"parity": "bitwise"} if name == "bits" else {}
    with pytest.raises(AssertionError, match=r"paceline\.errors") as refused:
        trained(ENGINES[engine_name], TASKS[name], **bitwise)
    sentence = str(refused.value).partition("paceline.errors.")[2].partition("\n")[0]
    assert all(word in sentence for word in NOT_HELD[engine_name, name].refused_with), sentence


@pytest.mark.parametrize(
    ("engine_name", "name"),
    [cell for cell, found in NOT_HELD.items() if not found.refused_with and cell[1] in (*LEARNED, "bits")],
)
def test_what_an_engine_does_not_hold_is_named_only_as_long_as_it_differs(engine_name: str, name: str) -> None:
    engine = ENGINES[engine_name]
    if name == "bits":
        (found, *_) = trained(engine, TASKS[name], **BITWISE)
        assert found.weights_sha256 != bits_of_one_worker()
    else:
        outcomes = trained(engine, TASKS[name])
        with pytest.raises(AssertionError):
            assert_learned(engine, outcomes, expected(name, in_own_order=False))


def test_the_page_on_strategies_has_this_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text()
    assert page.partition(BEGIN)[2].partition(END)[0].strip() == markdown().strip()
