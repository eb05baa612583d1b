"""The peak memory of a worker of a mesh while backward goes through its part of a model.

A peak consists of state, activations that layers keep for backward, temporary tensors of one layer, and parameters and
gradients that are gathered or in messages.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from paceline.partition import InFlight
from paceline.spec import Mesh
from paceline.spec.algorithm import MIN_BLOCK_BYTES
from paceline.spec.model_cost import DeviceMemory, LayerCost, Layers

USABLE_FRACTION = 0.92
"""The usable fraction of a device's memory; the rest is used by the driver and the communication library, or lost to
fragmentation."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter: the parameter, its gradient and the optimizer state."""

    parameter: float = 4.0
    gradient: float = 4.0
    optimizer: float = 4.0
    is_bitwise: bool = False
    """Whether gradients are added in the tree of bitwise parity: every worker holds whole ones, in partial sums."""

    @property
    def total(self) -> float:
        return self.parameter + self.gradient + self.optimizer

    def gradient_copies(self, mesh: Mesh, num_shards: int) -> float:
        """How many times a worker holds the gradients of its stage.

        In bitwise parity those of a shard, and a sum for each power of two of the shards before it. ZeRO 1 holds whole
        ones from the first pass of a step to the last; in a step of one pass each block's are scattered at once.
        """
        if self.is_bitwise:
            return 1.0 + num_shards.bit_length()
        return 1 / mesh.fsdp if _scatters_every_pass(mesh, num_shards) else 1.0


def _scatters_every_pass(mesh: Mesh, num_passes: int) -> bool:
    """Whether each pass of a step scatters a block's gradients when they are there; ZeRO 1 does so in the last pass."""
    return mesh.zero_stage > 1 or num_passes == 1


class _Moment(NamedTuple):
    """The memory of a worker at one moment of backward, beside its state."""

    activation_bytes: float
    """Bytes of activations, less those of the gradients in the state that have not been computed yet."""
    gathered_bytes: float
    transit_bytes: float

    def non_negative(self) -> _Moment:
        """The same total without negative parts: negative activation bytes reduce the transit bytes, and these, if they
        become negative, the gathered bytes."""
        activation_bytes, gathered_bytes, transit_bytes = self
        transit_bytes += min(0.0, activation_bytes)
        gathered_bytes += min(0.0, transit_bytes)
        return _Moment(*(max(0.0, one) for one in (activation_bytes, gathered_bytes, transit_bytes)))


class _Numbers(NamedTuple):
    """What one worker has of a layer, of which a tensor group may divide some; bytes are those of a sample."""

    parameters: float
    largest_parameter: float
    """Parameters in the largest tensor of them."""
    kept_bytes: float
    """Activations."""
    moment_bytes: float
    """What lives only while backward goes through the layer."""
    waiting_bytes: float
    """Gradients between the two halves of a backward pass."""


