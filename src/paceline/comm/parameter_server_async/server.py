"""A server of `parameter_server_async`: some of the parameters, and the optimizer that updates them.

It lives in a worker's process and answers calls in a thread for each caller, beside its own training: operations on
tensors release Python's lock, and no call waits for another worker.
"""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.fixed_tree import Block
from paceline.comm.parameter_server_async.ledger import ShardSum
from paceline.comm.parameter_server_async.messages import ParameterRange

Span = tuple[int, int]
"""Elements start … stop - 1 of all parameters, flattened and laid one after the other."""


def spans(num_elements: int, num_servers: int) -> list[Span]:
    """The slice of every server: equal to within one element, so the largest tensors are cut."""
    return [
        (server * num_elements // num_servers, (server + 1) * num_elements // num_servers)
        for server in range(num_servers)
    ]


def ranges_in(sizes: Sequence[int], span: Span) -> list[ParameterRange]:
    """What of parameters with `sizes` elements lies in `span`, in order."""
    found, offset = [], 0
    for parameter, size in enumerate(sizes):
        start, stop = max(span[0] - offset, 0), min(span[1] - offset, size)
        if start < stop:
            found.append(ParameterRange(parameter, start, stop))
        offset += size
    return found


def late_momentum(momentum: float, lateness: int) -> float:
    """The momentum for an update by gradients that are `lateness` updates late.

    Late gradients act like momentum themselves (Mitliagkas et al., "Asynchrony begets momentum", 2016). A momentum m
    spreads a gradient over m / (1 - m) updates after the first one; this one spreads it over 1 + `lateness` times
    fewer. The learning rate stays: where it is stable, a smaller one only learns more slowly.
    """
    return momentum if lateness == 0 else momentum / (momentum + (1 - momentum) * (1 + lateness))


class ParameterSlice:
    """Some elements of the parameters, and the optimizer that updates them: batch after batch, in order."""

    def __init__(
        self,
        optimizer: Optimizer,
        span: Span,
        num_shards: Callable[[int], int],
        lr_factor: Callable[[int], float],
        first_batch: int,
    ) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._ranges = ranges_in([p.numel() for p in parameters], span)
        self._values = torch.cat(
            [parameters[0].new_empty(0, device="cpu")]
            + [parameters[r.parameter].detach().reshape(-1)[r.start : r.stop].cpu() for r in self._ranges]
        )
        sizes = [held.stop - held.start for held in self._ranges]
        self._parameters = [nn.Parameter(values) for values in self._values.split(sizes)]
        self._optimizer = _optimizer_of(optimizer, self._ranges, self._parameters)
        self._base_groups = [dict(group) for group in self._optimizer.param_groups]
        self._num_shards = num_shards
        self._lr_factor = lr_factor
        self._lock = threading.Lock()
        self._version = first_batch
        self._sums: dict[int, ShardSum] = {}
        self._weights: dict[int, ShardSum] = {}
        self._used: dict[int, Tensor] = {}
        self._lateness: dict[int, int] = {}
        """How many updates the gradients of each batch are late."""
        # Never written to once they are here: an answer may be on its way while the next update is made.
        self._snapshots = {first_batch: self._values.clone()}

    def pull(self, version: int) -> Tensor | None:
        """The values after so many updates. None: nobody needs them any more."""
        return self._snapshots.get(version)

    def push(
        self,
        batch: int,
        version: int,
        oldest: int,
        blocks: Sequence[Block],
        sums: Sequence[Tensor],
        used: Tensor,
        weights: Sequence[Tensor] = (),
    ) -> bool:
        """Count gradients of shards of `batch`, summed by `blocks`; update once all are there.

        Args:
            version: after how many updates the values were with which these gradients were computed.
            oldest: nobody needs the values after fewer updates.
            used: for every parameter of the model whether any of these shards gave it a gradient.
            weights: the weight of each of `sums`, of shape (1,): the update uses the sum of all gradients divided by
                the sum of all weights. Empty: the sum itself.

        Returns:
            Whether all of these shards are counted now.
        """
        with self._lock:
            self._snapshots = {number: kept for number, kept in self._snapshots.items() if number >= oldest}
            if batch < self._version:
                return True
            of_batch = self._sums.setdefault(batch, ShardSum(self._num_shards(batch)))
            arrived = of_batch.add(blocks, sums)
            if weights:
                self._weights.setdefault(batch, ShardSum(self._num_shards(batch))).add(blocks, weights)
            self._used[batch] = self._used.get(batch, used) | used
            self._lateness[batch] = batch - version
            while self._version in self._sums and self._sums[self._version].is_complete:
                weight = self._weights.pop(self._version, None)
                total = None if weight is None else weight.total()
                self._update(self._sums.pop(self._version).total(), self._used.pop(self._version), total)
            return arrived

    def _update(self, gradient: Tensor, used: Tensor, weight: Tensor | None) -> None:
        if weight is not None:
            gradient = gradient.mul_(weight.reciprocal())
            used = used & (weight > 0)  # a batch in which nothing counts makes no update
        gradients = gradient.split([parameter.numel() for parameter in self._parameters])
        for held, parameter, part in zip(self._ranges, self._parameters, gradients, strict=True):
            # None as in plain torch where nobody used it: an optimizer would decay even what has gradient zero.
            parameter.grad = part if used[held.parameter] else None
        lateness = self._lateness.pop(self._version)
        for group, base in zip(self._optimizer.param_groups, self._base_groups, strict=True):
            group["lr"] = float(base["lr"]) * self._lr_factor(self._version)
            if base.get("momentum"):
                group["momentum"] = late_momentum(base["momentum"], lateness)
        self._optimizer.step()
        self._version += 1
        self._snapshots = self._snapshots | {self._version: self._values.clone()}

    def state(self) -> list[tuple[ParameterRange, dict[str, Any]]]:
        """The optimizer's state of every held."""
        with self._lock:
            state = self._optimizer.state
            return [
                (held, copy.deepcopy(state.get(parameter, {})))
                for held, parameter in zip(self._ranges, self._parameters, strict=True)
            ]


def _optimizer_of(whole: Optimizer, ranges: Sequence[ParameterRange], parameters: Sequence[nn.Parameter]) -> Optimizer:
    """An optimizer like `whole`, state included, over pieces of its parameters."""
    optimizer = copy.copy(whole)
    optimizer.state = defaultdict(dict)
    optimizer.param_groups = []
    first = 0
    for group in whole.param_groups:
        mine = []
        for held, parameter in zip(ranges, parameters, strict=True):
            if first <= held.parameter < first + len(group["params"]):
                mine.append(parameter)
                original = group["params"][held.parameter - first]
                state = whole.state.get(original, {})
                if state:
                    optimizer.state[parameter] = {
                        name: value.detach().reshape(-1)[held.start : held.stop].cpu().clone()
                        if is_element_wise(name, value, original)
                        else copy.deepcopy(value)
                        for name, value in state.items()
                    }
        first += len(group["params"])
        optimizer.param_groups.append({name: value for name, value in group.items() if name != "param_names"})
        optimizer.param_groups[-1]["params"] = mine
    return optimizer


def is_element_wise(name: str, value: Any, parameter: Tensor) -> bool:
    """Whether a value in an optimizer's state has one element for each of the parameter."""
    return isinstance(value, Tensor) and value.shape == parameter.shape and name != "step"
