"""How much memory a device needs for a job, by the way the model is shared out.

Four things lie in a device's memory: parameters, gradients, optimizer state, and the activations that the backward pass
waits for. The first three follow from the number of parameters (Rajbhandari et al. 2020, "ZeRO", section 3); the
last is measured by `paceline probe`, or counted for a transformer (Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.errors import JobError
from paceline.plan.model import Mesh
from paceline.spec import Job, MicroBatchTiming

Recompute = Literal["none", "selective", "full"]

USABLE_SHARE = 0.92
"""Of a device's memory; the rest is the driver's, the communication library's and lost between allocations."""


@dataclass(frozen=True)
class StateBytes:
    """What one parameter takes: itself, its gradient, and what the optimizer keeps for it."""

    parameter: float = 4.0
    gradient: float = 4.0
    optimizer: float = 4.0

    @property
    def total(self) -> float:
        return self.parameter + self.gradient + self.optimizer


MIXED_ADAM = StateBytes(2.0, 2.0, 12.0)
"""Adam over 16-bit parameters: a float32 copy, momentum and variance (Rajbhandari et al. 2020, K = 12)."""


def state_bytes(job: Job) -> StateBytes:
    """What the job's optimizer keeps. 16-bit precisions compute in 16 bits; parameters stay float32."""
    width = 8.0 if job.precision == "float64" else 4.0
    num_copies = 2 if job.optim.name in ("adam", "adamw") else int(job.optim.momentum > 0)
    return StateBytes(width, width, width * num_copies)


@dataclass(frozen=True)
class Activations:
    """Memory of one forward pass: fixed_bytes + samples * bytes_per_sample, on a device that holds the whole model."""

    bytes_per_sample: float
    fixed_bytes: float = 0.0


@dataclass(frozen=True)
class TransformerShape:
    """What sharing out a transformer depends on."""

    num_layers: int
    width: int
    """Of a token's vector; h in the papers."""
    num_heads: int
    sequence: int
    """Tokens a sample."""


def measured_activations(
    timings: Sequence[MicroBatchTiming], num_parameters: int, state: StateBytes
) -> Activations | None:
    """The line through the measured peaks, less parameters and gradients, which were in memory too.

    The probe never updates parameters, so that no optimizer state is among its peaks. None with fewer than two peaks.
    """
    peaks = [(t.micro_batch_size, t.peak_memory_bytes) for t in timings if t.peak_memory_bytes is not None]
    if len({size for size, _ in peaks}) < 2:
        return None
    mean_size = sum(size for size, _ in peaks) / len(peaks)
    mean_peak = sum(peak for _, peak in peaks) / len(peaks)
    covariance = sum((size - mean_size) * (peak - mean_peak) for size, peak in peaks)
    slope = max(0.0, covariance / sum((size - mean_size) ** 2 for size, _ in peaks))
    held = num_parameters * (state.parameter + state.gradient)
    return Activations(slope, max(0.0, mean_peak - slope * mean_size - held))


def transformer_activation_bytes(
    shape: TransformerShape,
    num_samples: int,
    *,
    tp: int = 1,
    is_sequence_parallel: bool = False,
    recompute: Recompute = "none",
) -> float:
    """Bytes of all layers' activations in 16 bits, kept for the backward pass.

    With s tokens, b samples, width h, a heads and tensor degree t, a layer keeps (Korthikanti et al. 2022, table 2)
    sbh (10 + 24/t + 5as/(ht)), with sequence parallelism sbh/t (34 + 5as/h); selective recomputation drops the terms
    with 5as, full recomputation leaves 2sbh.
    """
    tokens = shape.sequence * num_samples * shape.width
    attention = 0.0 if recompute == "selective" else 5 * shape.num_heads * shape.sequence / shape.width
    if recompute == "full":
        per_token = 2.0
    elif is_sequence_parallel:
        per_token = (34 + attention) / tp
    else:
        per_token = 10 + (24 + attention) / tp
    return shape.num_layers * tokens * per_token


def transformer_activations(shape: TransformerShape, recompute: Recompute = "none") -> Activations:
    """The same on one device, by sample."""
    return Activations(transformer_activation_bytes(shape, 1, recompute=recompute))


@dataclass(frozen=True)
class DeviceMemory:
    """What the fullest device of a mesh holds, in bytes."""

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: float
    gathered_bytes: float = 0.0
    """Parameters of others, while a layer of a fully sharded model is computed."""

    @property
    def state_bytes(self) -> float:
        """What stays between steps."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> float:
        return self.state_bytes + self.activation_bytes + self.gathered_bytes

    def fits(self, memory_bytes: float) -> bool:
        return self.total_bytes <= USABLE_SHARE * memory_bytes


def device_memory(
    num_parameters: float,
    state: StateBytes,
    mesh: Mesh,
    activations: Activations,
    micro_batch_size: int,
    *,
    num_micro_batches: int = 1,
    num_layers: int = 1,
) -> DeviceMemory:
    """The fullest device of `mesh`.

    Rajbhandari et al. 2020, figure 1, for psi parameters and dp replicas: stage 1 shards the optimizer state, 2 the
    gradients, 3 the parameters, each by 1/dp. Tensor and pipeline parallelism give each device 1/(tp pp) of psi.
    Stage 3 gathers a layer and fetches the next one meanwhile. A pipeline that takes turns (1F1B; Narayanan et al.
    2021, section 2.2) holds min(pp, micro-batches) micro-batches in its first stage, each 1/pp of the layers. Of a
    layer's activations 24/34 are split by tp and the rest is on every device (Korthikanti et al. 2022, equation 2).

    Args:
        micro_batch_size: Samples of one forward pass of one replica.
        num_micro_batches: Of one replica in one step.

    Raises:
        JobError: a stage of sharding that does not exist.
    """
    if not 0 <= mesh.zero_stage <= 3:
        raise JobError(f"ZeRO has the stages 1 to 3, and 0 is none of them; {mesh.zero_stage} is no stage.")
    own = num_parameters / (mesh.tp * mesh.pp)
    gathered = min(2, num_layers) * own * state.parameter * mesh.pp / num_layers if mesh.zero_stage == 3 else 0.0
    split = 10 / 34 + 24 / 34 / mesh.tp
    in_flight = min(mesh.pp, num_micro_batches)
    of_samples = activations.bytes_per_sample * micro_batch_size * split * in_flight / mesh.pp
    return DeviceMemory(
        parameter_bytes=own * state.parameter / (mesh.dp if mesh.zero_stage >= 3 else 1),
        gradient_bytes=own * state.gradient / (mesh.dp if mesh.zero_stage >= 2 else 1),
        optimizer_bytes=own * state.optimizer / (mesh.dp if mesh.zero_stage >= 1 else 1),
        activation_bytes=activations.fixed_bytes + of_samples,
        gathered_bytes=gathered if mesh.dp > 1 else 0.0,
    )


def largest_micro_batch(
    num_parameters: float, state: StateBytes, mesh: Mesh, activations: Activations, memory_bytes: float, most: int
) -> int:
    """The largest micro-batch up to `most` that fits into a device; 0: not even one sample."""

    def fits(size: int) -> bool:
        return device_memory(num_parameters, state, mesh, activations, size).fits(memory_bytes)

    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
