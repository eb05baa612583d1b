"""Tensor parallelism: the workers of one axis compute a part each of every layer."""

from paceline.parallel.tensor.layout import (
    LayerSize,
    SplitLayer,
    TensorLayout,
    bytes_per_pass,
    bytes_per_sample,
    layer_sizes,
)
from paceline.parallel.tensor.split import LARGE, find_layout, tensor_parallel

__all__ = [
    "LARGE",
    "LayerSize",
    "SplitLayer",
    "TensorLayout",
    "bytes_per_pass",
    "bytes_per_sample",
    "find_layout",
    "layer_sizes",
    "tensor_parallel",
]
