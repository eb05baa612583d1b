"""Which mesh trains a model fastest on so many devices: data, sharded, pipeline and tensor parallelism, and mixtures.

All meshes are listed, those that do not fit into memory are pruned, the rest are priced, and the winner and the
runner-up are explained. Prices are those of `parallel`: gradients of replicas travel while backward computes,
and a pipeline's micro-batches are the virtual shards.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from paceline.errors import JobError
from paceline.plan.collectives import Layout, Network, hierarchical, ring, tree_exact
from paceline.plan.memory import device_memory, fits
from paceline.plan.peak_memory import USABLE_FRACTION, StateBytes
from paceline.spec import Mesh, PipelineSpec
from paceline.spec.algorithm import BUCKET_BYTES, MIN_BLOCK_BYTES
from paceline.spec.model_cost import Activations, DeviceMemory, LayerCost, Layers
from paceline.words import duration, number_of, size

Backend = Literal["nccl", "gloo"]

_CLOSE = 1.03
"""Meshes whose steps are within 3 % of the fastest one's are as good; the simplest of them wins."""
_RECOMPUTE_FACTOR = 4 / 3
"""Forward once more, where backward takes twice as long as forward (Chen et al. 2016, "Sublinear Memory Cost")."""
BACKWARD_SHARE = 2 / 3
"""The fraction of a pass that backward takes: it multiplies twice where forward multiplies once."""
_WORTH_SHARING = 0.5
"""A tensor group pays where it divides at least this fraction of the computing."""


