"""Which way to share out a model over so many devices: data, sharded, pipeline, tensor, and their meshes.

All meshes are listed, those that do not fit into memory are pruned, the rest are priced, and the winner and the
runner-up are explained. Ranks are laid out as everybody does it: tensor groups are neighbours, then data groups, stages
of a pipeline farthest apart (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", section 3.2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from paceline.errors import JobError
from paceline.plan.advice import duration
from paceline.plan.buckets import exposed_s, sums_s
from paceline.plan.collectives import COSTS
from paceline.plan.memory import (
    USABLE_SHARE,
    Activations,
    DeviceMemory,
    StateBytes,
    TransformerShape,
    device_memory,
)
from paceline.plan.model import Layout, Level, Mesh, Network

_CLOSE = 1.03
"""Meshes whose steps are within 3 % of the fastest one's are as good; the simplest of them wins."""
_ALL_REDUCES_A_LAYER = 4
"""Of tensor parallelism: two forward, two backward (Shoeybi et al. 2019, "Megatron-LM", section 3)."""
_ACTIVATION_WIDTH = 2.0
"""Bytes of an activation that tensor groups and stages tell each other."""


@dataclass(frozen=True)
class Workload:
    """One job, as far as sharing it out depends on it."""

    num_parameters: int
    global_batch_size: int
    state: StateBytes
    activations: Activations
    compute_s: Callable[[int], float]
    """Seconds of a forward and backward pass of the whole model over so many samples on one device."""
    memory_bytes: float
    """Of one device."""
    optimizer_s: float = 0.0
    """Seconds in which one device updates the whole model."""
    shape: TransformerShape | None = None
    """None: no transformer; it can be shared out by data and by sharding only."""


@dataclass(frozen=True)
class Candidate:
    """One mesh that fits, with its best micro-batch; the parts of a step add up to it."""

    mesh: Mesh
    micro_batch_size: int
    num_micro_batches: int
    memory: DeviceMemory
    compute_s: float
    bubble_s: float
    """Stages that wait for the first micro-batches to come and the last ones to go."""
    tensor_s: float
    """Sums inside of layers and messages between stages: nothing hides them."""
    exposed_s: float
    """What compute does not hide of gradients, and of parameters where they are sharded."""
    optimizer_s: float
    """Updates of what the device holds the optimizer's state of."""

    @property
    def step_s(self) -> float:
        return self.compute_s + self.bubble_s + self.tensor_s + self.exposed_s + self.optimizer_s


@dataclass(frozen=True)
class SearchResult:
    """Those that fit, the best one first, and those that do not, with what they would need."""

    candidates: tuple[Candidate, ...]
    too_large: tuple[tuple[Mesh, DeviceMemory], ...]

    @property
    def winner(self) -> Candidate:
        return self.candidates[0]

    @property
    def runner_up(self) -> Candidate | None:
        return self.candidates[1] if len(self.candidates) > 1 else None


def search(workload: Workload, num_workers: int, devices_per_node: int, network: Network) -> SearchResult:
    """All meshes of `num_workers` devices, `devices_per_node` of them on a node, in the order of their steps.

    Raises:
        JobError: none of them fits; the message says how much the thriftiest one would need.
    """
    candidates: list[Candidate] = []
    too_large: list[tuple[Mesh, DeviceMemory]] = []
    for mesh in meshes(num_workers, devices_per_node, workload.shape):
        if mesh.dp > workload.global_batch_size:
            continue
        tried = [
            _priced(workload, mesh, size, devices_per_node, network) for size in _micro_batch_sizes(workload, mesh)
        ]
        fitting = [candidate for candidate in tried if candidate.memory.fits(workload.memory_bytes)]
        if fitting:
            candidates.append(min(fitting, key=lambda candidate: candidate.step_s))
        else:
            too_large.append((mesh, min((one.memory for one in tried), key=lambda memory: memory.total_bytes)))
    if not candidates:
        raise JobError(_nothing_fits(workload, num_workers, too_large))
    candidates.sort(key=lambda candidate: candidate.step_s)
    close = [one for one in candidates if one.step_s <= _CLOSE * candidates[0].step_s]
    close.sort(key=lambda one: _complexity(one.mesh))
    return SearchResult((*close, *candidates[len(close) :]), tuple(too_large))


