"""Simulates steps of large clusters: thousands of nodes, stragglers and links that differ.

Time is followed node by node, and many steps side by side: every device computes, a node is ready with its slowest
device, buckets of gradients travel between nodes while backward goes on, and every message waits for the node that
sends it. The same seed gives the same result. `exchange_s` is the closed form that tests hold the simulation to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceline.plan.buckets import BACKWARD_SHARE
from paceline.plan.model import Network
from paceline.spec.algorithm import AlphaBeta

Array = NDArray[np.float64]

Pattern = Literal["ring", "halving_doubling"]
"""How nodes exchange the sums of their devices; halving and doubling: a power of two of them."""


@dataclass(frozen=True)
class Machine:
    """Equal nodes with equal devices; the devices of a node share its link to the others."""

    num_nodes: int
    devices_per_node: int
    network: Network

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node


@dataclass(frozen=True)
class Jitter:
    """How far devices, nodes and links are from all being equal."""

    compute_spread: float = 0.0
    """Standard deviation of a device's computing time over its mean, drawn anew in every step."""
    slow_fraction: float = 0.0
    """The fraction of the nodes that is slow all the time."""
    slow_factor: float = 1.0
    """How many times as long they compute."""
    link_spread: float = 0.0
    """Standard deviation of the logarithm of a message's time, drawn once a step for each node's link."""


@dataclass(frozen=True)
class StepSample:
    """Simulated steps: one value a step, in seconds."""

    total_s: Array
    exposed_s: Array
    """Seconds from when the last node had computed to the end of the step."""


def simulate_steps(
    machine: Machine,
    compute_s: float,
    gradient_bytes: float,
    *,
    jitter: Jitter | None = None,
    pattern: Pattern = "ring",
    num_buckets: int = 4,
    num_steps: int = 16,
    seed: int = 0,
) -> StepSample:
    """Steps of synchronous data parallelism with a sum in two levels.

    Bucket j of `num_buckets` is ready at compute_s (1 - 2/3 (num_buckets - j) / num_buckets), stretched as its node is
    slow. Inside a node it takes 2 (g - 1) messages of 1/g of it around g devices. Between n nodes it takes `pattern`:
    a ring of 2 (n - 1) messages of 1/n (Patarasuk and Yuan 2009), or halving and doubling, 2 log2 n messages of
    1/2, 1/4, … (Thakur et al. 2005). A node sends its buckets one after the other.
    """
    jitter = jitter or Jitter()
    rng = np.random.default_rng(seed)
    shape = (num_steps, machine.num_nodes)
    stretch = _slowest_of(machine.devices_per_node, jitter.compute_spread, rng.random(shape))
    num_slow = round(jitter.slow_fraction * machine.num_nodes)
    slow = rng.permutation(machine.num_nodes)[:num_slow]
    stretch[:, slow] *= jitter.slow_factor
    links = np.exp(jitter.link_spread * rng.standard_normal(shape))
    bucket_bytes = gradient_bytes / num_buckets
    inside_s = _inside_s(machine, bucket_bytes)
    exchange = _ring if pattern == "ring" else _halving_doubling
    free = np.zeros(shape)
    for bucket in range(1, num_buckets + 1):
        ready = compute_s * (1 - BACKWARD_SHARE * (num_buckets - bucket) / num_buckets) * stretch
        start = np.maximum(ready, free) + inside_s
        free = exchange(start, bucket_bytes, machine.network.between, machine.network.per_message_s, links)
    computed = compute_s * stretch.max(axis=1)
    total = np.maximum(free.max(axis=1), computed)
    return StepSample(total, total - computed)


def _slowest_of(num_devices: int, spread: float, uniform: Array) -> Array:
    """The maximum of `num_devices` normal numbers around 1: F^-1(u^(1/n)), exact and as cheap as one number."""
    # 1 - u^(1/n) keeps its digits where u^(1/n) is almost 1.
    upper = -np.expm1(np.log(np.maximum(uniform, 1e-300)) / num_devices)
    deviations = np.fromiter(map(NormalDist().inv_cdf, upper.ravel()), float, upper.size)
    return np.maximum(1 - spread * deviations.reshape(upper.shape), 0.0)


def _inside_s(machine: Machine, size_bytes: float) -> float:
    g = machine.devices_per_node
    return 2 * (g - 1) * (machine.network.per_message_s + machine.network.inside.seconds(size_bytes / g))


def _ring(start: Array, size_bytes: float, level: AlphaBeta, per_message_s: float, links: Array) -> Array:
    """When each node has the sum: in every phase it waits for its own last message and for that of its neighbour."""
    num_nodes = start.shape[1]
    hop = (per_message_s + level.seconds(size_bytes / num_nodes)) * links
    time = start
    for _ in range(2 * (num_nodes - 1)):
        time = np.maximum(time, np.roll(time, 1, axis=1)) + hop
    return time


def _halving_doubling(start: Array, size_bytes: float, level: AlphaBeta, per_message_s: float, links: Array) -> Array:
    num_nodes = start.shape[1]
    nodes = np.arange(num_nodes)
    distances = [num_nodes >> power for power in range(1, num_nodes.bit_length())]
    time = start
    for distance in [*distances, *reversed(distances)]:
        partner = nodes ^ distance
        part_s = per_message_s + level.seconds(size_bytes * distance / num_nodes)
        time = np.maximum(time, time[:, partner]) + part_s * np.maximum(links, links[:, partner])
    return time


def exchange_s(machine: Machine, gradient_bytes: float, pattern: Pattern = "ring") -> float:
    """The closed form of one sum of the whole gradient with all nodes ready: what `simulate_steps` adds."""
    n, network = machine.num_nodes, machine.network
    inside_s = _inside_s(machine, gradient_bytes)
    if pattern == "ring":
        return inside_s + 2 * (n - 1) * (network.per_message_s + network.between.seconds(gradient_bytes / n))
    latency_s = network.between.alpha_s + network.per_message_s
    return inside_s + 2 * math.log2(n) * latency_s + 2 * (n - 1) / n * gradient_bytes * network.between.beta_s_per_byte
