"""Chooses the algorithm that sums a step's gradients, and gives its time and the exposed part."""

from __future__ import annotations

from dataclasses import replace

from paceline.plan.buckets import exposed_s, sums_of_exposed_s, sums_s
from paceline.plan.collectives import cost_s
from paceline.plan.inputs import PlanInputs, pass_s
from paceline.plan.model import Layout, Network
from paceline.plan.step_time import expected_maximum, neighbour_slowdown, neighbours_factor, slowest_s
from paceline.spec import AlgorithmName, Job
from paceline.spec.algorithm import automatic_algorithm

STRAGGLER_SPREAD = 0.02
"""Standard deviation over mean of one worker's computing time; the probe does not measure it."""
_MIN_SUM_FACTOR = 0.25
"""The minimum of a measured cost of a sum as a fraction of its price: links cannot be off by more."""


def chosen_algorithm(inputs: PlanInputs, job: Job, layout: Layout) -> tuple[AlgorithmName, float]:
    """The algorithm and its seconds for all gradients of a step, by the rules of `algorithm = "auto"`."""
    if layout.num_workers == 1:
        return "all_reduce", 0.0
    name: AlgorithmName = "tree_exact"
    if job.parity == "numeric":
        is_gloo = inputs.cluster.device_kind == "cpu"
        name = automatic_algorithm(layout.workers_per_node, is_gloo=is_gloo, wire=job.aggregation.wire)
    factor = _measured_factors(inputs, layout).get(name, 1.0)
    # Workers that synchronise every k-th step pay the k-th part.
    every = job.aggregation.sync_every if job.aggregation.is_infrequent else 1
    return name, _price_s(inputs, name, layout, job.aggregation.wire) * factor / every


def neighbours_factor_of(inputs: PlanInputs, layout: Layout) -> float:
    """Compute time of a worker on the fullest node over that of a single worker, from timings of all workers."""
    timing = inputs.timing
    # Divide out the assumed factor for waiting for the slowest worker.
    waiting = slowest_s(1.0, STRAGGLER_SPREAD, expected_maximum(timing.workers_together))
    slowdown = neighbour_slowdown(timing.together_slowdown / waiting, timing.workers_together_on_node)
    return float(neighbours_factor(slowdown, max(layout.workers_per_node)))


def network_in_steps(inputs: PlanInputs, layout: Layout) -> Network:
    """The links as Gloo's collectives find them in steps, where all workers communicate at once.

    A loopback stream keeps two cores busy, the sender's and the receiver's, and was timed alone. With g workers on c
    cores 2 g / c of them share what one had; where an all_reduce was timed in steps on one node, its factor counts.
    """
    network = inputs.network(layout)
    if inputs.cluster.device_kind != "cpu":
        return network
    shared = 2 * max(layout.workers_per_node) / max(1, inputs.cluster.nodes[0].num_cores)
    measured = _measured_factors(inputs, layout) if layout.num_nodes == 1 and layout.num_workers > 1 else {}
    factor = max(1.0, measured.get("all_reduce", shared))
    inside = replace(network.inside, beta_s_per_byte=factor * network.inside.beta_s_per_byte)
    return replace(network, inside=inside)


def exposed_sums_s(inputs: PlanInputs, compute_s: float, communication_s: float, layout: Layout) -> float:
    """What of the sums a step waits for, whose last pass takes `compute_s`."""
    if layout.num_workers == 1:
        return 0.0
    if not sums_are_hidden(inputs, layout):
        return communication_s
    if inputs.job.aggregation.is_infrequent:  # outer steps begin when backward has ended
        return communication_s
    return exposed_s(compute_s, 4.0 * inputs.timing.num_parameters, communication_s)


def _price_s(inputs: PlanInputs, name: AlgorithmName, layout: Layout, wire: str) -> float:
    """The price in seconds from link costs."""
    network = inputs.network(layout)
    return sums_s(
        4.0 * inputs.timing.num_parameters, lambda size_bytes: cost_s(name, size_bytes, layout, network, wire=wire)
    )


def _measured_factors(inputs: PlanInputs, layout: Layout) -> dict[AlgorithmName, float]:
    """Measured time over price of each timed algorithm in steps of all workers, on one node or several as here."""
    timing = inputs.timing
    together = inputs.layout(timing.workers_together)
    if (together.num_nodes == 1) != (layout.num_nodes == 1):
        return {}
    compute_s = neighbours_factor_of(inputs, together) * pass_s(timing, timing.together_micro_batch_size)
    factors: dict[AlgorithmName, float] = {}
    for timed in timing.sums:
        took_s = timed.waiting_s
        if sums_are_hidden(inputs, together):
            took_s = sums_of_exposed_s(compute_s, 4.0 * timing.num_parameters, timed.waiting_s)
        price_s = _price_s(inputs, timed.algorithm, together, timed.wire)
        factors[timed.algorithm] = max(_MIN_SUM_FACTOR, took_s / price_s)
    return factors


def sums_are_hidden(inputs: PlanInputs, layout: Layout) -> bool:
    """Whether gradients are summed while backward computes.

    On CPU, cores that all compute cannot add up on their node meanwhile; the tree of bitwise parity adds up sums of
    shards, the last of which comes with the end of the last backward pass.
    """
    num_busy = max(layout.workers_per_node) * inputs.timing.threads_per_worker
    is_full = inputs.cluster.device_kind == "cpu" and num_busy >= inputs.cluster.nodes[0].num_cores
    return inputs.job.parity == "numeric" and not (is_full and layout.num_nodes == 1)
