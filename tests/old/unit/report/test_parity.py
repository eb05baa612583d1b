"""Verdicts over made-up traces: what passes, what fails, and the cause that is named."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import PacelineError
from paceline.report.parity import TOLERANCE, ParityVerdict, Trace, compare, load_trace

Line = dict[str, Any]


def made_up(workers: int, *, parity: str = "numeric", precision: str = "float64", tp: int = 1) -> Trace:
    """Three healthy steps: every worker holds the same values, and the batch's digest is shared out among them."""
    steps = []
    for step in range(3):
        lines = []
        for rank in range(workers):
            share = 1200 // workers
            line: Line = {
                "step": step,
                "loss": 2.0 - step,
                "batch_digest": share + step if rank == 0 else share,
                "gradients": {"weight": [3.0, 1.0, -2.0], "bias": [0.5, 0.1, 0.2]},
                "parameters": {"weight": [5.0, 4.0, step], "bias": [1.0, 0.3, 0.4]},
                "buffers": {"mean": [2.0, 1.0, 1.5]},
                "weights_sha256": f"sha of step {step}",
            }
            lines.append(line)
        steps.append(lines)
    return Trace(workers, parity, precision, steps, tp)


def nudged(trace: Trace, kind: str, name: str, by: float, step: int = 1, ranks: Sequence[int] | None = None) -> Trace:
    """The same trace, but for one tensor of some ranks, whose projections and weights hash differ."""
    steps: Any = copy.deepcopy(trace.steps)
    for rank in range(trace.workers) if ranks is None else ranks:
        line = steps[step][rank]
        norm, *projections = line[kind][name]
        line[kind][name] = [norm, *(value + by for value in projections)]
        line["weights_sha256"] += f", {name} nudged"
    return dataclasses.replace(trace, steps=steps)


def with_batch(trace: Trace, step: int) -> Trace:
    """The same trace, but for the samples of one global batch."""
    steps: Any = copy.deepcopy(trace.steps)
    steps[step][-1]["batch_digest"] += 1
    return Trace(trace.workers, trace.parity, trace.precision, steps)


def verdict_on(other: Trace, base: Trace | None = None) -> ParityVerdict:
    base = base or made_up(1, parity=other.parity, precision=other.precision)
    again, verdict = compare(base, base, [other])
    assert again.passed
    return verdict


@pytest.mark.parametrize("parity", ["numeric", "bitwise"])
@pytest.mark.parametrize("workers", [2, 3])
def test_equal_runs_pass_bit_for_bit(parity: str, workers: int) -> None:
    verdicts = compare(made_up(1, parity=parity), made_up(1, parity=parity), [made_up(workers, parity=parity)])
    assert [(v.workers, v.passed, v.steps, v.largest_difference) for v in verdicts] == [
        (1, True, 3, 0.0),
        (workers, True, 3, 0.0),
    ]
    assert verdicts[1].sentence() == f"PASS  {workers} workers: the same over 3 steps, bit for bit"


def test_bits_are_compared_at_one_tp_degree() -> None:
    """Two workers that divide layers round otherwise than one; four that do so too have the bits of the two."""
    alone, two, four = (made_up(n, parity="bitwise", precision="float32", tp=tp) for n, tp in ((1, 1), (2, 2), (4, 2)))
    rounded, same = (nudged(one, "gradients", "weight", 1e-5) for one in (two, four))
    verdicts = compare(alone, alone, [rounded, same])
    assert [verdict.passed for verdict in verdicts] == [True] * 3
    assert "equal for any dp, fsdp and pp at one tp degree" in verdicts[1].sentence()
    said = "the same over 3 steps, bit for bit. Compared with 2 workers that divide layers alike (tp = 2)."
    assert verdicts[2].sentence() == f"PASS  4 workers: {said}"
    assert [verdict.passed for verdict in compare(alone, alone, [rounded, four])] == [True, True, False]
    assert not compare(alone, alone, [nudged(four, "gradients", "weight", 0.1)])[1].passed


@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16"])
def test_rounding_passes_and_more_does_not(precision: str) -> None:
    healthy = made_up(2, precision=precision)
    # The norm of "weight" is 3: that is what its distance is measured against.
    small = verdict_on(nudged(healthy, "gradients", "weight", 0.5 * 3 * TOLERANCE[precision]))
    assert small.passed
    assert small.largest_difference == pytest.approx(0.5 * TOLERANCE[precision])
    assert f"within {0.5 * TOLERANCE[precision]:.1e}" in small.sentence()
    assert not verdict_on(nudged(healthy, "gradients", "weight", 2 * 3 * TOLERANCE[precision])).passed


def test_tensors_that_hardly_matter_are_measured_against_the_whole() -> None:
    def with_tiny(workers: int, value: float) -> Trace:
        trace = made_up(workers)
        for lines in trace.steps:
            for line in lines:
                line["gradients"]["tiny"] = [abs(value), value, -value]
        return trace

    # Rounding noise around a gradient that is zero in theory: 100 % off, and of no weight.
    assert verdict_on(with_tiny(2, 1e-17), with_tiny(1, -1e-17)).passed


def test_unseeded_randomness_in_the_data() -> None:
    base = made_up(1)
    (verdict,) = compare(base, with_batch(base, 2), [made_up(2)])
    assert (verdict.workers, verdict.passed, verdict.step) == (1, False, 2)
    assert verdict.cause.startswith("unseeded randomness: the same run twice differs; the data set")


