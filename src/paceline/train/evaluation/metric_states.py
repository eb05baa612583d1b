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


@dataclass(frozen=True)
class MetricFunctions:
    """How a metric is computed from chunks."""

    update: Callable[..., Any]
    merge: Merge
    compute: Callable[[Any], Any]


def metric_functions(name: str, metric: Any) -> MetricFunctions:
    """The functions of a torchmetrics metric, or the three that were given.

    Raises:
        ModelError: it is neither, or its states cannot be merged.
    """
    if isinstance(metric, tuple) and len(metric) == 3 and all(map(callable, metric)):
        return MetricFunctions(*metric)
    if not all(hasattr(metric, needed) for needed in ("update", "compute", "reset", "_reductions", "_defaults")):
        raise ModelError(
            f"The metric '{name}' is a {type(metric).__name__}; give a torchmetrics metric or three functions (update, "
            "merge, compute)."
        )
    return _of_torchmetrics(name, metric)


def _of_torchmetrics(name: str, metric: Any) -> MetricFunctions:
    """A state is, for each metric that this one consists of (a sum of two has three), by its path, (number of updates,
    values by name), in host memory."""
    parts = {path: part for path, part in metric.named_modules() if hasattr(part, "_defaults")}

    def update(*values: Any) -> Any:
        metric.to(next((value.device for value in values if isinstance(value, Tensor)), torch.device("cpu")))
        metric.reset()
        metric.update(*values)
        return {
            path: [part._update_count, {state: _on_host(getattr(part, state)) for state in part._defaults}]
            for path, part in parts.items()
        }

    def merge(first: Any, second: Any) -> Any:
        merged = {}
        for path, part in parts.items():
            (num_first, one), (num_second, other) = first[path], second[path]
            share = num_first / max(1, num_first + num_second)  # what only consists of others may count no updates
            values = {}
            for state, mine in one.items():
                rule = getattr(part._reductions[state], "__name__", None)
                values[state] = _merged(name, rule, mine, other[state], share)
            merged[path] = [num_first + num_second, values]
        return merged

    def compute(state: Any) -> Any:
        metric.to("cpu")
        metric.reset()
        syncs = {path: part._to_sync for path, part in parts.items()}
        try:
            for path, part in parts.items():
                part._to_sync = False  # the other workers have given all they know
                part._update_count, values = state[path]
                for one, value in values.items():
                    setattr(part, one, value)
            return metric.compute()
        finally:
            for path, part in parts.items():
                part._to_sync = syncs[path]
            metric.reset()

    return MetricFunctions(update, merge, compute)


def _merged(name: str, rule: str | None, first: Any, second: Any, part: float) -> Any:
    """Two values of a state of torchmetrics, of which the first counts for `part`, by the state's own rule."""
    if isinstance(first, list) and rule in ("dim_zero_cat", None):
        return first + second
    if rule == "dim_zero_cat":
        return torch.cat([first.reshape(-1, *first.shape[1:]), second.reshape(-1, *second.shape[1:])])
    if rule == "dim_zero_sum":
        return first + second
    if rule == "dim_zero_mean":
        return first * part + second * (1 - part)
    if rule == "dim_zero_max":
        return torch.maximum(first, second)
    if rule == "dim_zero_min":
        return torch.minimum(first, second)
    raise ModelError(
        f"The metric '{name}' has a state with the rule {rule}, which cannot be merged part by part; give three "
        "functions (update, merge, compute)."
    )


def _on_host(value: Any) -> Any:
    if isinstance(value, list):
        return [_on_host(one) for one in value]
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


class MergeTree:
    """Merges the states of neighbouring chunks as they come, in a tree over the chunks that no worker changes.

    As `comm.fixed_tree` adds: blocks of 2^j chunks that begin at a multiple of their length.
    """

    def __init__(self, merge: Merge) -> None:
        self._merge = merge
        self._blocks: list[tuple[int, int, Any]] = []

    def push(self, start: int, size: int, state: Any) -> None:
        """Take the states of chunks that follow those before, merged."""
        while self._blocks and self._blocks[-1][1] == size and self._blocks[-1][0] % (2 * size) == 0:
            before, _, first = self._blocks.pop()
            start, size, state = before, 2 * size, self._merge(first, state)
        self._blocks.append((start, size, state))

    def parts(self) -> list[tuple[int, int, Any]]:
        """First chunk, number of chunks, and their merged state, to be pushed into the tree of all workers."""
        return self._blocks

    def root(self) -> Any:
        """The state of all chunks."""
        *rest, (_, _, state) = self._blocks
        for _, _, first in reversed(rest):
            state = self._merge(first, state)
        return state


def compute_metrics(
    metrics: Mapping[str, MetricFunctions], trees: Mapping[str, MergeTree], world: World
) -> dict[str, float]:
    """The value of every metric, on every worker; a collective.

    Args:
        trees: of this worker's chunks.
    """
    results: dict[str, float] = {}
    problem: Exception | None = None
    for name, functions in metrics.items():
        # A worker's own states are where it computes, those of the others in host memory.
        of_workers = gather_objects(to_device(trees[name].parts(), torch.device("cpu")), world.group)
        if of_workers is None or problem is not None:
            continue
        try:
            whole = MergeTree(functions.merge)
            for blocks in of_workers:
                for start, size, state in blocks:
                    whole.push(start, size, state)
            results |= _named_numbers(name, functions.compute(whole.root()))
        except Exception as error:
            problem = error
    answer: dict[str, float] | None = broadcast_object(None if problem is not None else results, world.group)
    if problem is not None:
        raise problem
    if answer is None:
        raise ModelError("A metric could not be computed on worker 0, which says why.")
    return answer


def _named_numbers(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        return {f"{name}_{key}": number for key, one in value.items() for number in _named_numbers(name, one).values()}
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ModelError(
            f"The metric '{name}' computes {value.numel()} numbers; it should be one number, or a dict of them by name."
        )
    return {name: float(value)}


def update_trees(
    metrics: Mapping[str, MetricFunctions], trees: Mapping[str, MergeTree], number: int, values: Mapping[str, Any]
) -> None:
    """Count chunk `number` in every metric, from what `measure` returned for it. Raises `ModelError` if it returned
    nothing for a metric."""
    for name, functions in metrics.items():
        if name not in values:
            raise ModelError(f"measure returned nothing for the metric '{name}', but only {sorted(values)}.")
        given = values[name]
        trees[name].push(number, 1, functions.update(*(given if isinstance(given, Sequence) else (given,))))
