"""Constants from measured steps: known ones are found again, published tables and real traces are forecast."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import JobError
from paceline.plan.calibrate import Calibration, fit, predict
from paceline.plan.contradictions import fit_without_mistakes
from paceline.plan.model import Layout
from paceline.plan.step_constants import (
    CONSTANT_NAMES,
    UNKNOWN_GRADIENT_BYTES,
    USUAL,
    Constants,
    Observation,
    Placement,
    usual_sizes,
)
from paceline.plan.suggest import suggest

TRUTH = Constants(
    per_sample_s=0.001,
    fixed_s=0.01,
    host_s_per_sample=1e-5,
    joint_slowdown=0.01,
    neighbour_slowdown=0.02,
    straggler_spread=0.02,
    inside_alpha_s=5e-5,
    inside_beta_s_per_byte=2e-10,
    shared_beta_s_per_byte=2e-11,
    between_alpha_s=3e-4,
    between_beta_s_per_byte=1.5e-9,
    pair_slowdown=0.4,
    growth_slowdown=0.05,
    several_nodes_s=0.005,
    overlap_beyond_sum=3.0,
    tail_fraction=0.05,
)


def placements(gradient_bytes: float | None = None) -> list[Placement]:
    return [
        Placement(Layout((count,) * nodes), size, gradient_bytes=gradient_bytes)
        for nodes in (1, 2, 3, 4, 8, 16)
        for count in (1, 2, 4)
        for size in (16, 64, 256)
    ]


def steps_of(constants: Constants, wanted: Sequence[Placement], noise: float = 0.0, seed: int = 0) -> list[Observation]:
    """What would be measured if the model were right, but for noise."""
    as_arrays = {name: np.full((1, 1), getattr(constants, name)) for name in CONSTANT_NAMES}
    gradient_bytes, link = usual_sizes(wanted)
    vector_bytes = gradient_bytes or UNKNOWN_GRADIENT_BYTES
    truth = Calibration(replace(constants, **as_arrays), np.full((1, 1), 0.012), USUAL, vector_bytes, link)
    errors = np.exp(noise * np.random.default_rng(seed).normal(size=len(wanted)))
    return [
        Observation(placement, forecast.total_s * error, (forecast.total_s - forecast.compute_s) * error)
        for placement, forecast, error in zip(wanted, predict(truth, wanted), errors, strict=True)
    ]


def misses(calibration: Calibration, rows: Sequence[Observation]) -> np.ndarray:
    """Relative errors of the forecasts of some rows."""
    forecasts = predict(calibration, [row.placement for row in rows])
    return np.array([abs(f.total_s / row.step_time_s - 1) for f, row in zip(forecasts, rows, strict=True)])


def of_one_node(step_of: dict[int, float]) -> list[Observation]:
    return [Observation(Placement(Layout((count,)), 64), seconds) for count, seconds in step_of.items()]


@pytest.mark.parametrize(("overlap", "median"), [(6.0, 0.02), (3.0, 0.04)])
def test_micro_batches_between_and_beyond_are_forecast(overlap: float, median: float) -> None:
    """Held out is a micro-batch of 256 beside 16 and 64; an overlap far from the usual one is found less well."""
    rows = steps_of(replace(TRUTH, overlap_beyond_sum=overlap), placements(), noise=0.02)
    calibration = fit(rows[::3] + rows[1::6])
    assert np.median(misses(calibration, rows[2::3])) < median
    assert misses(calibration, rows[2::3]).max() < 0.12
    assert 0.01 < calibration.error < 0.03


def test_a_slower_device_with_slower_links_is_the_same_but_for_its_scale() -> None:
    """But for launching and sums of gradients, which have absolute scales."""
    step_of = {1: 0.4, 2: 0.44, 4: 0.46}
    base, scaled = (
        predict(fit(of_one_node({n: s * by for n, s in step_of.items()})), [Placement(Layout((8,)), 64)])[0]
        for by in (1.0, 0.1)
    )
    assert scaled.total_s * 10 == pytest.approx(base.total_s, rel=0.1)


def test_a_long_step_of_many_passes_becomes_short_on_many_devices() -> None:
    """Launching, sums and the optimizer take milliseconds, also where a first row takes a minute."""
    rows = [Observation(Placement(Layout((8,) * n), 8192 // n), 12.0 / n) for n in (1, 2)]
    (forecast,) = predict(fit(rows), [Placement(Layout((8,) * 32), 256)])
    assert 0.9 < forecast.total_s / (12.0 / 32) < 1.3


def test_passes_that_accumulate_gradients_sum_them_once() -> None:
    """The step of 64 passes waits for gradients as rarely as that of one does."""
    rows = [
        Observation(Placement(Layout((8,) * n), 64, num_passes=64 // n), 6.4 / n + 0.1 * (n > 1)) for n in (1, 2, 4)
    ]
    one_pass, many = predict(
        fit(rows), [Placement(Layout((8,) * 8), 64), Placement(Layout((8,) * 8), 64, num_passes=8)]
    )
    assert many.total_s - one_pass.total_s == pytest.approx(0.7, rel=0.15)


@pytest.mark.parametrize(
    "step_of",
    [{1: 0.0623, 2: 0.0700, 8: 0.1268}, {1: 0.2910, 2: 0.3383, 8: 0.9363}, {1: 0.2237, 4: 0.3585, 8: 0.6991}],
)
def test_contention_inside_a_node_is_inside_the_interval(step_of: dict[int, float]) -> None:
    """Published: ResNet-50 and VGG-16 on RTX 3090 without peer-to-peer, a loader that limits eight V100."""
    rows = of_one_node(step_of)
    (forecast,) = predict(fit(rows[:2]), [rows[2].placement])
    assert forecast.low_s <= rows[2].step_time_s <= forecast.high_s


def test_more_rows_make_forecasts_surer() -> None:
    rows = steps_of(TRUTH, placements(), noise=0.02)
    wanted = [Placement(Layout((4,) * 8), 64)]
    widths = []
    for chosen in (rows[:2], rows[:12], rows):
        (forecast,) = predict(fit(chosen), wanted)
        widths.append(forecast.high_s / forecast.low_s)
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < 1.3 < widths[0]


def test_intervals_hold_nine_of_ten() -> None:
    rows = steps_of(TRUTH, placements(), noise=0.05, seed=1)
    train, test = rows[::2], rows[1::2]
    forecasts = predict(fit(train), [row.placement for row in test])
    inside = [f.low_s <= row.step_time_s <= f.high_s for f, row in zip(forecasts, test, strict=True)]
    assert np.mean(inside) >= 0.85


def test_constants_stay_physical_whatever_the_rows_say() -> None:
    """More devices that are faster each: nothing in the model does that."""
    calibration = fit(of_one_node({1: 0.5, 2: 0.3, 4: 0.1}))
    assert all((getattr(calibration.constants, name) > 0).all() for name in CONSTANT_NAMES)
    known = [Observation(Placement(Layout((1,) * n), 64, gradient_bytes=1e8), s) for n, s in ((1, 0.1), (2, 9.0))]
    beta = fit(known).medians()["between_beta_s_per_byte"]
    assert 1e-12 < beta < 1e-6


def test_a_row_that_contradicts_the_others_is_named() -> None:
    rows = steps_of(TRUTH, placements()[:24], noise=0.01)
    wrong = [*rows[:7], replace(rows[7], step_time_s=2 * rows[7].step_time_s, sync_time_s=None), *rows[8:]]
    _, contradictions = fit_without_mistakes(wrong)
    assert [one.row for one in contradictions] == [7]
    (found,) = contradictions
    assert not found.is_left_out
    assert found.forecast_s == pytest.approx(rows[7].step_time_s, rel=0.1)
    assert "contradicts the other rows" in found.sentence("obs.csv, line 9,")


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_row_in_milliseconds_is_left_out_of_three(wrong: int) -> None:
    rows = of_one_node({1: 0.40, 2: 0.42, 4: 0.44})
    mistaken = [
        replace(row, step_time_s=row.step_time_s * (1000 if place == wrong else 1)) for place, row in enumerate(rows)
    ]
    calibration, (found,) = fit_without_mistakes(mistaken)
    assert (found.row, found.is_left_out) == (wrong, True)
    assert "looks like milliseconds" in found.sentence("obs.csv, line 2,")
    assert misses(calibration, rows).max() < 0.1


@pytest.mark.parametrize(("step_of", "named"), [({1: 0.4, 2: 0.84, 4: 0.44}, 1), ({1: 0.4, 2: 420.0}, 1)])
def test_a_mistake_that_may_be_true_is_named_and_kept(step_of: dict[int, float], named: int) -> None:
    """A factor of two among three rows; milliseconds in one of two rows, either of which may be the mistake."""
    _, (found,) = fit_without_mistakes(of_one_node(step_of))
    assert (found.row, found.is_left_out) == (named, False)
    blames_either = "one of the two is wrong" in found.sentence("obs.csv, line 3,")
    assert blames_either == (len(step_of) == 2)


def test_rows_that_grow_by_contention_are_no_mistakes() -> None:
    rows = of_one_node({1: 0.2910, 2: 0.3383, 4: 0.5392, 8: 0.9363})
    assert not any(one.is_left_out for one in fit_without_mistakes(rows)[1])


def test_a_faster_link_and_another_algorithm_are_priced() -> None:
    rows = steps_of(TRUTH, [replace(one, gradient_bytes=1e8, link_bytes_per_s=1e9) for one in placements()])
    calibration = fit(rows)
    slow = Placement(Layout((1,) * 8), 16, gradient_bytes=1e8, link_bytes_per_s=1e9)
    fast, one_server = replace(slow, link_bytes_per_s=1e10), replace(slow, algorithm="parameter_server")
    at_slow, at_fast, at_server = predict(calibration, [slow, fast, one_server])
    assert at_slow.bound_by == "communication"
    assert at_fast.communication_s < 0.2 * at_slow.communication_s
    assert at_server.communication_s > 3 * at_slow.communication_s  # 2 (n - 1) against 2 (n - 1) / n, for n = 8


def test_an_algorithm_without_a_price() -> None:
    with pytest.raises(JobError, match="auto has no cost formula"):
        fit([Observation(Placement(Layout((1,)), 1, "auto"), 1.0)])
    assert predict(fit(of_one_node({1: 0.1})), []) == []


# Published tables. The rows that are forecast are not among those that are fitted.


def test_efficientnet_on_one_node_of_a100s() -> None:
    """EfficientNet on CIFAR-10, seconds for 25 epochs at a fixed batch per device; from one and two devices.

    An epoch has 1 / n of the steps on n devices, so a step takes n times the epoch's seconds over their number.
    """
    seconds_of = {1: 707, 2: 393, 3: 276, 4: 208}
    num_steps = 25 * 50_000 / 128  # of one device, at the batch that is not told: a scale, which hardly matters
    rows = of_one_node({n: seconds * n / num_steps for n, seconds in seconds_of.items()})
    assert (misses(fit(rows[:2]), rows[2:]) < 0.03).all()


@pytest.mark.parametrize(
    ("model", "gradient_bytes", "step_of"),
    [
        ("ResNet-50", 102e6, {1: 0.100, 2: 0.103, 4: 0.103, 8: 0.104, 16: 0.104}),
        ("ResNeXt-101-32x8d", 355e6, {1: 0.425, 2: 0.438, 4: 0.439, 8: 0.447, 16: 0.450}),
    ],
)
def test_ddp_benchmark_of_pytorch(model: str, gradient_bytes: float, step_of: dict[int, float]) -> None:
    """github.com/pytorch/pytorch, benchmarks/distributed/ddp: V100, 8 a node, 100 Gb/s InfiniBand, batch 32."""
    rows = [
        Observation(
            Placement(Layout((n,) if n <= 8 else (8, 8)), 32, gradient_bytes=gradient_bytes, link_bytes_per_s=12.5e9),
            seconds,
        )
        for n, seconds in step_of.items()
    ]
    assert (misses(fit(rows[:2]), rows[2:]) < 0.05).all()


def test_bert_large_over_bandwidth() -> None:
    """BERT-Large with DDP, seconds an epoch at 1 … 32 Gb/s between nodes, forecast from the two ends.

    Gradients have 1.34 GB (335 million parameters); as many steps an epoch as a ring needs to be busy at 1 Gb/s.
    """
    seconds_of = {1: 2591, 32: 125, 2: 1287, 4: 643, 8: 326, 16: 161}
    num_steps = 2591 / (2 * 1.34e9 / 0.125e9)
    rows = [
        Observation(
            Placement(Layout((1,) * 8), 8, gradient_bytes=1.34e9, link_bytes_per_s=gbit_per_s * 0.125e9),
            seconds / num_steps,
        )
        for gbit_per_s, seconds in seconds_of.items()
    ]
    assert (misses(fit(rows[:2]), rows[2:]) < 0.055).all()


@pytest.mark.parametrize(
    ("model", "images_per_s"),
    [("Inception-v3", {1: 142, 2: 284, 4: 569, 8: 1131}), ("VGG-16", {1: 154, 2: 295, 4: 584, 8: 1081})],
)
def test_tensorflow_on_a_dgx_1(model: str, images_per_s: dict[int, float]) -> None:
    """tensorflow.org/performance/benchmarks (2017): P100, batch 64 a device, synthetic images."""
    rows = of_one_node({n: 64 * n / rate for n, rate in images_per_s.items()})
    assert (misses(fit(rows[:2]), rows[2:]) < 0.06).all()


# The traces of Pollux (Qiao et al. 2021, OSDI): T4s in a cloud, 1 to 16 nodes of 1 to 4.

DATA = os.environ.get("PACELINE_TEST_DATA")
needs_traces = pytest.mark.skipif(DATA is None, reason="PACELINE_TEST_DATA does not say where the Pollux traces are")


def traces(name: str) -> list[Observation]:
    assert DATA is not None
    rows = []
    for kind in ("p", "s"):
        with (Path(DATA) / "pollux" / f"{name}-{kind}.csv").open() as file:
            for row in csv.DictReader(file):
                if kind == "p":
                    counts = [int(digit) for digit in row["placement"]]
                else:
                    each, rest = divmod(int(row["num_replicas"]), int(row["num_nodes"]))
                    counts = [each + (node < rest) for node in range(int(row["num_nodes"]))]
                placement = Placement(Layout(tuple(counts)), int(row["local_bsz"]))
                rows.append(Observation(placement, float(row["step_time"]), float(row["sync_time"])))
    return rows


@needs_traces
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "at_once", "with_sync_time"),
    [("cifar10", 4, True), ("cifar10", 12, False), ("imagenet", 4, False), ("imagenet", 12, True)],
)
def test_twelve_suggested_rows_forecast_all_others(name: str, at_once: int, with_sync_time: bool) -> None:
    rows = traces(name) if with_sync_time else [replace(row, sync_time_s=None) for row in traces(name)]
    row_of = {row.placement: row for row in rows}
    measured: list[Observation] = []
    while len(measured) < 12:
        known = {row.placement for row in measured}
        candidates = [placement for placement in row_of if placement not in known]
        measured += [row_of[one.placement] for one in suggest(measured, candidates, at_once)]
    known = {row.placement for row in measured}
    errors = misses(fit(measured), [row for row in rows if row.placement not in known])
    assert np.median(errors) <= 0.10
    assert np.quantile(errors, 0.9) <= 0.25


@needs_traces
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["cifar10", "imagenet"])
def test_all_rows_fit(name: str) -> None:
    rows = traces(name)
    calibration = fit(rows)
    errors = misses(calibration, rows)
    assert errors.mean() <= 0.07
    assert errors.mean() < _error_of_the_papers_model(rows)


def _error_of_the_papers_model(rows: Sequence[Observation]) -> float:
    """Mean relative error of the model of Qiao et al. 2021, 3.2, with its own constants fitted to the same rows."""
    from scipy.optimize import least_squares

    sizes = np.array([row.placement.micro_batch_size for row in rows], float)
    workers = np.array([row.placement.layout.num_workers for row in rows], float)
    nodes = np.array([row.placement.layout.num_nodes for row in rows])
    measured = np.array([row.step_time_s for row in rows])

    def forecast(logs: np.ndarray) -> np.ndarray:
        fixed, each, between, between_each, inside, inside_each, beyond = np.exp(logs)
        beyond_two = np.maximum(workers - 2, 0)
        sync = np.where(nodes > 1, between + between_each * beyond_two, inside + inside_each * beyond_two)
        gamma = 1 + beyond
        return ((fixed + each * sizes) ** gamma + np.where(workers > 1, sync, 0.0) ** gamma) ** (1 / gamma)  # type: ignore[no-any-return]

    start = np.log([0.02, 0.001, 0.1, 0.01, 0.01, 0.001, 1.5])
    fitted = least_squares(lambda logs: np.log(forecast(logs) / measured), start, loss="soft_l1", f_scale=0.1)
    return float(np.abs(forecast(fitted.x) / measured - 1).mean())