@dataclass(frozen=True)
class Workload:
    """The properties of a job on which the choice of a mesh depends."""

    num_parameters: int
    global_batch_size: int
    state: StateBytes
    activations: Activations
    compute_s: Callable[[int], float]
    """Seconds of a forward and backward pass of the whole model over so many samples on one device."""
    memory_bytes: float
    """Memory of one device."""
    optimizer_s: float = 0.0
    """Seconds in which one device updates the whole model."""
    layers: Layers = ()
    """The layers of the model; empty: unknown, so that only data parallelism and sharding are possible."""
    shard_size: int = 1
    """Samples of a virtual shard, which is a pass, and the micro-batch of a pipeline."""
    backend: Backend = "nccl"
    """With gloo nothing hides what the fsdp axis says, and a reduce_scatter moves as much as an all_reduce: counted
    between two nodes with torch 2.13, (n - 1)/n of a vector for an all_gather, 2 (n - 1)/n for the other two."""
    copy_s_per_byte: float = 0.0
    """Seconds for each byte that is gathered or scattered, besides the link's: it is copied into fresh memory."""
    sums_are_hidden: bool = True
    """Whether the replicas' gradients are summed while backward computes; not on cores that all compute."""

    @property
    def num_shards(self) -> int:
        return -(-self.global_batch_size // self.shard_size)

    def share(self, mesh: Mesh) -> int:
        """Samples of the worker with the largest assignment."""
        return min(self.global_batch_size, -(-self.num_shards // mesh.num_assignments) * self.shard_size)


@dataclass(frozen=True)
class MeshCandidate:
    """One mesh that fits; the parts of a step add up to it."""

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
    pipeline: PipelineSpec
    recompute: bool

    @property
    def step_s(self) -> float:
        return self.compute_s + self.bubble_s + self.tensor_s + self.exposed_s + self.optimizer_s

    def in_words(self) -> str:
        """How fast it is, what takes most beside compute, and what it holds."""
        parts_s = {
            "waiting for gradients": self.exposed_s,
            "the pipeline's bubble": self.bubble_s,
            "what layers and stages send": self.tensor_s,
            "the optimizer": self.optimizer_s,
        }
        name = max(parts_s, key=lambda part: parts_s[part])
        again = ", activations computed again" if self.recompute else ""
        return (
            f"{self.mesh}: {duration(self.step_s)} a step, of which {name} takes {duration(parts_s[name])}; "
            f"{self.num_micro_batches} x {self.micro_batch_size} samples a worker{again}; "
            f"it holds {size(self.memory.total_bytes)}"
        )


@dataclass(frozen=True)
class SearchResult:
    """The meshes that fit, the best one first, and those that do not, with the memory that they would need."""

    candidates: tuple[MeshCandidate, ...]
    too_large: tuple[tuple[Mesh, DeviceMemory], ...]
    memory_bytes: float
    """Memory of one device."""

    @property
    def winner(self) -> MeshCandidate:
        return self.candidates[0]

    def in_words(self) -> tuple[str, ...]:
        """A sentence about the winner, one about the runner-up, and one where replicas do not fit."""
        lines = [f"{self.winner.in_words()} of {size(self.memory_bytes)}."]
        for other in self.candidates[1:2]:
            more = other.step_s / self.winner.step_s - 1
            behind = f"{100 * abs(more):.1f} % {'slower' if more > 0 else 'faster, but less simple'}"
            lines.append(f"Then {other.in_words()}; {behind}.")
        lines += [
            f"Whole replicas would need {size(memory.total_bytes)}." for mesh, memory in self.too_large if mesh.is_plain
        ]
        return tuple(lines)


def search(workload: Workload, num_workers: int, devices_per_node: int, network: Network) -> SearchResult:
    """All meshes of `num_workers` devices, `devices_per_node` of them on a node, in the order of their steps.

    Raises:
        JobError: none of them fits; the message says how much the thriftiest one would need.
    """
    candidates: list[MeshCandidate] = []
    too_large: list[tuple[Mesh, DeviceMemory]] = []
    for mesh in meshes(num_workers, devices_per_node, workload.layers):
        if mesh.num_assignments > workload.num_shards or (workload.state.is_bitwise and mesh.tp > 1):
            continue  # where a layer is divided, sums have other bits: nobody gets those without asking for them
        found = best_of(workload, mesh, devices_per_node, network)
        if isinstance(found, MeshCandidate):
            candidates.append(found)
        else:
            too_large.append((mesh, found))
    if not candidates:
        raise JobError(_nothing_fits(workload, num_workers, too_large))
    candidates.sort(key=lambda candidate: candidate.step_s)
    close = [one for one in candidates if one.step_s <= _CLOSE * candidates[0].step_s]
    close.sort(key=lambda one: _complexity(one.mesh))
    return SearchResult((*close, *candidates[len(close) :]), tuple(too_large), workload.memory_bytes)


def best_of(workload: Workload, mesh: Mesh, devices_per_node: int, network: Network) -> MeshCandidate | DeviceMemory:
    """The fastest way to use `mesh`; where none fits, the memory that the thriftiest one would need.

    Activations are computed again only where nothing fits without, and never on plain replicas, which cannot do so.
    """
    prices = MeshPrices(workload, mesh, devices_per_node, network)
    needed: list[DeviceMemory] = []
    for recompute in (False, True) if workload.layers and not mesh.is_plain else (False,):
        fitting: list[MeshCandidate] = []
        for pipeline in _pipelines(workload, mesh):
            memory = _memory(workload, mesh, pipeline, recompute)
            needed.append(memory)
            if fits(memory, workload.memory_bytes):
                fitting.append(prices.candidate(memory, pipeline, recompute))
        if fitting:
            return min(fitting, key=lambda candidate: candidate.step_s)
    return min(needed, key=lambda memory: memory.total_bytes)


_fullest = lru_cache(maxsize=2**14)(device_memory)


def _memory(workload: Workload, mesh: Mesh, pipeline: PipelineSpec, recompute: bool) -> DeviceMemory:
    """The memory of the fullest device, computed once for all meshes that differ in nothing that it depends on.

    It depends neither on the number of replicas beyond two nor, except in bitwise parity, on micro-batches beyond those
    that are under way at once.
    """
    most = max(2, 2 * pipeline.stages_per_worker * mesh.pp)
    num_micro_batches = -(-workload.share(mesh) // workload.shard_size)
    return _fullest(
        workload.num_parameters,
        workload.state,
        dataclasses.replace(mesh, dp=min(mesh.dp, 2)),
        workload.activations,
        workload.shard_size,
        num_micro_batches=num_micro_batches if workload.state.is_bitwise else min(most, num_micro_batches),
        layers=workload.layers,
        pipeline=pipeline,
        recompute=recompute,
    )


def meshes(num_workers: int, devices_per_node: int, layers: Layers) -> Iterator[Mesh]:
    """Every mesh of so many devices: tensor groups lie evenly in nodes, or nodes in them, and divide most layers
    evenly; each stage begins with a layer that may begin one."""
    for tp in _divisors(num_workers):
        if tp > 1 and ((devices_per_node % tp and tp % devices_per_node) or not _pays(layers, tp)):
            continue
        for pp in _divisors(num_workers // tp):
            if pp > _most_stages(layers):
                continue
            for fsdp in _divisors(num_workers // tp // pp):
                dp = num_workers // tp // pp // fsdp
                for stage in (1, 2, 3) if fsdp > 1 else (3,):
                    yield Mesh(dp=dp, fsdp=fsdp, tp=tp, pp=pp, zero_stage=stage)


def _most_stages(layers: Layers) -> int:
    return 1 + sum(layer.may_begin for layer in layers[1:])


def _pays(layers: Layers, tp: int) -> bool:
    total_s = sum(layer.time_s for layer in layers)
    return sum(layer.time_s for layer in layers if layer.is_sharded_by(tp)) > _WORTH_SHARING * total_s


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _pipelines(workload: Workload, mesh: Mesh) -> list[PipelineSpec]:
    """Schedules worth a price: one stage a worker, or two in turn where there are layers and micro-batches for it."""
    found = [PipelineSpec()]
    num_turns = -(-workload.num_shards // mesh.num_assignments)
    if mesh.pp > 1 and 2 * mesh.pp <= _most_stages(workload.layers) and num_turns % mesh.pp == 0:
        found.append(PipelineSpec(schedule="interleaved", stages_per_worker=2))
    return found


def _complexity(mesh: Mesh) -> tuple[int, ...]:
    return mesh.pp, mesh.tp, mesh.fsdp, mesh.zero_stage if mesh.fsdp > 1 else 0


def _most(stages: Sequence[Layers], mesh: Mesh, of: Callable[[LayerCost], float]) -> float:
    """The most that a worker has of something, of which a layer has so much; every pp-th stage is on one worker."""
    of_stages = [sum(map(of, stage)) for stage in stages]
    return max(sum(of_stages[worker :: mesh.pp]) for worker in range(mesh.pp))


def _largest_part(stages: Sequence[Layers], mesh: Mesh, of: Callable[[LayerCost], float]) -> float:
    """The largest amount of a stage, as a fraction of the total of all layers; tensor parallelism divides it."""
    most = _most(stages, mesh, lambda layer: of(layer) / layer.tensor_shards(mesh.tp))
    return most / (sum(of(layer) for stage in stages for layer in stage) or 1.0)


def num_gathers_and_scatters(zero_stage: int, num_passes: int, is_bitwise: bool = False) -> tuple[int, int]:
    """How often a step gathers parameters and scatters gradients along fsdp (Rajbhandari et al. 2020, section 7).

    Stage 1 does both once a step, stage 2 in every pass, and stage 3 gathers again for backward. In bitwise parity
    gradients are whole, so that nothing scatters them and a pass gathers once.
    """
    if is_bitwise:
        return (1 if zero_stage == 1 else num_passes), 0
    return {1: (1, 1), 2: (num_passes, num_passes), 3: (2 * num_passes, num_passes)}[zero_stage]


def _num_blocks(layers: Layers, mesh: Mesh, own_bytes: float) -> int:
    """Parts of a stage that `parallel/sharded.py` gathers one by one: its layers, small ones together."""
    if not layers:
        return num_buckets(own_bytes)
    return max(1, min(-(-len(layers) // mesh.pp), int(own_bytes / MIN_BLOCK_BYTES)))


@dataclass(frozen=True)
class MeshPrices:
    """The prices of a workload on one mesh; its devices fill nodes of `devices_per_node`."""

    workload: Workload
    mesh: Mesh
    devices_per_node: int
    network: Network

    def candidate(self, memory: DeviceMemory, pipeline: PipelineSpec, recompute: bool = False) -> MeshCandidate:
        """The seconds of a step.

        A pipeline of p stages takes m + p - 1 turns for m micro-batches (Huang et al. 2019, GPipe); with v stages a
        worker it waits 1/v as long and sends v times as much (Narayanan et al. 2021, section 2.2.2).
        """
        workload, mesh, stages = self.workload, self.mesh, memory.stages
        share, micro_batch_size = workload.share(mesh), workload.shard_size
        m = -(-share // micro_batch_size)
        last = share - (m - 1) * micro_batch_size
        v = pipeline.stages_per_worker
        busiest = _largest_part(stages, mesh, lambda layer: layer.time_s) * (_RECOMPUTE_FACTOR if recompute else 1.0)
        turn_s, last_s = workload.compute_s(micro_batch_size) * busiest, workload.compute_s(last) * busiest
        compute_s = (m - 1) * turn_s + last_s
        held = _largest_part(stages, mesh, lambda layer: layer.parameter_bytes)
        own_bytes = workload.num_parameters * workload.state.gradient * held
        return MeshCandidate(
            mesh,
            micro_batch_size,
            m,
            memory,
            compute_s=compute_s,
            bubble_s=(mesh.pp - 1) * turn_s / v,
            tensor_s=(m + (mesh.pp - 1) / v) * self._inside_model_s(stages, micro_batch_size, v),
            exposed_s=self._sharding_s(own_bytes, m, last_s, compute_s) + self._replicas_s(own_bytes, last_s),
            optimizer_s=workload.optimizer_s * held / mesh.fsdp,
            pipeline=pipeline,
            recompute=recompute,
        )

    def _inside_model_s(self, stages: Sequence[Layers], micro_batch_size: int, stages_per_worker: int) -> float:
        """What one micro-batch's sums inside of layers and messages to the next stage take, forward and backward."""
        mesh, network, seconds = self.mesh, self.network, 0.0
        if mesh.tp > 1:
            sum_s = ring if self.workload.backend == "gloo" else cheapest_s
            layer_s = {  # most layers of a model are alike
                layer: layer.num_all_reduces * self._sum_s(layer.all_reduce_bytes * micro_batch_size, mesh.tp, 1, sum_s)
                for layer in set(self.workload.layers)
                if layer.is_sharded_by(mesh.tp)
            }
            seconds += _most(stages, mesh, lambda layer: layer_s.get(layer, 0.0))
        if mesh.pp > 1:
            message_bytes = max(stage[-1].output_bytes for stage in stages[:-1]) * micro_batch_size
            level = network.inside
            if mesh.num_workers > self.devices_per_node:
                # Stages are farthest apart: the slowest of their links is one between nodes, which its workers share.
                level = network.between
                message_bytes *= min(self.devices_per_node, mesh.tp * mesh.num_assignments)
            seconds += 2 * stages_per_worker * (network.per_message_s + level.seconds(message_bytes))
        return seconds

    def _replicas_s(self, own_bytes: float, last_s: float) -> float:
        """What the last micro-batch's computing does not hide of adding up gradients over replicas."""
        workload, mesh = self.workload, self.mesh
        if workload.state.is_bitwise:  # whole gradients, whatever is sharded
            size_bytes, degree, stride, sum_s = own_bytes, mesh.num_assignments, mesh.tp, tree_exact
        else:
            size_bytes, degree, stride, sum_s = own_bytes / mesh.fsdp, mesh.dp, mesh.tp * mesh.fsdp, cheapest_s
        all_s = sums_s(size_bytes, lambda bucket_bytes: self._sum_s(bucket_bytes, degree, stride, sum_s))
        return exposed_s(last_s, size_bytes, all_s) if workload.sums_are_hidden else all_s

    def _sharding_s(self, own_bytes: float, num_passes: int, last_s: float, compute_s: float) -> float:
        """What is not hidden of gathering parameters and scattering gradients over the fsdp axis.

        A gather is half an all_reduce, and so is a scatter where the backend has one. The axis has links of its own.
        """
        workload, mesh = self.workload, self.mesh
        if mesh.fsdp == 1:
            return 0.0
        # Nothing but a ring gathers and scatters, block by block.
        num_blocks = _num_blocks(workload.layers, mesh, own_bytes)
        all_reduce_s = num_blocks * self._sum_s(own_bytes / num_blocks, mesh.fsdp, mesh.tp, ring)
        is_gloo = workload.backend == "gloo"
        num_gathers, num_scatters = num_gathers_and_scatters(mesh.zero_stage, num_passes, workload.state.is_bitwise)
        seconds = all_reduce_s * (num_gathers / 2 + num_scatters / (1 if is_gloo else 2))
        seconds += (num_gathers + num_scatters) * own_bytes * workload.copy_s_per_byte
        if is_gloo:
            return seconds
        return exposed_s(compute_s if mesh.zero_stage >= 2 else last_s, own_bytes, seconds)

    def _sum_s(
        self, size_bytes: float, degree: int, stride: int, sum_s: Callable[[float, Layout, Network], float]
    ) -> float:
        """One all_reduce over ranks that are `stride` apart: the groups of a node's other ranks share its link."""
        if degree == 1 or not size_bytes:
            return 0.0
        on_a_node = max(1, min(degree, self.devices_per_node // stride))
        full, rest = divmod(degree, on_a_node)
        layout = Layout((on_a_node,) * full + ((rest,) if rest else ()))
        between = self.network.between
        sharing = max(1.0, min(self.devices_per_node, self.mesh.num_workers) / on_a_node)
        shared = dataclasses.replace(between, beta_s_per_byte=between.beta_s_per_byte * sharing)
        return sum_s(size_bytes, layout, dataclasses.replace(self.network, between=shared))


def num_buckets(size_bytes: float) -> int:
    return max(1, math.ceil(size_bytes / BUCKET_BYTES))


def sums_s(size_bytes: float, sum_s: Callable[[float], float]) -> float:
    """Seconds of all sums, one per bucket of equal size; `sum_s` gives the time for a number of bytes."""
    count = num_buckets(size_bytes)
    return count * sum_s(size_bytes / count)


def exposed_s(compute_s: float, size_bytes: float, all_sums_s: float) -> float:
    """The part of `all_sums_s` that is exposed after the end of a pass of `compute_s`.

    Bucket j of n is ready after forward and j / n of backward, and is sent when those before it have arrived (Zhang et
    al. 2017, "Poseidon", wait-free backpropagation). Nothing is sent during forward, and the last one is never hidden.
    Buckets of equal size become ready at equal intervals. So either each transfer ends before the next bucket is ready,
    and only the last one is exposed, or the link is never idle after the first bucket is ready.
    """
    count = num_buckets(size_bytes)
    behind_first_s = compute_s * BACKWARD_SHARE * (count - 1) / count
    return max(all_sums_s / count, all_sums_s - behind_first_s)


@lru_cache(maxsize=8192)
def cheapest_s(size_bytes: float, layout: Layout, network: Network) -> float:
    """Seconds of one sum over `layout`, by the algorithms that stand for what tuned libraries do."""
    return float(min(cost(size_bytes, layout, network) for cost in (ring, hierarchical)))


def _nothing_fits(workload: Workload, num_workers: int, too_large: list[tuple[Mesh, DeviceMemory]]) -> str:
    if not too_large:
        return (
            f"{num_workers} workers cannot share a global batch of {workload.global_batch_size} samples; "
            "use fewer workers or a larger global_batch_size."
        )
    mesh, memory = min(too_large, key=lambda one: one[1].total_bytes)
    return (
        f"This job fits into no mesh of {number_of(num_workers, 'device')}: {mesh} needs the least, "
        f"{size(memory.total_bytes)} a device, and {size(USABLE_FRACTION * workload.memory_bytes)} can be used; "
        "take more devices or a smaller model."
    )