@pytest.mark.parametrize("parity", ["numeric", "bitwise"])
def test_unseeded_randomness_in_the_model(parity: str) -> None:
    base = made_up(1, parity=parity)
    (verdict,) = compare(base, nudged(base, "gradients", "bias", 0.1), [made_up(2, parity=parity)])
    assert (verdict.passed, verdict.step) == (False, 1)
    assert "bias" in verdict.tensor
    assert "unseeded randomness: the same run twice differs; something in the model or loss" in verdict.cause


def test_data_order() -> None:
    verdict = verdict_on(with_batch(made_up(2), 1))
    assert (verdict.passed, verdict.step, verdict.tensor) == (False, 1, "the batch")
    assert verdict.cause.startswith("data order")


@pytest.mark.parametrize("kind", ["buffers", "parameters"])
def test_a_value_of_one_rank_alone(kind: str) -> None:
    name = {"buffers": "mean", "parameters": "bias"}[kind]
    verdict = verdict_on(nudged(made_up(3), kind, name, 0.1, ranks=[2]))
    assert (verdict.passed, verdict.step, verdict.tensor) == (False, 1, f"{kind[:-1]} '{name}'")
    assert verdict.cause == "not synchronised: rank 2 holds another value than rank 0"


def test_a_buffer_that_depends_on_the_share_but_is_equal_everywhere() -> None:
    verdict = verdict_on(nudged(made_up(2), "buffers", "mean", 0.1))
    assert "buffer 'mean'" in verdict.tensor
    assert "depends on which samples this worker saw" in verdict.cause


def test_mean_of_means() -> None:
    verdict = verdict_on(nudged(made_up(2), "gradients", "weight", 0.1, step=0))
    assert (verdict.passed, verdict.step) == (False, 0)
    assert verdict.cause.startswith("mean of means")
    assert verdict.sentence().startswith("FAIL  2 workers: first differs at step 0 in gradient 'weight'")


def test_the_largest_distance_is_named() -> None:
    verdict = verdict_on(nudged(nudged(made_up(2), "gradients", "weight", 0.1), "gradients", "bias", 0.4))
    assert "gradient 'bias'" in verdict.tensor


def test_an_optimizer_that_knows_its_worker() -> None:
    verdict = verdict_on(nudged(made_up(2), "parameters", "weight", 0.1))
    assert verdict.cause.startswith("the same gradient gave other weights")


def test_bitwise_means_every_bit() -> None:
    trace = made_up(2, parity="bitwise")
    assert not verdict_on(nudged(trace, "gradients", "weight", 1e-15)).passed
    # Bits that the fingerprints do not see, such as the sign of a zero, are in the hash.
    verdict = verdict_on(nudged(trace, "parameters", "weight", 0.0))
    assert (verdict.passed, verdict.tensor, verdict.cause) == (False, "the weights", "some bits differ")


def test_a_tensor_that_is_missing() -> None:
    trace = made_up(2)
    for line in trace.steps[2]:
        del line["gradients"]["bias"]  # a branch of the model that the other workers' samples did not take
    verdict = verdict_on(trace)
    assert (verdict.passed, verdict.step) == (False, 2)
    assert "bias" in verdict.tensor


def test_a_run_of_fewer_steps_fails() -> None:
    full = made_up(2)
    verdict = verdict_on(Trace(2, full.parity, full.precision, full.steps[:2]))
    assert not verdict.passed
    assert "2 steps instead of 3" in verdict.cause


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_runs_that_diverge_alike_are_equal(value: float) -> None:
    def diverged(workers: int, value: float) -> Trace:
        trace = made_up(workers)
        for line in trace.steps[2]:
            line["gradients"]["weight"] = [value] * 3
        return trace

    assert verdict_on(diverged(2, value), diverged(1, value)).passed
    assert not verdict_on(diverged(2, value)).passed
    assert not verdict_on(made_up(2), diverged(1, value)).passed


def write(directory: Path, rank: int, lines: Sequence[Mapping[str, Any]]) -> None:
    directory.mkdir(exist_ok=True)
    (directory / f"rank{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_trace_comes_back_from_its_files(tmp_path: Path) -> None:
    header = {"parity": "bitwise", "precision": "float32", "tp": 2}
    made = made_up(2, parity="bitwise", precision="float32")
    for rank in range(2):
        write(tmp_path / "trace", rank, [header, *(lines[rank] for lines in made.steps)])
    loaded = load_trace(tmp_path / "trace", 2)
    assert (loaded.workers, loaded.parity, loaded.precision) == (2, "bitwise", "float32")
    assert [list(lines) for lines in loaded.steps] == made.steps
    assert [loaded.batch_digest(step) for step in range(3)] == [1200, 1201, 1202]


@pytest.mark.parametrize("lines", [None, [], [{"parity": "numeric", "precision": "float64"}]])
def test_a_program_that_took_no_step_is_one_sentence(tmp_path: Path, lines: list[Line] | None) -> None:
    if lines is not None:
        write(tmp_path / "trace", 0, lines)
    with pytest.raises(PacelineError, match=r"1 worker took no training step.*run\.step"):
        load_trace(tmp_path / "trace", 1)
