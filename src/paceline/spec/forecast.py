"""`ModelCost`: what a model costs, by layer and sample; `Forecast`: what a job is expected to do on several numbers of
devices, made by `plan`, shown by `report`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from paceline.spec.algorithm import AlgorithmName
from paceline.spec.codec import JsonValue

BoundBy = Literal["compute", "communication", "loader", "overhead"]
Grow = Literal["none", "batch"]
"""What grows with the number of devices: nothing (fixed global batch), or the global batch (fixed batch per device)."""


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer for one micro-batch; in a `ModelCost`, for one sample."""

    name: str = ""
    time_s: float = 0.0
    """Time of a forward and backward pass; if not measured, in an arbitrary unit common to all layers."""
    parameter_bytes: float = 0
    activation_bytes: float = 0
    """Bytes that the forward pass keeps for the backward pass."""
    output_bytes: float = 0
    """Bytes that a stage ending here sends to the next one; gradients of the same size return. The last: its logits."""
    may_begin: bool = True
    """Whether a stage of a pipeline may begin with this layer."""
    num_tensor_slices: int = 1
    """Heads, groups or output channels that tensor parallelism can distribute; 1: every worker computes all of it."""
    num_all_reduces: int = 0
    """How many all-reduces a tensor group makes, forward and backward, of `output_bytes` each."""
    replicated_fraction: float = 1.0
    """The fraction of `activation_bytes` that each worker of a tensor group keeps whole."""
    moment_bytes: float = 0
    """Bytes that live only while backward goes through this layer: the gradients of its output and of its input."""
    largest_parameter_bytes: float = 0
    """Bytes of the largest parameter: its gradient lives beside the sum that it is added to."""
    tied_bytes: float = 0
    """Bytes of parameters of layers before it that it uses too, as a classifier does an embedding's."""
    root_bytes: float = 0
    """Bytes of parameters that stand in no list of layers: fsdp gathers them for a whole pass, not for their layer."""

    def tensor_shards(self, degree: int) -> int:
        """Into how many shards a tensor group divides the layer: `degree` where they are even, else 1."""
        return degree if self.num_tensor_slices % degree == 0 else 1


Layers = tuple[LayerCost, ...]


@dataclass(frozen=True)
class ModelCost:
    """The costs of a model from a trace or a measurement."""

    num_parameters: int
    bytes_per_sample: float | None = None
    """One pass on a device with the whole model holds fixed_bytes + samples * bytes_per_sample at its peak; None: not
    known."""
    fixed_bytes: float = 0.0
    input_bytes: float = 0.0
    """Bytes of a sample as the model takes it; 0: not known."""
    layers: Layers = ()
    """The layers of the model; empty: unknown."""


@dataclass(frozen=True)
class ForecastRow:
    """The forecast of one number of devices. `None` stands for values not measured or not requested."""

    devices: int
    nodes: int
    algorithm: AlgorithmName
    """The fastest algorithm; "all_reduce" unless another is clearly faster."""
    global_batch_size: int
    micro_batch_size: int
    """Samples per pass of the worker with the largest assignment."""
    num_micro_batches: int
    step_s: float
    compute_s: float
    communication_s: float
    """Time of all communication, hidden or not."""
    exposed_s: float
    """Time of exposed communication, which compute does not hide."""
    loader_s: float
    overhead_s: float
    bound_by: BoundBy
    low_s: float
    high_s: float
    """`low_s` to `high_s` is the 90 % prediction interval of a measured step."""
    samples_per_s: float
    speedup: float
    """Throughput over that of one device, or of one of the forecast's `base_devices`; `efficiency` is it / devices."""
    efficiency: float
    useful_efficiency: float | None = None
    """Efficiency times what a sample is worth beside one of a small batch; needs a noise scale."""
    samples_to_target: float | None = None
    time_to_target_s: float | None = None
    cost_to_target: float | None = None
    cost_per_million_samples: float | None = None
    memory_bytes: float | None = None
    """Memory of the device that needs most."""
    objection: str = ""
    """Why the job cannot run on this number of devices; empty: it can."""
    placement: str = ""
    """How it differs from other rows of as many devices, such as "2+6, micro-batch 64"; empty: it is the only one."""


@dataclass(frozen=True)
class Forecast(JsonValue):
    """Rows in ascending order of devices, the recommended one, and the reasons."""

    job: str
    device: str
    device_kind: str
    grow: Grow
    rows: tuple[ForecastRow, ...]
    recommended_devices: int
    verdict: str
    reason: str
    """A sentence or a few; the verdict is one short line."""
    strategy: tuple[str, ...] = ()
    """A sentence each about the best mesh on the recommended devices and the next best."""
    assumptions: tuple[str, ...] = ()
    """What was not measured and the assumption used instead, one sentence each."""
    efficiency_floor: float = 0.5
    price_per_device_hour: float | None = None
    currency: str = ""
    """Currency of the price and of all costs, such as "EUR"; empty: the user did not say."""
    run_samples: int | None = None
    """Samples that the job trains on in all of its epochs; None: the size of its training set is not known."""
    noise_scale: float | None = None
    past_error: str = ""
    """The accuracy of forecasts for this cluster: "within 4 % on the last 12 runs"; empty: none was checked."""
    is_fitted: bool = False
    """Whether it comes from measured step times alone, and not from what `probe` measured."""
    base_devices: int = 1
    """The fewest devices, to whose throughput per device speed-up and efficiency refer."""

    @property
    def recommended(self) -> ForecastRow:
        """The fastest row of the recommended number of devices."""
        return next(row for row in fastest_of_each_count(self.rows) if row.devices == self.recommended_devices)


def fastest_of_each_count(rows: Iterable[ForecastRow]) -> tuple[ForecastRow, ...]:
    """The fastest row of each number of devices, in the order of `rows`."""
    best: dict[int, ForecastRow] = {}
    for row in rows:
        if row.devices not in best or row.samples_per_s > best[row.devices].samples_per_s:
            best[row.devices] = row
    return tuple(best.values())