class _Block(NamedTuple):
    """Layers that are gathered together, while backward goes through them.

    As torch's `fully_shard` does it: before backward comes to a block, its parameters are copied out of the message
    that brought them; then the message for the block before it is there too. When backward has left the block its
    parameters go, its gradients are copied into a message, and this one stays until the next block's is made.
    """

    model: ModelOnMesh
    own: float
    """Number of parameters of this worker."""
    previous: float
    """Number of parameters of the previous block."""
    size: float
    """Number of parameters of this block."""
    following: float
    """Number of parameters of the next block."""
    behind: float
    """Number of parameters of all blocks behind this one."""

    def within(self, layer: _Numbers, activation_bytes: float, done: float) -> _Moment:
        """The memory while backward goes through one of the block's layers.

        Args:
            done: number of parameters of the layer and of those behind it.
        """
        model = self.model
        if model.gathers_blocks:
            gathered = self._gathered(self.previous + self.size, gone=self.behind)
            return self._moment(activation_bytes, self.behind, gathered, done - self.behind + self._arriving)
        made = self.behind if model.mesh.fsdp > 1 else done  # a shard of it comes when it has been scattered
        return _Moment(
            activation_bytes - model.gradients_to_come(self.own, made),
            model.gathered_at_the_end(self.own),
            model.own_beside_buckets(self.own, made) + model.added(layer),
        )

    def at_its_ends(self, bytes_before: float, bytes_behind: float) -> tuple[_Moment, ...]:
        """The memory at the moments when the block's parameters or gradients exist twice, also in messages.

        Args:
            bytes_before, bytes_behind: bytes of activations without those of the block, and with them.
        """
        previous, size, behind = self.previous, self.size, self.behind
        # In the forward pass a message stays until the next one has been copied out, and there are no gradients.
        messages = previous + size
        entered = self._gathered(size + messages, gone=behind, messages=messages)
        done = self._gathered(2 * size, gone=behind, messages=size)
        turned = self._gathered(2 * size, gone=behind)
        left = self._gathered(previous, gone=behind + size)
        passing = 2 * size if self.model.scatters_every_pass else size
        forward = self._moment(bytes_before, 0.0, entered, 0.0), self._moment(bytes_behind, 0.0, done, 0.0)
        backward = self._moment(bytes_behind, behind, turned, self._arriving)
        return *forward, backward, self._moment(bytes_before, behind, left, passing)

    @property
    def _arriving(self) -> float:
        """Number of parameters of the next block whose gradients are in a message."""
        return self.following if self.model.scatters_every_pass else 0.0

    def _gathered(self, gathered: float, *, gone: float, messages: float = 0.0) -> float:
        """Number of parameters beside those that `DeviceMemory` counts as the worker's own.

        Args:
            gathered: parameters that ZeRO stage 3 gathers.
            gone: parameters that stages 1 and 2 do not hold whole, if their passes gather and scatter.
            messages: parameters that stages 1 and 2 hold in messages.
        """
        model = self.model
        if model.mesh.zero_stage == 3:
            return gathered
        part = self.own / model.mesh.fsdp
        return part + messages - gone if model.scatters_every_pass else part

    def _moment(self, activation_bytes: float, made: float, gathered: float, passing: float) -> _Moment:
        """
        Args:
            made: number of parameters whose gradients the worker holds.
            passing: number of parameters whose gradients are in messages.
        """
        model = self.model
        return _Moment(
            activation_bytes - model.gradients_to_come(self.own, made),
            gathered * model.state.parameter,
            model.own_beside_buckets(self.own, made) + passing * model.state.gradient,
        )


