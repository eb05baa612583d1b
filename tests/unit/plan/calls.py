"""How the tests of the planner call its parts: the one place to change when a part gets another signature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from paceline.plan.collectives import COSTS, Network, cost_of
from paceline.plan.memory import DeviceMemory, StateBytes, device_memory
from paceline.plan.meshes import MeshCandidate, Workload, search
from paceline.plan.step_model import PRIORS
from paceline.spec import AlgorithmName, Job, Mesh
from paceline.spec.forecast import LayerCost, Layers, ModelCost

ALGORITHMS = tuple(sorted(COSTS))


def sum_s(algorithm: str, num_bytes: float, nodes: Sequence[int], links: Network) -> float:
    """Seconds to sum `num_bytes` over workers, so many on each of the `nodes`."""
    return float(cost_of(cast(AlgorithmName, algorithm))(num_bytes, tuple(nodes), links))


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
    """The memory of the fullest device; bytes are those of a parameter and of a sample's activations.

    Without layers there is one for each stage, all equal, divided by tensor groups like those of a transformer."""
    equal = LayerCost("", 1.0, 1.0, 1.0, num_tensor_slices=mesh.tp, replicated_fraction=10 / 34)
    return device_memory(
        ModelCost(int(num_parameters), sample_bytes, layers=layers or (equal,) * mesh.pp),
        StateBytes(parameter_bytes, optimizer_bytes, is_bitwise),
        mesh,
        micro_batch_size,
        num_passes,
        recompute,
    )


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
        replicated_fraction=10 / 34,
    )
    return (layer,) * num_layers


def meshes(
    num_workers: int,
    devices_per_node: int,
    links: Network,
    *,
    num_parameters: int = 25_000_000,
    sample_bytes: float = 90e6,
    layers: Layers = (),
    global_batch_size: int = 256,
    shard_size: int = 1,
    memory_bytes: float = 40 * 2.0**30,
    fixed_s: float = 0.01,
    sample_s: float = 0.001,
) -> tuple[MeshCandidate, ...]:
    """The meshes that fit, best first; the workload is a 25-million-parameter model unless it says otherwise."""
    of_links = {name: value for name, value in vars(links).items() if name in PRIORS}
    return search(
        Workload(
            Job(global_batch_size=global_batch_size, virtual_shards=global_batch_size // shard_size),
            ModelCost(num_parameters, sample_bytes, layers=layers),
            num_workers,
            devices_per_node,
            memory_bytes,
            {**dict.fromkeys(PRIORS, 0.0), "fixed_s": fixed_s, "per_sample_s": sample_s, **of_links},
        )
    )
