"""Metrics that are no means over samples (F1, perplexity, BLEU): states of chunks that are merged, then computed from.

A metric is one of torchmetrics, or three functions (update, merge, compute):

    update(*values) -> state     of one chunk, from what `measure` returned under the metric's name
    merge(state, state) -> state of both; associative
    compute(state) -> number     or a dict of numbers

The states of chunks are merged in one fixed tree over the chunks, so the result is the same, to the last bit, on any
number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.containers import to_device
from paceline.errors import ModelError
from paceline.object_collectives import broadcast_object, gather_objects
from paceline.train.process.process_group import World

Merge = Callable[[Any, Any], Any]
_HOST = torch.device("cpu")


@dataclass(frozen=True)
class MetricFunctions:
    """How a metric is computed from chunks."""

    update: Callable[..., Any]
    merge: Merge
    compute: Callable[[Any], Any]


class MetricStates:
    """The states of several metrics, by name, over the chunks that this worker counts."""

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        """Raises `ModelError` for what is no metric."""
        self._functions = {name: metric_functions(name, metric) for name, metric in metrics.items()}
        self._trees: dict[str, dict[int, MergeTree]] = {name: {} for name in metrics}
        """For each metric a tree for each substream."""

    def add(self, place: tuple[int, int], values: Mapping[str, Any]) -> None:
        """Count a chunk, from what was measured of it. Raises `ModelError` if a metric has nothing there."""
        substream, index = place
        for name, functions in self._functions.items():
            if name not in values:
                raise ModelError(f"measure returned nothing for the metric '{name}', but only {sorted(values)}.")
            given = values[name] if isinstance(values[name], Sequence) else (values[name],)
            tree = self._trees[name].setdefault(substream, MergeTree(functions.merge))
            tree.push(index, 1, functions.update(*given))

    def computed(self, world: World) -> dict[str, float]:
        """The value of every metric, on every worker; a collective. Rank 0 merges and computes."""
        results: dict[str, float] = {}
        problem: Exception | None = None
        for name, functions in self._functions.items():
            # A worker's own states are where it computes, those of the others in host memory.
            own = {substream: to_device(tree.blocks, _HOST) for substream, tree in self._trees[name].items()}
            of_workers = gather_objects(own, world.group)
            if of_workers is None or problem is not None:
                continue
            try:
                whole = _whole(functions.merge, of_workers)
                results |= _named_numbers(name, functions.compute(whole))
            except Exception as error:
                problem = error
        answer: dict[str, float] | None = broadcast_object(None if problem is not None else results, world.group)
        if problem is not None:
            raise problem
        if answer is None:
            raise ModelError("A metric could not be computed on worker 0, which says why.")
        return answer


class MergeTree:
    """Merges the states of neighbouring chunks as they come, in a tree over the chunks that no worker changes.

    As `comm.fixed_tree` adds: blocks of 2^j chunks that begin at a multiple of their length.
    """

    def __init__(self, merge: Merge) -> None:
        self._merge = merge
        self.blocks: list[tuple[int, int, Any]] = []
        """First chunk, number of chunks, and their merged state, to be pushed into the tree of all workers."""

    def push(self, start: int, size: int, state: Any) -> None:
        """Take the states of chunks that follow those before, merged."""
        while self.blocks and self.blocks[-1][1] == size and self.blocks[-1][0] % (2 * size) == 0:
            before, _, first = self.blocks.pop()
            start, size, state = before, 2 * size, self._merge(first, state)
        self.blocks.append((start, size, state))

    def root(self) -> Any:
        """The state of all chunks."""
        *rest, (_, _, state) = self.blocks
        for _, _, first in reversed(rest):
            state = self._merge(first, state)
        return state


def _whole(merge: Merge, of_workers: Sequence[Mapping[int, Sequence[tuple[int, int, Any]]]]) -> Any:
    """The state of all chunks, from the blocks of every worker by substream."""
    whole = MergeTree(merge)
    for substream in sorted({one for blocks in of_workers for one in blocks}):
        tree = MergeTree(merge)
        for blocks in of_workers:
            for start, size, state in blocks.get(substream, ()):
                tree.push(start, size, state)
        whole.push(substream, 1, tree.root())
    return whole.root()


def _named_numbers(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        return {f"{name}_{key}": number for key, one in value.items() for number in _named_numbers(name, one).values()}
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ModelError(
            f"The metric '{name}' computes {value.numel()} numbers; it should be one number, or a dict of them by name."
        )
    return {name: float(value)}


def metric_functions(name: str, metric: Any) -> MetricFunctions:
    """The functions of a torchmetrics metric, or the three that were given.

    Raises:
        ModelError: it is neither.
    """
    if isinstance(metric, tuple) and len(metric) == 3 and all(map(callable, metric)):
        return MetricFunctions(*metric)
    if not all(hasattr(metric, needed) for needed in ("update", "compute", "reset", "metric_state", "named_modules")):
        raise ModelError(
            f"The metric '{name}' is a {type(metric).__name__}; give a torchmetrics metric or three functions (update, "
            "merge, compute)."
        )
    return _of_torchmetrics(name, metric)


def _of_torchmetrics(name: str, metric: Any) -> MetricFunctions:
    """A state is, for each metric that this one consists of (a sum of two has three), by its path, (number of updates,
    values by name), in host memory."""
    parts = {path: part for path, part in metric.named_modules() if hasattr(part, "metric_state")}

    def update(*values: Any) -> Any:
        metric.to(next((value.device for value in values if isinstance(value, Tensor)), _HOST))
        metric.reset()
        metric.update(*values)
        return {path: [part.update_count, _on_host(part.metric_state)] for path, part in parts.items()}

    def merge(first: Any, second: Any) -> Any:
        merged = {}
        for path, part in parts.items():
            (num_first, one), (num_second, other) = first[path], second[path]
            fraction = num_first / max(1, num_first + num_second)  # what only consists of others may count no updates
            rules = {state: getattr(rule, "__name__", None) for state, rule in part._reductions.items()}
            values = {state: _merged(name, rules[state], mine, other[state], fraction) for state, mine in one.items()}
            merged[path] = [num_first + num_second, values]
        return merged

    def compute(state: Any) -> Any:
        metric.to(_HOST)
        metric.reset()
        syncs = {path: part.distributed_available_fn for path, part in parts.items()}
        try:
            for path, part in parts.items():
                part.distributed_available_fn = lambda: False  # the other workers have given all they know
                part._update_count, values = state[path]
                for one, value in values.items():
                    setattr(part, one, value)
            return metric.compute()
        finally:
            for path, part in parts.items():
                part.distributed_available_fn = syncs[path]
            metric.reset()

    return MetricFunctions(update, merge, compute)


def _merged(name: str, rule: str | None, first: Any, second: Any, fraction: float) -> Any:
    """Two values of a state of torchmetrics, of which the first counts for `fraction`, by the state's own rule."""
    if isinstance(first, list) and rule in ("dim_zero_cat", None):
        return first + second
    if rule == "dim_zero_cat":
        return torch.cat([first.reshape(-1, *first.shape[1:]), second.reshape(-1, *second.shape[1:])])
    if rule == "dim_zero_sum":
        return first + second
    if rule == "dim_zero_mean":
        return first * fraction + second * (1 - fraction)
    if rule in ("dim_zero_max", "dim_zero_min"):
        return (torch.maximum if rule == "dim_zero_max" else torch.minimum)(first, second)
    raise ModelError(
        f"The metric '{name}' has a state with the rule {rule}, which cannot be merged part by part; give three "
        "functions (update, merge, compute)."
    )


def _on_host(value: Any) -> Any:
    if isinstance(value, list):
        return [_on_host(one) for one in value]
    if isinstance(value, dict):
        return {key: _on_host(one) for key, one in value.items()}
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
