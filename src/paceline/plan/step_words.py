"""Sentences about a fit of step times: constants, assumptions, and rows that look wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from paceline.plan.calibrate import Calibration
from paceline.plan.step_constants import Constants, Observation, Placement
from paceline.words import duration

_LONG_STEP_S, _LONG_SAMPLE_S = 20.0, 0.1
"""A step and a sample of this many seconds are rare; of so many milliseconds, usual."""


def learnt_in_words(calibration: Calibration, measured: Sequence[Observation]) -> list[tuple[str, str, str]]:
    """What, the usual value, and how well it is known, a row for each thing that the measured rows bear on."""
    vector = calibration.gradient_bytes
    several_workers = any(row.placement.layout.num_workers > 1 for row in measured)
    several_nodes = any(row.placement.layout.num_nodes > 1 for row in measured)
    on_node = max(max(row.placement.layout.workers_per_node) for row in measured)
    told: list[tuple[str, bool, Callable[[Constants], object], Callable[[float], str]]] = [
        ("a sample on one device", True, lambda one: one.per_sample_s, duration),
        ("a pass beside its samples", True, lambda one: one.fixed_s, duration),
        (
            f"{on_node} workers of a node slow each other by",
            on_node > 1,
            lambda one: one.joint_slowdown + one.neighbour_slowdown * (1 - 1 / on_node),
            _percent,
        ),
        (
            f"sending gradients once through a node of {on_node}",
            several_workers and on_node > 1,
            lambda one: vector * (one.inside_beta_s_per_byte + on_node * one.shared_beta_s_per_byte),
            duration,
        ),
        (
            "sending gradients once between nodes",
            several_nodes,
            lambda one: vector * one.between_beta_s_per_byte,
            duration,
        ),
        ("a step waits longer on several nodes", several_nodes, lambda one: one.several_nodes_s, duration),
    ]
    rows = []
    for what, is_told, of, text in told:
        if is_told:
            values = np.asarray(of(calibration.constants), float).ravel()
            low, middle, high = np.quantile(values, (0.05, 0.5, 0.95))
            rows.append((what, text(float(middle)), f"{text(float(low))} to {text(float(high))}"))
    return rows


def assumed_in_words(measured: Sequence[Observation], asked: Sequence[Placement]) -> tuple[str, ...]:
    """A sentence for each thing that forecasts need and nobody measured."""
    layouts = [row.placement.layout for row in measured]
    asked_layouts = [placement.layout for placement in asked]
    most_nodes = max(layout.num_nodes for layout in layouts)
    most_on_node = max(max(layout.workers_per_node) for layout in layouts)
    asks_more = any(max(layout.workers_per_node) > most_on_node for layout in asked_layouts)
    smallest = min(row.placement.micro_batch_size for row in measured)
    fewest = min(layout.num_workers for layout in (*layouts, *asked_layouts))
    sentences = [
        (
            fewest > 1 and bool(asked),
            f"Nobody measured one device: speed-up and efficiency are over the fewest, {fewest}, each of which counts "
            "as one; measure one device.",
        ),
        (
            len(measured) == 1,
            "One row alone says nothing of how steps scale: all of that is what hardware usually has; measure a second "
            "row with more devices.",
        ),
        (
            most_nodes == 1 and any(layout.num_nodes > 1 for layout in asked_layouts),
            "Nobody measured two nodes: forecasts across nodes are what networks usually do, and their interval is as "
            "wide as that; measure one row on several nodes.",
        ),
        (
            len(measured) > 1 and most_on_node == 1 and asks_more,
            "Nobody measured two devices of one node; measure one such row.",
        ),
        (
            most_on_node > 1 and asks_more,
            f"Nobody measured more than {most_on_node} devices of one node, where a bus, the host or the loader may "
            "become the limit; measure one such row.",
        ),
        (
            any(placement.micro_batch_size < smallest / 4 for placement in asked),
            f"Micro-batches below a quarter of the smallest measured one ({smallest}) may be bound by launching "
            "kernels; measure one such row.",
        ),
    ]
    return tuple(sentence for is_assumed, sentence in sentences if is_assumed)


def unit_in_words(measured: Sequence[Observation]) -> tuple[str, ...]:
    """A sentence where all times look like milliseconds; else none."""
    is_long = all(
        row.step_time_s >= _LONG_STEP_S and row.step_time_s / row.num_samples >= _LONG_SAMPLE_S for row in measured
    )
    if not is_long:
        return ()
    example = measured[0].step_time_s
    return (
        f"All steps take {_LONG_STEP_S:.0f} s and more, the first one {example:g} s; if these are milliseconds, divide "
        "step_time_s by 1000: fixed costs are then priced right.",
    )


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2g} %"
