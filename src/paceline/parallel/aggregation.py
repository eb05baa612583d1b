"""Builds the `Aggregator` of a run from a job and a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.comm import ALGORITHMS, WIRE_FORMATS, Aggregator, Links, Scheduler
from paceline.spec import AlgorithmName, Job, Plan
from paceline.spec.algorithm import automatic_algorithm
from paceline.spec.wire import WIRE_FACTS


@dataclass(frozen=True)
class Aggregation:
    """How the workers of a run aggregate gradients."""

    aggregator: Aggregator
    algorithm: AlgorithmName
    """The name of the algorithm: the plan's, or what "auto" is here."""
    notes: tuple[str, ...]


def set_up_aggregation(job: Job, plan: Plan, links: Links) -> Aggregation:
    """How workers sum gradients over their links."""
    wire = job.aggregation.wire
    if wire == "auto-lossy":
        # A smaller message pays between nodes; inside of one it costs more to write than to send.
        wire = "bfloat16" if len(links.nodes) > 1 else "float32"
    algorithm = plan.algorithm
    if algorithm == "auto":
        sizes = [len(node) for node in links.nodes]
        algorithm = automatic_algorithm(sizes, is_gloo=links.device.type == "cpu", wire=wire)
    notes: tuple[str, ...] = ()
    if not WIRE_FORMATS[wire].is_exact:
        lost = WIRE_FACTS[wire].loss
        notes = (f"gradients are not exact: {lost}; the result may depend on the number of workers",)
    links = replace(links, wire=WIRE_FORMATS[wire], num_servers=min(plan.num_servers, links.world_size))
    scheduler = Scheduler(links.group, links.device, plan.debug_comm)
    return Aggregation(Aggregator(ALGORITHMS[algorithm], links, scheduler), algorithm, notes)
