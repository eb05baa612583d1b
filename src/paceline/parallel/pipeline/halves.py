"""The two halves of a stage's backward pass: gradients of what it was given, which the stage before waits for, and
those of its parameters (Qi et al. 2023, "Zero Bubble Pipeline Parallelism")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining._backward import (
    construct_reverse_graph,
    get_param_groups,
    stage_backward_input,
    stage_backward_weight,
)
from torch.utils import _pytree as pytree

WeightParts = list[dict[str, Any]]
"""What the gradients of parameters still need after the first half: torch's groups of them, and the gradients of the
operations that they are part of."""


def can_split(outputs: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[nn.Parameter]) -> bool:
    """Whether each of these parameters acts at one place only on what leads from `inputs` to `outputs`.

    Where one acts at several, as a layer that is called twice or a bias that all attentions add, the second half would
    go through the operations between these places, and free what other parameters still need of them.
    """
    roots, leaves, acting = ([get_gradient_edge(one).node for one in given] for given in (outputs, inputs, weights))
    groups = get_param_groups(leaves, acting, construct_reverse_graph(roots))
    return all(len(group["intermediates"]) <= 1 for group in groups)


def first_half(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: list[Tensor], weights: list[nn.Parameter]
) -> WeightParts:
    """Leave the gradients of `inputs` in `.grad`.

    Args:
        gradients: those of `outputs`; None: 1, as for a loss.
    """
    if not outputs:
        return []
    edges = [get_gradient_edge(output) for output in outputs]
    # torch detaches the roots in place, which neither a view allows nor an operation that has saved its result.
    roots = [output.clone() for output in outputs]
    given = [torch.ones_like(one) if g is None else g for one, g in zip(roots, gradients, strict=True)]
    _, parts = stage_backward_input(roots, given, inputs, iter(weights))
    # Parameters that act on outputs by which no input is differentiated are in none of torch's groups.
    reached = {node for part in parts for node in part["params"]}
    others = [weight for weight in weights if get_gradient_edge(weight).node not in reached]
    if others:
        found = torch.autograd.grad(edges, others, given, retain_graph=True, allow_unused=True)
        for weight, gradient in zip(others, found, strict=True):
            if gradient is not None:
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
    return parts


def second_half(weights: list[nn.Parameter], parts: WeightParts) -> None:
    """Add the gradients of the parameters to `.grad`."""
    stage_backward_weight(iter(weights), parts)


def num_bytes(parts: WeightParts) -> int:
    """Bytes of the gradients that wait between the halves, each piece of memory once."""
    waiting = pytree.tree_leaves([part.get("grads") for part in parts])
    storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in waiting if isinstance(one, Tensor)}
    return sum(storage.nbytes() for storage in storages.values())