@dataclass(frozen=True)
class ModelOnMesh:
    """A model's layers on the devices of a mesh.

    Rajbhandari et al. 2020, figure 1, for psi parameters: stage 1 shards the optimizer state, 2 the gradients, 3 the
    parameters, each by 1/fsdp; replicas shard nothing. Stage 3 gathers a block and fetches the next one meanwhile;
    stages 1 and 2 hold their part of the parameters beside the whole. A pipeline holds the activations of
    `micro_batches_in_flight`. Recomputation keeps what layers give each other, and one layer's activations.
    """

    mesh: Mesh
    state: StateBytes
    fixed_bytes: float
    """Memory of activations that does not depend on the samples."""
    samples_bytes: float
    """The samples of all micro-batches, which every worker of a pipeline has."""
    parameters_per_byte: float
    """Parameters for each of the layers' `parameter_bytes`."""
    kept_per_byte: float
    """Bytes a sample for each of the layers' `activation_bytes` and `moment_bytes`."""
    micro_batch_size: int
    in_flight: tuple[tuple[InFlight, ...], ...]
    """[worker of a pipeline]: what its stages keep."""
    in_halves: tuple[float, ...]
    """[worker of a pipeline]: samples of which only the first half of backward is done."""
    num_micro_batches: int
    has_layers: bool
    """Whether the layers are known: else nobody knows how large a block is."""
    recompute: bool

    def numbers(self, layer: LayerCost) -> _Numbers:
        """What a worker has of a layer: computed once, as most layers of a large model are the same object."""
        found = self._numbers.get(id(layer))
        if found is None:
            tp, shards = self.mesh.tp, layer.tensor_shards(self.mesh.tp)
            held = self.kept_per_byte
            if layer.is_sharded_by(tp):
                held *= layer.replicated_fraction + (1 - layer.replicated_fraction) / tp
            found = self._numbers[id(layer)] = _Numbers(
                self.parameters_per_byte * layer.parameter_bytes / shards,
                self.parameters_per_byte * layer.largest_parameter_bytes / shards,
                *(held * num_bytes for num_bytes in (layer.activation_bytes, layer.moment_bytes, layer.waiting_bytes)),
            )
        return found

    @cached_property
    def _numbers(self) -> dict[int, _Numbers]:
        """The results of `numbers`, by the `id` of a layer."""
        return {}

    def on_worker(self, worker: int, stages: tuple[Layers, ...], arriving_bytes: float = 0.0) -> DeviceMemory:
        """
        Args:
            stages: the stages of this worker.
            arriving_bytes: bytes a sample of messages that arrive while the worker computes another micro-batch.
        """
        own = sum(self.numbers(layer).parameters for stage in stages for layer in stage)
        shards, state = self.mesh.fsdp, self.state
        moments = (self.peak_of_backward(worker, stages, one, own) for one in self.in_flight[worker])
        peak = max(moments, key=sum).non_negative()
        return DeviceMemory(
            parameter_bytes=own * state.parameter / (shards if self.mesh.zero_stage == 3 else 1),
            gradient_bytes=own * state.gradient * state.gradient_copies(self.mesh, self.num_micro_batches),
            optimizer_bytes=own * state.optimizer / shards,
            activation_bytes=peak.activation_bytes + self.micro_batch_size * arriving_bytes,
            gathered_bytes=peak.gathered_bytes,
            transit_bytes=peak.transit_bytes,
        )

    def peak_of_backward(self, worker: int, stages: tuple[Layers, ...], in_flight: InFlight, own: float) -> _Moment:
        """The moment at which a worker holds most while backward goes through one of its stages.

        While backward goes through a layer, the layers before it keep what they kept, and those behind it nothing.
        """
        kept_by_stage = [self.kept_by(stage) for stage in stages]
        stage, kept = stages[in_flight.place], kept_by_stage[in_flight.place]
        samples = self.micro_batch_size
        waiting_bytes = self.fixed_bytes + self.samples_bytes - samples * sum(kept)
        for stage_bytes, micro_batches in zip(kept_by_stage, in_flight.micro_batches, strict=True):
            waiting_bytes += samples * micro_batches * sum(stage_bytes)
        if self.in_halves[worker]:
            waiting_bytes += self.in_halves[worker] * sum(
                self.numbers(layer).waiting_bytes for one in stages for layer in one
            )
        before, whole = 0.0, 0.0
        done = own - sum(self.numbers(layer).parameters for one in stages[: in_flight.place] for layer in one)
        blocks = self.blocks(stage)
        sizes = [0.0, *(sum(self.numbers(layer).parameters for layer in block) for block in blocks), 0.0]
        transit_bytes = self.own_beside_buckets(own, own) + self.scattered_at_the_end(max(sizes))
        moments = [_Moment(waiting_bytes, self.gathered_at_the_end(own), transit_bytes)]
        kept_by_layer = iter(kept)
        for number, layers in enumerate(blocks, 1):
            size = sizes[number]
            block = _Block(self, own, sizes[number - 1], size, sizes[number + 1], done - size)
            bytes_before = waiting_bytes + samples * before
            for layer in layers:
                numbers = self.numbers(layer)
                before, whole = before + next(kept_by_layer), whole + numbers.kept_bytes
                at_once = min(whole, before + numbers.kept_bytes)
                moments.append(block.within(numbers, waiting_bytes + samples * (at_once + numbers.moment_bytes), done))
                done -= numbers.parameters
            if self.gathers_blocks:
                moments += block.at_its_ends(bytes_before, waiting_bytes + samples * before)
        return max(moments, key=sum)

    def blocks(self, stage: Layers) -> list[Layers]:
        """The layers of a stage that `parallel/sharded.py` gathers together; one by one where none is gathered."""
        if not self.gathers_blocks:
            return [(layer,) for layer in stage]
        found, block, num_bytes = [], [], 0.0
        for layer in stage:
            block.append(layer)
            num_bytes += self.parameters_per_byte * layer.parameter_bytes * self.state.parameter
            if num_bytes >= MIN_BLOCK_BYTES:
                found.append(tuple(block))
                block, num_bytes = [], 0.0
        return [*found, tuple(block)] if block else found

    @cached_property
    def gathers_blocks(self) -> bool:
        """Whether workers gather and scatter one block after the other. The tree of bitwise parity takes whole
        gradients."""
        return self.mesh.fsdp > 1 and self.has_layers and not self.state.is_bitwise

    @cached_property
    def scatters_every_pass(self) -> bool:
        return _scatters_every_pass(self.mesh, self.num_micro_batches)

    def kept_by(self, layers: Layers) -> list[float]:
        """Bytes a sample that each layer keeps until backward comes to it; none needs to keep more than it would
        without recomputation."""
        whole = [self.numbers(layer).kept_bytes for layer in layers]
        outputs = [layer.output_bytes for layer in layers]
        return list(map(min, outputs, whole)) if self.recompute else whole

    @cached_property
    def has_buckets(self) -> bool:
        """Whether replicas sum gradients in buckets, which stay in memory from step to step."""
        return self.mesh.dp > 1 and not self.state.is_bitwise

    @cached_property
    def makes_gradients(self) -> bool:
        """Whether the backward pass makes all gradients anew, and adds none to those of the pass before."""
        return self.num_micro_batches == 1 and self.mesh.pp == 1 and not self.state.is_bitwise

    def gradients_to_come(self, own: float, made: float) -> float:
        """Bytes of gradients in the state that do not exist yet, where those of `made` of `own` parameters do."""
        if self.has_buckets or not self.makes_gradients:
            return 0.0
        return self.state.gradient / self.mesh.fsdp * (own - made)

    def own_beside_buckets(self, own: float, made: float) -> float:
        """Bytes of a worker's own gradients while the sums of replicas, in the buckets, count as its state."""
        if not self.has_buckets:
            return 0.0
        return self.state.gradient / self.mesh.fsdp * (made if self.makes_gradients else own)

    def added(self, layer: _Numbers) -> float:
        """Bytes of one gradient that is added to those of the passes before."""
        if self.num_micro_batches == 1 or self.state.is_bitwise or self.mesh.fsdp > 1:
            return 0.0
        return self.state.gradient * layer.largest_parameter

    def gathered_at_the_end(self, own: float) -> float:
        """Bytes of parameters beside a worker's own when backward has left the stage. Stages 1 and 2 hold their part
        beside the whole, and bitwise parity holds all; so does a worker of which the blocks are not known."""
        mesh = self.mesh
        if mesh.fsdp == 1 or (mesh.zero_stage == 3 and self.gathers_blocks):
            return 0.0
        return own * self.state.parameter / (1 if mesh.zero_stage == 3 else mesh.fsdp)

    def scattered_at_the_end(self, largest_block: float) -> float:
        """Bytes of gradients that are being scattered when backward has left the stage: ZeRO 1 scatters whole ones
        then."""
        is_late = self.gathers_blocks and not self.scatters_every_pass
        return self.state.gradient * largest_block if is_late else 0.0

    def fullest(self, stages: tuple[Layers, ...]) -> DeviceMemory:
        """The fullest worker of a pipeline; each has every pp-th stage."""
        pp = self.mesh.pp
        between = [0.0, *(stage[-1].output_bytes for stage in stages[:-1]), 0.0]
        arriving = [max(between[worker:-1:pp]) + max(between[worker + 1 :: pp]) for worker in range(pp)]
        found = [self.on_worker(worker, stages[worker::pp], arriving[worker]) for worker in range(pp)]
        return dataclasses.replace(max(found, key=lambda memory: memory.total_bytes), stages=stages)
