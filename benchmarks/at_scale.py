"""Published runs of 8 to 16,384 devices, by the planner's formulas; and how much of a long run lasts on as many.

    python -m benchmarks.at_scale

Nothing here is measured. What the formulas cannot know is told: the links, and the rate at which one device computes.
That rate is fitted to the first published row of a run, which is therefore no forecast; the other rows use it as it is.
The second table is what faults and checkpoints leave (`plan/reliability.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from paceline.plan.assumptions import DEVICE_MTBF_S
from paceline.plan.memory import TransformerShape, device_memory, transformer_layers
from paceline.plan.model import Network
from paceline.plan.peak_memory import StateBytes
from paceline.plan.reliability import Faults, availability
from paceline.plan.search import MeshCandidate, MeshPrices, Workload
from paceline.report.tables import markdown_table
from paceline.spec import Mesh, PipelineSpec
from paceline.spec.algorithm import AlphaBeta
from paceline.spec.model_cost import Activations, Layers

LINK_SHARE = 0.8
"""The fraction of a datasheet's rate that collectives reach."""


def network(inside_bytes_per_s: float, node_bytes_per_s: float) -> Network:
    """From one direction's datasheet rates: of a device's link inside a node, and of all links that leave a node."""
    return Network(
        AlphaBeta(5e-6, 1 / (LINK_SHARE * inside_bytes_per_s)),
        AlphaBeta(8e-6, 1 / (LINK_SHARE * node_bytes_per_s)),
        3e-6,
    )


H100 = network(450e9, 8 * 50e9)
"""NVLink 4, and 400 Gbit/s for each of eight GPUs."""
A100 = network(300e9, 8 * 25e9)
"""NVLink 3, and 200 Gbit/s for each of eight GPUs."""
TPU_V4 = network(300e9, 3072 * 3.1e9)
"""A pod as a node: six torus links of 50 GB/s; between two pods what PaLM's hosts reach together."""


