"""`LayerCost`, `ModelCost`: time and memory of training a model, per layer and sample."""

from __future__ import annotations

from dataclasses import dataclass


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
    """Bytes that a stage ending here sends to the next one; gradients of the same size return. 0 for the last layer."""
    may_begin: bool = True
    """Whether a stage of a pipeline may begin with this layer."""
    num_tensor_slices: int = 1
    """Heads, groups or output channels that tensor parallelism can distribute; 1: every worker computes all of it."""
    num_all_reduces: int = 0
    """How many all-reduces a tensor group makes, forward and backward."""
    all_reduce_bytes: float = 0.0
    """Bytes of each of these all-reduces."""
    replicated_fraction: float = 1.0
    """The fraction of `activation_bytes` that each worker of a tensor group keeps whole."""
    moment_bytes: float = 0
    """Bytes that live only while backward goes through this layer: the gradients of its output and of its input."""
    largest_parameter_bytes: float = 0
    """Bytes of the largest parameter: its gradient lives beside the sum that it is added to."""

    def is_sharded_by(self, degree: int) -> bool:
        """Whether a tensor group of `degree` workers can divide this layer evenly."""
        return self.num_tensor_slices >= degree and self.num_tensor_slices % degree == 0

    def tensor_shards(self, degree: int) -> int:
        """The number of workers of a tensor group among which the layer's computation and parameters are divided."""
        return degree if self.is_sharded_by(degree) else 1


Layers = tuple[LayerCost, ...]


@dataclass(frozen=True)
class Activations:
    """Memory of one pass on a device with the whole model, at its peak: fixed_bytes + samples * bytes_per_sample."""

    bytes_per_sample: float
    fixed_bytes: float = 0.0
    input_bytes: float = 0.0
    """Bytes of a sample as the model takes it; 0: not known."""


@dataclass(frozen=True)
class ModelCost:
    """The costs of a model from a trace or a measurement."""

    num_parameters: int
    activations: Activations
    layers: Layers = ()
    """The layers of the model; empty: unknown."""
