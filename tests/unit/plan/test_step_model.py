"""Forecasts from measured steps alone: laws of the model, intervals that are as wide as what is not known, mistakes.

One fit answers many questions, so that most tests share the fit of a module.
"""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest

from paceline.spec.forecast import ForecastRow
from tests.unit.plan.tables import Answer, Tables

ROWS = [(1, 1, 64, 0.310), (1, 2, 64, 0.331), (1, 4, 64, 0.352)]
COUNTS, SIZES = (1, 2, 4, 8), (8, 16, 64, 128)
ASKED = [*product((1, 2, 4, 16), COUNTS, SIZES)]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    return Tables(tmp_path_factory.mktemp("tables"))


@pytest.fixture(scope="module")
def one_node(tables: Tables) -> Answer:
    """Three rows inside a node, and every question."""
    return tables.answer(ROWS, ASKED, price=2.0)


LINKED = [
    (1, 1, 32, 0.100, "all_reduce", 102e6, 12.5e9, 1),
    (1, 8, 32, 0.104, "all_reduce", 102e6, 12.5e9, 1),
    (2, 8, 32, 0.108, "all_reduce", 102e6, 12.5e9, 1),
]
LINK_COLUMNS = ("algorithm", "gradient_bytes", "link_bytes_per_s", "grad_accum_steps")
LINK_QUESTIONS = [
    *[(4, 8, 32, "all_reduce", 102e6, rate, 1) for rate in (1.25e8, 1.25e9, 12.5e9, 1e11)],
    *[(4, 8, 32, "all_reduce", size, 12.5e9, 1) for size in (1e7, 1e8, 1e9, 1e10)],
    *[(4, 8, 32, name, 102e6, 1.25e8, 1) for name in ("ring", "parameter_server", "hierarchical")],
    *[(4, 8, 32, "all_reduce", 102e6, 1.25e8, passes) for passes in (1, 2, 8)],
]


@pytest.fixture(scope="module")
def linked(tables: Tables) -> Answer:
    """Rows whose gradients and links are known."""
    return tables.answer(LINKED, LINK_QUESTIONS, more=LINK_COLUMNS)


def steps(fitted: Answer) -> dict[tuple[int, int, int], ForecastRow]:
    """Rows by nodes, devices of each and micro-batch."""
    return dict(zip(ASKED, fitted.rows, strict=True))


def test_a_measured_row_is_forecast_as_it_was_measured(one_node: Answer) -> None:
    known = steps(one_node)
    for nodes, devices, size, seconds in ROWS:
        row = known[nodes, devices, size]
        assert row.step_s == pytest.approx(seconds, rel=0.02)
        assert row.low_s < seconds < row.high_s


def test_intervals_hold_the_forecast_and_its_parts_add_up(one_node: Answer) -> None:
    for row in one_node.rows:
        assert 0 < row.low_s <= row.step_s <= row.high_s
        assert row.compute_s + row.overhead_s + row.exposed_s == pytest.approx(row.step_s)
        assert min(row.compute_s, row.communication_s, row.overhead_s, row.exposed_s) >= 0


def test_a_larger_batch_is_never_faster_and_never_slower_per_sample(one_node: Answer) -> None:
    known = steps(one_node)
    for nodes, devices in product((1, 2, 4, 16), COUNTS):
        for fewer, more in pairwise(SIZES):
            one, other = known[nodes, devices, fewer], known[nodes, devices, more]
            assert one.step_s <= other.step_s * (1 + 1e-6)
            assert other.samples_per_s >= one.samples_per_s * (1 - 1e-6)


def test_more_workers_never_make_a_step_of_the_same_batch_a_device_faster(one_node: Answer) -> None:
    known = steps(one_node)
    for size, nodes in product(SIZES, (1, 2, 4, 16)):
        inside = [known[nodes, devices, size].step_s for devices in COUNTS]
        assert all(one <= other * (1 + 1e-3) for one, other in pairwise(inside)), (size, nodes, inside)
    for size, devices in product(SIZES, COUNTS):
        assert known[1, devices, size].step_s <= known[2, devices, size].step_s
        assert known[2, devices, size].samples_per_s < known[16, devices, size].samples_per_s * 8


def test_an_extrapolation_is_named_and_widens_the_interval(one_node: Answer) -> None:
    known = steps(one_node)
    widths = {place: known[place].high_s / known[place].low_s for place in ASKED}
    assert widths[1, 2, 64] < widths[1, 8, 64] < widths[2, 8, 64]
    assert widths[1, 2, 64] < 1.3 < widths[2, 8, 64]
    said = one_node.said
    assert "two nodes" in said and "more than 4 devices" in said


