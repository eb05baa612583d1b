"""The weights of an outer step of `local_sgd` and `diloco`: flat vectors of parameters, and how far they move."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class WeightBucket:
    """A bucket of parameters, and their values after the last outer step."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], has_momentum: bool) -> None:
        self._parameters = parameters
        self._dtype = wide_dtype(parameters[0][1])
        self.agreed = self.current()
        """A flat vector; in float32 where the parameters have less precision, so that small moves add up."""
        self.momentum = torch.zeros_like(self.agreed) if has_momentum else None

    def current(self) -> Tensor:
        """The parameters' values as a flat vector."""
        return torch.cat([parameter.detach().reshape(-1).to(self._dtype) for _, parameter in self._parameters])

    def named(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's name and its slice of a flat vector, in its own shape."""
        pieces = flat.split([parameter.numel() for _, parameter in self._parameters])
        for (name, parameter), piece in zip(self._parameters, pieces, strict=True):
            yield name, piece.view(parameter.shape)

    def write(self, flat: Tensor) -> None:
        """Give the parameters the values of a flat vector."""
        for (_, parameter), (_, piece) in zip(self._parameters, self.named(flat), strict=True):
            parameter.copy_(piece)

    def step(self, move: Tensor, lr: float, momentum: float) -> None:
        """SGD with Nesterov momentum on the common weights, along the pseudo-gradient -move; changes `move`."""
        if self.momentum is not None:
            self.momentum.mul_(momentum).add_(move)
            move.add_(self.momentum, alpha=momentum)
        self.agreed.add_(move, alpha=lr)


Move = tuple[WeightBucket, Tensor, torch.futures.Future[Tensor] | None]
"""How far a bucket's weights move, once the future is done; None: other workers of the group add that up, or none."""


@dataclass(frozen=True)
class OuterStep:
    """An outer step that has begun."""

    own_part: float
    """The fraction of the samples that this worker has computed."""
    moves: Sequence[Move]
    begun: Sequence[Tensor | None]
    """This worker's weights when it began; None where no step is made before it ends."""


def by_name(weights: Iterable[WeightBucket], flats: Iterable[Tensor]) -> dict[str, Tensor]:
    """Parts of flat vectors, one of each bucket, by the parameters' names."""
    return {name: part for bucket, flat in zip(weights, flats, strict=True) for name, part in bucket.named(flat)}


def fill(weights: Iterable[WeightBucket], flats: Iterable[Tensor], parts: Mapping[str, Tensor]) -> None:
    """Give flat vectors, one of each bucket, the values that `by_name` found."""
    for name, part in by_name(weights, flats).items():
        part.copy_(parts[name])


def wide_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype in which moves of a parameter add up: float64 for float64, else float32."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32
