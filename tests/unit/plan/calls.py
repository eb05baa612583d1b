"""How the tests of the planner call its parts: the one place to change when a part gets another signature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from paceline.plan.collectives import COSTS, AlphaBeta, Network, cost_of, wire_bytes
from paceline.plan.memory import DeviceMemory, StateBytes, device_memory, fits
from paceline.plan.meshes import MeshCandidate, Workload, search
from paceline.spec import AlgorithmName, Job, Mesh
from paceline.spec.model_cost import Activations, LayerCost, Layers, ModelCost

ALGORITHMS = tuple(sorted(COSTS))


@dataclass(frozen=True)
class Links:
    """Seconds a message and a byte take inside a node and between nodes."""

    inside_alpha_s: float = 0.0
    inside_beta: float = 0.0
    between_alpha_s: float = 0.0
    between_beta: float = 0.0

    @property
    def network(self) -> Network:
        inside, between = (
            AlphaBeta(self.inside_alpha_s, self.inside_beta),
            AlphaBeta(self.between_alpha_s, self.between_beta),
        )
        return Network(inside, between)


def sum_s(algorithm: str, num_bytes: float, nodes: Sequence[int], links: Links, wire: str = "float32") -> float:
    """Seconds to sum `num_bytes` over workers, so many on each of the `nodes`."""
    name = cast(AlgorithmName, algorithm)
    return float(cost_of(name)(wire_bytes(name, num_bytes, wire), tuple(nodes), links.network))


def memory(
    num_parameters: float,
    mesh: Mesh,
    *,
    sample_bytes: float = 0.0,
    micro_batch_size: int = 1,
    num_passes: int = 1,
    optimizer_bytes: float = 4.0,
    parameter_bytes: float = 4.0,
    is_bitwise: bool = False,
    layers: Layers = (),
    recompute: bool = False,
) -> DeviceMemory:
    """The memory of the fullest device; bytes are those of a parameter and of a sample's activations."""
    return device_memory(
        num_parameters,
        StateBytes(parameter_bytes, parameter_bytes, optimizer_bytes, is_bitwise),
        mesh,
        Activations(sample_bytes),
        micro_batch_size,
        num_micro_batches=num_passes,
        layers=layers,
        recompute=recompute,
    )


def has_room(found: DeviceMemory, room: float) -> bool:
    return fits(found, room)


def transformer(num_parameters: float, *, num_layers: int, width: int, num_heads: int, tokens: int) -> Layers:
    """Equal layers in 16 bits: each keeps s h (34 + 5 a s / h) bytes of activations a sample, 10 s h of them on every
    worker of a tensor group (Korthikanti et al. 2022, table 2)."""
    layer = LayerCost(
        time_s=1.0,
        parameter_bytes=num_parameters / num_layers,
        activation_bytes=tokens * width * (34 + 5 * num_heads * tokens / width),
        output_bytes=2.0 * tokens * width,
        num_tensor_slices=num_heads,
        num_all_reduces=4,
        all_reduce_bytes=2.0 * tokens * width,
        replicated_fraction=10 / 34,
    )
    return (layer,) * num_layers


def meshes(
    num_workers: int,
    devices_per_node: int,
    links: Links,
    *,
    num_parameters: int = 25_000_000,
    activations: Activations | None = None,
    layers: Layers = (),
    global_batch_size: int = 256,
    shard_size: int = 1,
    **workload: Any,
) -> tuple[MeshCandidate, ...]:
    """The meshes that fit, best first; the workload is a 25-million-parameter model unless it says otherwise."""
    known: dict[str, Any] = {"compute_s": lambda samples: 0.01 + 0.001 * samples, "memory_bytes": 40 * 2.0**30}
    return search(
        Workload(
            Job(global_batch_size=global_batch_size, virtual_shards=global_batch_size // shard_size),
            ModelCost(num_parameters, activations or Activations(90e6), layers),
            devices_per_node=devices_per_node,
            network=links.network,
            **known | workload,
        ),
        num_workers,
    )
