"""Requests and results of probes, stored as JSON. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.spec import DeviceKind, Job, JobTiming, Link, NetworkLink, Node
from paceline.spec.codec import JsonValue, above_zero, at_least

REQUEST_FILE = "request.json"
LINKS_FILE, NETWORK_FILE, JOB_FILE = "links{rank}.json", "network.json", "probe.json"
"""File names of the probes' results in the given folder."""


@dataclass(frozen=True)
class LinkRequest(JsonValue):
    """The nodes inside of which links are timed; rank r is on node r."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class LinkProbe(JsonValue):
    """The measured links of one node, and a sentence for everything that was not measured."""

    links: tuple[Link, ...] = ()
    not_measured: tuple[str, ...] = ()


@dataclass(frozen=True)
class NetworkRequest(JsonValue):
    """The pairs of nodes whose messages to each other are timed; rank r is on node r."""

    hostnames: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...]
    device_kind: DeviceKind = "cpu"
    num_streams: int = at_least(2, 4)
    """Connections in parallel, to compare with one alone."""
    timeout_s: float = at_least(1, 600.0)
    """How long a collective waits for a silent worker."""


@dataclass(frozen=True)
class NetworkProbe(JsonValue):
    """What was measured between nodes."""

    links: tuple[NetworkLink, ...]


@dataclass(frozen=True)
class JobRequest(JsonValue):
    """The job whose parts are timed, and how."""

    job: Job
    folder: str
    """On the disk that checkpoints go to; workers also find each other's orders there."""
    largest_micro_batch_size: int = at_least(1, 1)
    """The largest pass that training makes: that of one worker alone."""
    micro_batch_size: int = at_least(1, 1)
    """The largest pass with all workers of the plan."""
    shard_size: int = at_least(1, 1)
    """Samples of a virtual shard, over which batch norm normalises."""
    workers_on_node: int = at_least(1, 1)
    """On the fullest node, with all workers of the plan."""
    device_kind: DeviceKind = "cpu"
    device: str = ""
    """What the device is called in the result."""
    threads_per_worker: int = at_least(1, 1)
    budget_s: float = above_zero(60.0)


@dataclass(frozen=True)
class JobProbe(JsonValue):
    """The timing of a job, and a sentence for everything that was not measured."""

    timing: JobTiming
    not_measured: tuple[str, ...] = ()
