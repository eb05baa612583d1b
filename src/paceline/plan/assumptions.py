"""The assumptions of a forecast in place of measurements, and the accuracy of earlier forecasts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.plan.collectives import WIRE_FACTORS
from paceline.plan.forecast_row import MEMORY_RATE, STEP_OVERHEAD_S
from paceline.plan.gradient_sums import STRAGGLER_SPREAD
from paceline.plan.inputs import PlanInputs
from paceline.plan.network_costs import BETWEEN_ALPHA_S
from paceline.spec import ForecastCheck
from paceline.spec.forecast import ForecastRow

DEVICE_MTBF_S = 50_000 * 3600.0
"""Llama 3 (Dubey et al. 2024, section 3.3.4): 419 unexpected interruptions in 54 days of 16,384 H100."""
RESTART_S = 300.0
"""Seconds to detect a failure, start workers and load a checkpoint."""


def past_error(checks: Sequence[ForecastCheck]) -> str:
    """ "within 4 % on the last 12 runs", the 90th percentile of the errors of forecasts; empty without a run."""
    if not checks:
        return ""
    errors = sorted(abs(check.error) for check in checks)
    worst = errors[math.ceil(0.9 * len(errors)) - 1]
    runs = "run" if len(errors) == 1 else f"{len(errors)} runs"
    return f"within {worst:.0%} on the last {runs}".replace("%", " %")


def assumptions(inputs: PlanInputs, rows: Sequence[ForecastRow]) -> tuple[str, ...]:
    """A sentence for each value that was assumed for these rows."""
    cluster, timing, wire = inputs.cluster, inputs.timing, inputs.job.aggregation.wire
    num_devices = sum(inputs.node_sizes)
    largest = max(one.micro_batch_size for one in timing.micro_batches)
    is_beyond = rows[-1].devices > num_devices
    sentences = [
        (True, f"A step has {STEP_OVERHEAD_S * 1e3:.1f} ms of overhead besides passes and optimizer."),
        (True, f"A worker's pass varies by {STRAGGLER_SPREAD:.0%}; all wait for the slowest."),
        (timing.update_s is None, f"The optimizer moves {MEMORY_RATE[cluster.device_kind] / 1e9:.0f} GB/s."),
        (
            timing.workers_together == 1 and any(row.devices > row.nodes for row in rows),
            "Workers of a node do not slow each other; nobody timed them together.",
        ),
        (
            not timing.sums and any(row.devices > 1 for row in rows),
            "Sums of gradients cost in a step what links alone make of them; nobody timed them in steps.",
        ),
        (
            not cluster.network and any(row.nodes > 1 for row in rows),
            f"Links between nodes carry {(inputs.request.link_bytes_per_s or 0.0) / 1e9:g} GB/s as given, after "
            f"{BETWEEN_ALPHA_S * 1e6:.0f} µs.",
        ),
        (
            is_beyond,
            f"Beyond the {num_devices} devices of this cluster there are more nodes of {inputs.more_devices_per_node} "
            "like the first.",
        ),
        (
            is_beyond,
            f"A device fails every {DEVICE_MTBF_S / 3600:,.0f} hours, as in the training of Llama 3, and a restart "
            f"takes {RESTART_S / 60:.0f} minutes.",
        ),
        (
            any(row.micro_batch_size > largest for row in rows),
            f"Passes of more than {largest} samples were not timed; they continue the line of the last two.",
        ),
        (inputs.activations is None, "Memory of activations was not measured; meshes are compared without it."),
        (
            wire not in WIRE_FACTORS,
            f"The wire format {wire} is priced as float32, which is the most it costs.",
        ),
    ]
    return tuple(sentence for is_assumed, sentence in sentences if is_assumed)
