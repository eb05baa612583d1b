"""Sequence parallelism: layers in a region of a model in which every worker keeps its own positions of a sequence.

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2. Positions are
the last dimension but one: (..., positions, width).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.errors import ModelError
from paceline.parallel.memory_order import memory_order
from paceline.parallel.tensor import exchange
from paceline.parallel.tensor.slices import slice_of

_DIM = -2


class SequenceRegion:
    """The region through which a micro-batch passes now; a model may have several, one after the other.

    How many positions there are in all is known where a region begins and where it ends, and its layers have to know.
    Backward comes from the end, so the number is right again when activations are computed a second time.
    """

    def __init__(self, axis: DeviceMesh) -> None:
        self.axis = axis
        self._length: int | None = None

    @property
    def length(self) -> int:
        """The number of positions of all workers.

        Raises:
            ModelError: outside of every region.
        """
        if self._length is None:
            raise ModelError(
                "A layer that treats a worker's own positions was called from elsewhere than the module it stands in: "
                "leave sequence parallelism out, or let modules call their own layers only."
            )
        return self._length

    def enter(self, whole: Tensor) -> Tensor:
        """This worker's positions of a whole tensor, (batch, positions, ...) -> (batch, own positions, ...)."""
        self._length = whole.shape[_DIM]
        return exchange.take_slice(self._set_in_backward(whole, None), _DIM, self.axis)

    def leave(self, own: Tensor) -> Tensor:
        """All positions, whole on every worker: (batch, own positions, ...) -> (batch, positions, ...)."""
        whole = exchange.all_gather(self._set_in_backward(own, self.length), _DIM, self.length, self.axis)
        self._length = None
        return whole

    def gather(self, own: Tensor) -> Tensor:
        """All positions, in the shape of `leave`, where this worker then computes some features of them."""
        return exchange.all_gather_to_divide(own, _DIM, self.length, self.axis)

    def scatter(self, term: Tensor, bias: Tensor | None) -> Tensor:
        """This worker's positions of the sum of every worker's term, (batch, positions, ...), plus the bias."""
        if term.shape[_DIM] != self.length:
            raise ModelError(
                f"A linear layer between whose outputs workers share {self.length} positions was given "
                f"{term.shape[_DIM]}: leave sequence parallelism out for this model."
            )
        return exchange.reduce_scatter(term, bias, _DIM, self.axis)

    def _set_in_backward(self, tensor: Tensor, length: int | None) -> Tensor:
        """The tensor as it is; when backward passes here, `length` becomes the current one."""

        def backward(grad: Tensor) -> Tensor:
            self._length = length
            return grad

        return exchange.exchange(tensor, lambda given: given.view_as(given), backward)

    def parameters(self, *parameters: Tensor | None) -> tuple[Tensor | None, ...]:
        """Parameters that are applied to own positions, with the gradients of all positions."""
        _ = self.length  # only inside of a region: outside, gradients would be summed that are whole already
        given = [parameter for parameter in parameters if parameter is not None]
        summed = iter(exchange.sum_gradients(given, self.axis))
        return tuple(None if parameter is None else next(summed) for parameter in parameters)


class SequenceLayerNorm(nn.LayerNorm):
    """Normalises this worker's positions, each by itself; the gradients of weight and bias are those of all."""

    region: SequenceRegion

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.region.parameters(self.weight, self.bias)
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class SequenceRMSNorm(nn.RMSNorm):
    """An RMS norm on a slice of the positions, as `SequenceLayerNorm` is a layer norm."""

    region: SequenceRegion

    def forward(self, x: Tensor) -> Tensor:
        (weight,) = self.region.parameters(self.weight)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class SequenceDropout(nn.Dropout):
    """Draws the mask of all positions, as one device does, and uses that of this worker's."""

    region: SequenceRegion

    def forward(self, input: Tensor) -> Tensor:
        return drop_slice(input, _DIM, self.region.length, self.p, self.region.axis) if self.training else input


def drop_slice(own: Tensor, dim: int, length: int, p: float, axis: DeviceMesh) -> Tensor:
    """Dropout on a slice of what has `length` along `dim`: draws the mask of all of it, and uses its own slice."""
    if p == 0:
        return own
    start, stop = slice_of(length, axis.size(), axis.get_local_rank())
    order, back = memory_order(own)
    shape = list(own.shape)
    shape[dim] = length
    mask = F.dropout(own.new_ones([shape[one] for one in order]).permute(back), p)
    # A copy: a view would keep the whole mask for backward.
    return own * mask.narrow(dim, start, stop - start).clone()


SEQUENCE_LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    nn.LayerNorm: SequenceLayerNorm,
    nn.RMSNorm: SequenceRMSNorm,
    nn.Dropout: SequenceDropout,
}