def meshes(num_workers: int, devices_per_node: int, shape: TransformerShape | None) -> Iterator[Mesh]:
    """Every mesh of so many devices: tensor groups stay in a node and divide the heads, stages divide the layers."""
    for tp in _divisors(num_workers):
        if tp > 1 and (shape is None or tp > devices_per_node or shape.num_heads % tp or devices_per_node % tp):
            continue
        for pp in _divisors(num_workers // tp):
            if pp > 1 and (shape is None or shape.num_layers % pp):
                continue
            dp = num_workers // tp // pp
            for stage in range(4 if dp > 1 else 1):
                if stage >= 2 and pp > 1:
                    continue  # gradients that are shared out after each micro-batch undo what a pipeline saves
                yield Mesh(dp, tp, pp, stage)


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _micro_batch_sizes(workload: Workload, mesh: Mesh) -> list[int]:
    """A replica's whole share, and every power of two below it."""
    share = -(-workload.global_batch_size // mesh.dp)
    return [2**power for power in range((share - 1).bit_length())] + [share]


def _complexity(mesh: Mesh) -> tuple[int, int, int]:
    return mesh.pp, mesh.tp, mesh.zero_stage


def _priced(
    workload: Workload, mesh: Mesh, micro_batch_size: int, devices_per_node: int, network: Network
) -> Candidate:
    """The seconds of a step.

    A pipeline of p stages takes m + p - 1 turns for m micro-batches (Huang et al. 2019, GPipe). Over dp replicas
    gradients and parameters move as much as one all_reduce with stages 0 and 1; stage 2 reduces after each micro-batch,
    half an all_reduce; stage 3 gathers parameters for forward and backward of each as well, one and a half
    all_reduces (Rajbhandari et al. 2020, section 7).
    """
    share = -(-workload.global_batch_size // mesh.dp)
    m = -(-share // micro_batch_size)
    turn_s = workload.compute_s(micro_batch_size) / (mesh.tp * mesh.pp)
    last = share - (m - 1) * micro_batch_size
    compute_s = (m - 1) * turn_s + workload.compute_s(last) / (mesh.tp * mesh.pp)
    own_bytes = workload.num_parameters * workload.state.gradient / (mesh.tp * mesh.pp)
    all_reduce_s = _data_all_reduce_s(own_bytes, mesh, devices_per_node, network)
    num_all_reduces = (1.0, 1.0, 0.5 + 0.5 * m, 1.5 * m)[mesh.zero_stage]
    # Gradients travel while the last micro-batch is computed; those of stages 2 and 3 all the time.
    hiding_s = compute_s if mesh.zero_stage >= 2 else workload.compute_s(last) / (mesh.tp * mesh.pp)
    return Candidate(
        mesh,
        micro_batch_size,
        m,
        device_memory(
            workload.num_parameters,
            workload.state,
            mesh,
            workload.activations,
            micro_batch_size,
            num_micro_batches=m,
            num_layers=workload.shape.num_layers if workload.shape else 1,
        ),
        compute_s=compute_s,
        bubble_s=(mesh.pp - 1) * turn_s,
        tensor_s=(m + mesh.pp - 1) * _inside_model_s(workload, mesh, micro_batch_size, devices_per_node, network),
        exposed_s=exposed_s(hiding_s, own_bytes, num_all_reduces * all_reduce_s),
        optimizer_s=workload.optimizer_s / (mesh.tp * mesh.pp) / (mesh.dp if mesh.zero_stage else 1),
    )


def _inside_model_s(
    workload: Workload, mesh: Mesh, micro_batch_size: int, devices_per_node: int, network: Network
) -> float:
    """What one micro-batch's sums inside of layers and messages to the next stage take, forward and backward."""
    shape = workload.shape
    if shape is None:
        return 0.0
    message_bytes = micro_batch_size * shape.sequence * shape.width * _ACTIVATION_WIDTH
    seconds = 0.0
    if mesh.tp > 1:
        sum_s = cheapest_s(message_bytes, Layout((mesh.tp,)), network)
        seconds += _ALL_REDUCES_A_LAYER * shape.num_layers / mesh.pp * sum_s
    if mesh.pp > 1:
        is_between = mesh.num_workers > devices_per_node and mesh.tp * mesh.dp >= devices_per_node
        seconds += 2 * _send_s(network.between if is_between else network.inside, message_bytes, network)
    return seconds


def _send_s(level: Level, size_bytes: float, network: Network) -> float:
    return network.per_message_s + level.alpha_s + size_bytes * level.beta_s_per_byte


def _data_all_reduce_s(size_bytes: float, mesh: Mesh, devices_per_node: int, network: Network) -> float:
    """Over the data group of a rank; the groups of a node's other ranks share its link at the same time."""
    if mesh.dp == 1:
        return 0.0
    on_a_node = max(1, min(mesh.dp, devices_per_node // mesh.tp))
    full, rest = divmod(mesh.dp, on_a_node)
    layout = Layout((on_a_node,) * full + ((rest,) if rest else ()))
    sharing = min(devices_per_node, mesh.num_workers) / on_a_node
    between = dataclasses.replace(network.between, beta_s_per_byte=network.between.beta_s_per_byte * sharing)
    shared = dataclasses.replace(network, between=between)
    return sums_s(size_bytes, lambda bucket_bytes: cheapest_s(bucket_bytes, layout, shared))


def cheapest_s(size_bytes: float, layout: Layout, network: Network) -> float:
    """Of one sum over `layout`, by the algorithms that stand for what tuned libraries do."""
    if layout.num_workers == 1:
        return 0.0
    return min(COSTS[name](size_bytes, layout, network, 1) for name in ("ring", "halving_doubling", "hierarchical"))


# --- words ---


def explain(result: SearchResult, workload: Workload) -> tuple[str, ...]:
    """Two lines about the winner and two about the runner-up: how fast, and why."""
    winner = result.winner
    lines = [f"{winner.mesh}: {duration(winner.step_s)} a step, {_batches(winner)}.", _why(result, winner, workload)]
    other = result.runner_up
    if other is not None:
        slower = other.step_s / winner.step_s - 1
        behind = f"{100 * abs(slower):.0f} % {'slower' if slower > 0 else 'faster, but less simple'}"
        behind = behind if abs(slower) >= 0.005 else "as fast, but less simple"
        lines += [f"Then {other.mesh}: {duration(other.step_s)} a step ({behind}), {_batches(other)}."]
        lines += [_difference(winner, other)]
    return tuple(lines)


def _batches(candidate: Candidate) -> str:
    m = candidate.num_micro_batches
    return f"{m} micro-batch{'es' * (m > 1)} of {candidate.micro_batch_size}"


def _why(result: SearchResult, winner: Candidate, workload: Workload) -> str:
    held = f"It holds {_gib(winner.memory.total_bytes)} of {_gib(workload.memory_bytes)}"
    plain = next(
        (memory for mesh, memory in result.too_large if mesh.zero_stage == 0 and mesh.tp == mesh.pp == 1), None
    )
    if plain is not None:
        return f"{held}, where whole replicas would need {_gib(plain.total_bytes)}; {_largest_part(winner)}."
    return f"{held}; {_largest_part(winner)}."


def _largest_part(candidate: Candidate) -> str:
    parts = _parts(candidate)
    name = max(parts, key=lambda key: parts[key])
    if parts[name] < 0.01 * candidate.step_s:
        return "nothing but compute takes time"
    return f"beside compute, {name} takes most: {duration(parts[name])}"


def _parts(candidate: Candidate) -> dict[str, float]:
    return {
        "waiting for gradients": candidate.exposed_s,
        "the pipeline's bubble": candidate.bubble_s,
        "sums inside of layers": candidate.tensor_s,
        "the optimizer": candidate.optimizer_s,
    }


def _difference(winner: Candidate, other: Candidate) -> str:
    """What the runner-up loses by, or saves."""
    mine, theirs = _parts(winner) | {"compute": winner.compute_s}, _parts(other) | {"compute": other.compute_s}
    name = max(mine, key=lambda key: theirs[key] - mine[key])
    saved = winner.memory.total_bytes - other.memory.total_bytes
    memory = f"it needs {_gib(abs(saved))} {'less' if saved > 0 else 'more'} memory"
    more_s = theirs[name] - mine[name]
    if more_s < 0.005 * winner.step_s:
        return f"No part of its step is longer; {memory}."
    return f"It loses by {name}, {duration(more_s)} more; {memory}."


def _nothing_fits(workload: Workload, num_workers: int, too_large: list[tuple[Mesh, DeviceMemory]]) -> str:
    if not too_large:
        return (
            f"{num_workers} workers cannot share a global batch of {workload.global_batch_size} samples; "
            "use fewer workers or a larger global_batch_size."
        )
    mesh, memory = min(too_large, key=lambda one: one[1].total_bytes)
    return (
        f"This job fits into no mesh of {num_workers} device{'s' * (num_workers > 1)}: {mesh} needs the least, "
        f"{_gib(memory.total_bytes)} a device, and {_gib(USABLE_SHARE * workload.memory_bytes)} can be used; "
        "take more devices or a smaller model."
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.3g} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:.3g} MiB"