def test_speed_up_efficiency_and_cost_are_over_one_device(one_node: Answer) -> None:
    base = max(row.samples_per_s for row in one_node.rows if row.devices == 1)
    for row in one_node.rows:
        assert row.samples_per_s == pytest.approx(row.global_batch_size / row.step_s)
        assert row.speedup == pytest.approx(row.samples_per_s / base)
        assert row.efficiency == pytest.approx(row.speedup / row.devices)
        assert row.cost_per_million_samples == pytest.approx(2.0 * row.devices / 3600 * 1e6 / row.samples_per_s)


def test_the_recommended_placement_is_one_of_the_rows_and_the_page_marks_it(one_node: Answer) -> None:
    row = one_node.forecast.recommended
    assert row in one_node.rows
    assert f"{row.devices} devices" in one_node.forecast.verdict and row.placement in one_node.forecast.verdict
    assert one_node.page.count('class="recommended"') == 1


def test_the_same_rows_give_the_same_forecast(tables: Tables, one_node: Answer) -> None:
    """Draws are seeded; the order of questions and other questions change nothing."""
    again = tables.answer(ROWS, ASKED[:3])
    assert [row.step_s for row in again.rows] == [row.step_s for row in one_node.rows[:3]]


def test_a_faster_link_never_slows_a_step_and_more_gradient_bytes_never_speed_it_up(linked: Answer) -> None:
    total = [row.step_s for row in linked.rows]
    assert total[:4] == sorted(total[:4], reverse=True)
    assert total[0] > 1.5 * total[2]  # a hundredth of the rate
    assert linked.rows[0].bound_by == "communication"
    assert total[4:8] == sorted(total[4:8]) and total[7] > 2 * total[5]


def test_algorithms_differ_by_their_formulas(linked: Answer) -> None:
    """One server sends and receives 2 (n - 1) vectors over a node's link, a ring 2 (n - 1) / n of one."""
    ring, server, hierarchical = linked.rows[8:11]
    assert server.communication_s > 4 * ring.communication_s
    assert hierarchical.communication_s < server.communication_s


def test_passes_that_accumulate_gradients_sum_them_once(linked: Answer) -> None:
    """Over a slow link: seven passes more cost what seven passes compute."""
    one, two, eight = (row.step_s for row in linked.rows[11:])
    assert one > 1.5 * 0.108
    assert (two - one, (eight - one) / 7) == pytest.approx((0.104, 0.104), rel=0.1)


def test_a_long_step_of_many_passes_scales_to_many_devices(tables: Tables) -> None:
    """Launching, sums and the optimizer take milliseconds, also where a first row takes a minute."""
    fitted = tables.answer([(1, 8, 8192, 12.0), (2, 8, 4096, 6.0)], [(32, 8, 256)])
    assert 0.9 < fitted.rows[0].step_s / (12.0 / 32) < 1.3


def test_all_times_ten_times_shorter_give_a_forecast_ten_times_shorter(tables: Tables) -> None:
    base, scaled = (
        tables.answer([(1, n, 64, by * s) for n, s in ((1, 0.4), (2, 0.44))], [(1, 8, 64)]).rows[0].step_s
        for by in (1.0, 0.1)
    )
    assert scaled * 10 == pytest.approx(base, rel=0.1)


def test_one_row_alone_is_said_to_be_too_few_for_scaling(tables: Tables) -> None:
    fitted = tables.answer(ROWS[:1], [(1, 1, 64), (1, 8, 64)])
    assert "One row alone" in fitted.said
    assert all(forecast.high_s > 1.05 * forecast.low_s for forecast in fitted.rows)
    assert fitted.rows[1].high_s / fitted.rows[1].low_s > 1.2


def test_without_a_row_of_one_device_figures_are_over_the_fewest(tables: Tables) -> None:
    fitted = tables.answer([(1, 8, 64, 0.4), (2, 8, 64, 0.5)], [(2, 8, 64), (4, 8, 64)])
    eight, _, most = fitted.forecast.rows
    assert (fitted.forecast.base_devices, eight.devices, eight.speedup, eight.efficiency) == (8, 8, 8, 1)
    gain = most.samples_per_s / eight.samples_per_s
    assert "32 devices" in fitted.forecast.verdict and f"{gain:.2f}x the speed of 8" in fitted.forecast.verdict
    assert "8" in fitted.said


def test_a_pair_that_does_not_pay_is_not_recommended(tables: Tables) -> None:
    forecast = tables.answer([(1, 1, 64, 0.0723), (1, 2, 64, 0.3)], [(1, 1, 64), (1, 2, 64)]).forecast
    assert forecast.recommended_devices == 1 and "50 %" in forecast.reason