@dataclass(frozen=True)
class Run:
    """One published run, or one size of it."""

    name: str
    mesh: Mesh
    published: float
    """Model FLOPs utilization, which counts nothing that is computed twice (Chowdhery et al. 2022, appendix B)."""
    num_parameters: float
    shape: TransformerShape
    global_batch_size: int
    peak_flops: float
    links: Network
    micro_batch_size: int = 1
    devices_per_node: int = 8
    stages_per_worker: int = 1
    recompute: bool = False

    @property
    def flops_per_sample(self) -> float:
        """6 N and 12 L h s for attention, for each token (the same appendix)."""
        shape = self.shape
        per_token = 6 * self.num_parameters + 12 * shape.num_layers * shape.width * shape.sequence
        return shape.sequence * per_token

    @property
    def layers(self) -> Layers:
        """Attention without a matrix of scores in memory, and with positions divided along tp between layers."""
        found = transformer_layers(self.shape, self.num_parameters)
        kept = 34.0 * self.shape.sequence * self.shape.width
        sent = found[0].output_bytes / self.mesh.tp
        return tuple(
            replace(layer, activation_bytes=kept, replicated_fraction=0.0, output_bytes=sent) for layer in found
        )

    def price(self, efficiency: float) -> MeshCandidate:
        """With kernels that reach this fraction of the peak; bf16 parameters, float32 gradients and Adam's state."""
        layers = self.layers
        activations = Activations(sum(layer.activation_bytes for layer in layers))
        workload = Workload(
            num_parameters=int(self.num_parameters),
            global_batch_size=self.global_batch_size,
            state=StateBytes(2.0, 4.0, 12.0),
            activations=activations,
            compute_s=lambda samples: samples * self.flops_per_sample / (efficiency * self.peak_flops),
            memory_bytes=math.inf,
            layers=layers,
            shard_size=self.micro_batch_size,
        )
        memory = device_memory(
            self.num_parameters,
            workload.state,
            self.mesh,
            activations,
            self.micro_batch_size,
            num_micro_batches=-(-workload.share(self.mesh) // self.micro_batch_size),
            layers=layers,
            recompute=self.recompute,
        )
        pipeline = PipelineSpec("interleaved" if self.stages_per_worker > 1 else "1f1b", self.stages_per_worker)
        prices = MeshPrices(workload, self.mesh, self.devices_per_node, self.links)
        return prices.candidate(memory, pipeline, self.recompute)

    def utilization(self, efficiency: float) -> float:
        flops = self.flops_per_sample * self.global_batch_size
        return flops / (self.price(efficiency).step_s * self.mesh.num_workers * self.peak_flops)

    def fitted(self) -> float | None:
        """The efficiency of kernels with which this run comes out as published; None where none is enough."""
        low, high = 0.0, 1.0
        if self.utilization(high) < self.published:
            return None
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self.utilization(middle) < self.published else (low, middle)
        return high


def of_tokens(tokens_per_s: float, run: Run) -> Run:
    """With the utilization that tokens/s of a device are."""
    return replace(run, published=tokens_per_s / run.shape.sequence * run.flops_per_sample / run.peak_flops)


# Embedding and output count as a layer each: Llama 3 takes one from the first and the last stage for them.
_LLAMA_405B = Run(
    "Llama 3 405B, 8,192 H100",
    Mesh(fsdp=64, tp=8, pp=16, zero_stage=1),
    0.43,
    405e9,
    TransformerShape(128, 16384, 128, 8192),
    2048,
    989e12,
    H100,
    stages_per_worker=8,
)
_LLAMA_8B = Run(
    "torchtitan Llama 3.1 8B, 8 H100",
    Mesh(fsdp=8),
    0.0,
    8.03e9,
    TransformerShape(32, 4096, 32, 8192),
    16,
    989e12,
    H100,
    micro_batch_size=2,
)
_TITAN_405B = replace(
    _LLAMA_405B,
    name="torchtitan Llama 3.1 405B, 512 H100, 1F1B",
    mesh=Mesh(fsdp=8, tp=8, pp=8, zero_stage=2),
    global_batch_size=256,
    peak_flops=1979e12,
    stages_per_worker=1,
    recompute=True,
)
RUNS: tuple[tuple[Run, ...], ...] = (
    (
        _LLAMA_405B,
        replace(
            _LLAMA_405B,
            name="Llama 3 405B, 16,384 H100",
            mesh=Mesh(fsdp=128, tp=8, pp=16, zero_stage=1),
            published=0.41,
        ),
    ),
    (
        Run(
            "MegaScale 175B, 12,288 A100",
            Mesh(fsdp=192, tp=8, pp=8, zero_stage=1),
            0.552,
            175e9,
            TransformerShape(96, 12288, 96, 2048),
            6144,
            312e12,
            A100,
            stages_per_worker=6,
        ),
    ),
    (
        of_tokens(5762, _LLAMA_8B),
        of_tokens(
            5605,
            replace(_LLAMA_8B, name="torchtitan Llama 3.1 8B, 128 H100", mesh=Mesh(fsdp=128), global_batch_size=256),
        ),
    ),
    (
        of_tokens(100, _TITAN_405B),
        of_tokens(
            128,
            replace(_TITAN_405B, name="torchtitan Llama 3.1 405B, 512 H100, interleaved", stages_per_worker=2),
        ),
    ),
    (
        Run(
            "PaLM 540B, 6,144 TPU v4",
            Mesh(dp=2, fsdp=256, tp=12, zero_stage=3),
            0.462,
            540.35e9,
            TransformerShape(118, 18432, 48, 2048),
            2048,
            275e12,
            TPU_V4,
            micro_batch_size=4,
            devices_per_node=3072,
            recompute=True,
        ),
    ),
)
"""Dubey et al. 2024, table 4; Jiang et al. 2024, table 2; torchtitan's docs/performance.md; Chowdhery et al. 2022,
section 4.1."""


def anchors() -> str:
    rows = []
    for family in RUNS:
        fitted = family[0].fitted()
        efficiency = 1.0 if fitted is None else fitted
        for run in family:
            found = run.utilization(efficiency)
            how = "" if run is not family[0] else ", and that is too little" if fitted is None else ", fitted here"
            rows.append(
                [
                    run.name,
                    str(run.mesh),
                    f"{efficiency:.0%}{how}",
                    f"{found:.1%}",
                    f"{run.published:.1%}",
                    f"{found / run.published:.2f}",
                    f"{run.price(efficiency).memory.total_bytes / 2**30:.0f}",
                ]
            )
    head = ["run", "mesh", "told: kernels' share of the peak", "forecast MFU", "published MFU", "forecast / published"]
    return markdown_table([*head, "GiB a device"], rows)


CHECKPOINT_S, RESTART_S = 15.0, 600.0
"""Assumed: a stall for a checkpoint, and the time from a fault to the next step."""


def lasting_work() -> str:
    """What faults and checkpoints leave of a long run on nodes of eight devices."""
    rows = []
    for power in range(4, 15):
        num_devices = 1 << power
        lasting = availability(Faults(DEVICE_MTBF_S / 8, CHECKPOINT_S, RESTART_S), num_devices // 8)
        rows.append([f"{num_devices:,}", f"{DEVICE_MTBF_S / num_devices / 3600:,.1f}", f"{lasting:.1%}"])
    interruptions = 54 * 24 * 3600 * 16_384 / DEVICE_MTBF_S
    return (
        markdown_table(["devices", "hours between interruptions", "work that lasts"], rows)
        + f"\n\n54 days on 16,384 devices: {interruptions:.0f} interruptions; published: 419 unexpected ones."
    )


if __name__ == "__main__":
    print(anchors())
    print()
    print(lasting_work())