def test_a_step_stays_above_zero_whatever_the_rows_say(tables: Tables) -> None:
    """More devices that are faster each: nothing in the model does that."""
    fitted = tables.answer([(1, 1, 64, 0.5), (1, 2, 64, 0.3)], [(1, 4, 64)])
    assert 0 < fitted.rows[0].low_s <= fitted.rows[0].high_s < math.inf


# --- what others have published; the rows that are forecast are not among those that are fitted ---


def test_efficientnet_on_one_node_of_a100s(tables: Tables) -> None:
    """EfficientNet on CIFAR-10, seconds for 25 epochs at a fixed batch per device; from one and two devices within 3 %.

    An epoch has 1 / n of the steps on n devices, so a step takes n times the epoch's seconds over their number.
    """
    seconds_of = {1: 707, 2: 393, 3: 276, 4: 208}
    num_steps = 25 * 50_000 / 128  # of one device, at a batch that is not told: a scale, which hardly matters
    rows = [(1, n, 128, seconds * n / num_steps) for n, seconds in seconds_of.items()]
    fitted = tables.answer(rows[:2], [row[:3] for row in rows[2:]])
    for forecast, row in zip(fitted.rows, rows[2:], strict=True):
        assert forecast.step_s == pytest.approx(row[3], rel=0.03)
        assert forecast.low_s < row[3] < forecast.high_s


@pytest.mark.parametrize(
    ("gradient_bytes", "seconds_of"),
    [
        (102e6, {1: 0.100, 2: 0.103, 4: 0.103, 8: 0.104, 16: 0.104}),  # ResNet-50
        (355e6, {1: 0.425, 2: 0.438, 4: 0.439, 8: 0.447, 16: 0.450}),  # ResNeXt-101-32x8d
    ],
)
def test_ddp_benchmark_of_pytorch(tables: Tables, gradient_bytes: float, seconds_of: dict[int, float]) -> None:
    """github.com/pytorch/pytorch, benchmarks/distributed/ddp: V100, 8 a node, 100 Gb/s InfiniBand, batch 32."""
    columns = ("gradient_bytes", "link_bytes_per_s")
    rows = [(max(1, n // 8), min(n, 8), 32, seconds, gradient_bytes, 12.5e9) for n, seconds in seconds_of.items()]
    fitted = tables.answer(rows[:2], [(*row[:3], *row[4:]) for row in rows[2:]], more=columns)
    for forecast, row in zip(fitted.rows, rows[2:], strict=True):
        assert forecast.step_s == pytest.approx(row[3], rel=0.05)


def test_bert_large_over_bandwidth(tables: Tables) -> None:
    """BERT-Large with DDP, seconds an epoch at 1 … 32 Gb/s between nodes, forecast from the two ends.

    Gradients have 1.34 GB (335 million parameters); as many steps an epoch as a ring needs to be busy at 1 Gb/s.
    """
    seconds_of = {1: 2591, 32: 125, 2: 1287, 4: 643, 8: 326, 16: 161}
    num_steps = 2591 / (2 * 1.34e9 / 0.125e9)
    rows = [(8, 1, 8, seconds / num_steps, 1.34e9, rate * 0.125e9) for rate, seconds in seconds_of.items()]
    columns = ("gradient_bytes", "link_bytes_per_s")
    fitted = tables.answer(rows[:2], [(*row[:3], *row[4:]) for row in rows[2:]], more=columns)
    for forecast, row in zip(fitted.rows, rows[2:], strict=True):
        assert forecast.step_s == pytest.approx(row[3], rel=0.055)


def test_between_two_rows_all_that_explains_them_counts(tables: Tables) -> None:
    """VGG-16 on RTX 3090 without peer-to-peer; the middle half of what explains both rows is 12 % too low at four."""
    fitted = tables.answer([(1, 1, 128, 0.2910), (1, 8, 128, 0.9363)], [(1, 2, 128), (1, 4, 128)])
    assert [row.step_s for row in fitted.rows] == pytest.approx([0.3383, 0.5392], rel=0.09)


@pytest.mark.parametrize(
    "seconds_of",
    [{1: 0.0623, 2: 0.0700, 8: 0.1268}, {1: 0.2910, 2: 0.3383, 8: 0.9363}, {1: 0.2237, 4: 0.3585, 8: 0.6991}],
)
def test_contention_inside_a_node_is_inside_the_interval(tables: Tables, seconds_of: dict[int, float]) -> None:
    """ResNet-50 and VGG-16 on RTX 3090 without peer-to-peer, a loader that limits eight V100."""
    *measured, last = [(1, n, 64, seconds) for n, seconds in seconds_of.items()]
    (forecast,) = tables.answer(measured, [last[:3]]).rows
    assert forecast.low_s <= last[3] <= forecast.high_s
