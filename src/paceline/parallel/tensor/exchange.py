"""Collectives of the tensor axis as differentiable functions: one in forward, another one for the gradient.

Shoeybi et al. 2019, "Megatron-LM", section 3: where workers begin to compute with their slices of a layer, its whole
input is left as it is and the input's gradients, of which each worker has one term, are summed in backward (their f);
behind it the outputs are summed in forward and the gradient, which is whole on every worker, is left as it is (their
g), or the outputs are gathered and every worker takes its own slice of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from paceline.parallel.memory_order import memory_order
from paceline.parallel.tensor.slices import slice_of, slice_size

Exchange = Callable[[Tensor], Tensor]


def local_slice(parameter: Tensor) -> Tensor:
    """The slice of a parameter that this worker computes with, in the slice's shape, differentiable."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def sum_gradient(whole: Tensor, axis: DeviceMesh) -> Tensor:
    """The tensor as it is; its gradient is summed over workers, which each compute a slice of a layer."""
    if not (whole.requires_grad and torch.is_grad_enabled()):
        return whole
    return exchange(whole, lambda tensor: tensor.view_as(tensor), partial(_all_reduce, axis=axis))


def all_reduce(term: Tensor, bias: Tensor | None, axis: DeviceMesh) -> Tensor:
    """The sum of every worker's term, in the shape of `term`, plus the bias, whole on all of them."""
    summed = exchange(term, partial(_all_reduce, axis=axis), as_it_is)
    return summed if bias is None else summed + bias


def all_gather(own: Tensor, dim: int, length: int, axis: DeviceMesh) -> Tensor:
    """All workers' slices side by side along `dim`, `length` in all; each takes its slice of the gradient."""
    dim %= own.dim()
    return exchange(own, partial(_all_gather, dim=dim, length=length, axis=axis), partial(_take, dim=dim, axis=axis))


def all_gather_to_divide(own: Tensor, dim: int, length: int, axis: DeviceMesh) -> Tensor:
    """All workers' slices side by side along `dim`, `length` in all, for workers that each compute a slice of a layer.

    The shape of `own` but for `dim`. Backward is a reduce-scatter: gradients are summed and each takes its slice.
    """
    dim %= own.dim()
    gather = partial(_all_gather, dim=dim, length=length, axis=axis)
    return exchange(own, gather, partial(_reduce_scatter, dim=dim, axis=axis))


def take_slice(whole: Tensor, dim: int, axis: DeviceMesh) -> Tensor:
    """This worker's slice along `dim`, the only one that it uses; the slices' gradients are gathered."""
    dim %= whole.dim()
    gather = partial(_all_gather, dim=dim, length=whole.shape[dim], axis=axis)
    return exchange(whole, partial(_take, dim=dim, axis=axis), gather)


def reduce_scatter(term: Tensor, bias: Tensor | None, dim: int, axis: DeviceMesh) -> Tensor:
    """This worker's slice along `dim` of the sum of every worker's term, plus the bias; the gradient is gathered.

    `bias` is whole and runs along the last dimension; so is its gradient, because the term's is gathered anyway.
    """
    own: Tensor = _ReduceScatter.apply(term, bias, dim % term.dim(), axis)  # type: ignore[no-untyped-call]
    return own


def sum_gradients(parameters: Sequence[Tensor], axis: DeviceMesh) -> tuple[Tensor, ...]:
    """Parameters that this worker applies to its own positions; their gradients are summed over workers, at once."""
    if not (torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters)):
        return tuple(parameters)
    flat = sum_gradient(torch.cat([parameter.reshape(-1) for parameter in parameters]), axis)
    parts = flat.split([parameter.numel() for parameter in parameters])
    return tuple(part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True))


def redistribute_rows(own: Tensor, num_blocks: int, axis: DeviceMesh) -> Tensor:
    """An all-to-all from this worker's rows of a matrix to its slice of each of the matrix's `num_blocks` equal blocks.

    The matrix of (all rows, ...) is, say, query, key and value above each other: a worker holds neighbouring rows of it
    and needs its heads' rows of all three. Rows and blocks divide by the degree.
    """
    return exchange(
        own,
        partial(_redistribute, num_blocks=num_blocks, axis=axis, back=False),
        partial(_redistribute, num_blocks=num_blocks, axis=axis, back=True),
    )


def rows_to_send(num_rows: int, num_blocks: int, degree: int) -> list[list[int]]:
    """How many rows each worker (outer list) holds of those that each worker needs, itself included."""
    workers = range(degree)
    return [[sum(b - a for a, b in _runs(num_rows, num_blocks, degree, h, u)) for u in workers] for h in workers]


def _runs(num_rows: int, num_blocks: int, degree: int, holder: int, user: int) -> list[tuple[int, int]]:
    """The rows start … stop - 1 that lie with `holder` and are for `user`, in order."""
    first, last = slice_of(num_rows, degree, holder)
    wanted = block_runs(num_rows, num_blocks, degree, user)
    common = [(max(first, start), min(last, stop)) for start, stop in wanted]
    return [(start, stop) for start, stop in common if start < stop]


def block_runs(num_rows: int, num_blocks: int, degree: int, rank: int) -> list[tuple[int, int]]:
    """The rows start … stop - 1 of `rank`'s slice of every block, in order."""
    block = num_rows // num_blocks
    start, stop = slice_of(block, degree, rank)
    return [(first + start, first + stop) for first in range(0, num_rows, block)]


def _all_reduce(term: Tensor, axis: DeviceMesh) -> Tensor:
    order, back = memory_order(term)
    summed = term.permute(order).clone(memory_format=torch.contiguous_format)
    dist.all_reduce(summed, group=axis.get_group())
    return _restore_order(summed, back)


def _filled(tensor: Tensor, dim: int, length: int) -> Tensor:
    """The tensor padded with zeros to `length` along `dim`: collectives want slices of equal length."""
    missing = length - tensor.shape[dim]
    return F.pad(tensor, (*(0, 0) * (tensor.dim() - 1 - dim), 0, missing)) if missing else tensor


def _all_gather(own: Tensor, dim: int, length: int, axis: DeviceMesh) -> Tensor:
    order, back = memory_order(own)
    own, dim = own.permute(order), order.index(dim)
    own = _filled(own, dim, slice_size(length, axis.size())).contiguous()
    parts = own.new_empty(axis.size(), *own.shape)
    dist.all_gather(list(parts.unbind()), own, group=axis.get_group())
    return _restore_order(torch.cat(parts.unbind(), dim), back, dim, length)


def _reduce_scatter(term: Tensor, dim: int, axis: DeviceMesh) -> Tensor:
    order, back = memory_order(term)
    term, dim = term.permute(order), order.index(dim)
    length, size = term.shape[dim], slice_size(term.shape[dim], axis.size())
    parts = torch.stack(_filled(term, dim, size * axis.size()).split(size, dim))
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, list(parts.unbind()), group=axis.get_group())
    start, stop = slice_of(length, axis.size(), axis.get_local_rank())
    return _restore_order(own, back, dim, stop - start)


def _take(whole: Tensor, dim: int, axis: DeviceMesh) -> Tensor:
    start, stop = slice_of(whole.shape[dim], axis.size(), axis.get_local_rank())
    own = whole.narrow(dim, start, stop - start)
    order, back = memory_order(whole)
    return _restore_order(own.permute(order), back)


def _restore_order(ordered: Tensor, back: list[int], dim: int = 0, length: int | None = None) -> Tensor:
    """`ordered.permute(back)`, in memory in the order of `ordered`; a copy rather than a view.

    A model may change what a layer returns in place (`x += 1`, `nn.ReLU(inplace=True)`), and autograd does not allow
    that for a view that was made inside of a `torch.autograd.Function`.

    Args:
        length: how much of `ordered` to take along `dim`; None: all.
    """
    if length is not None and length != ordered.shape[dim]:
        ordered = ordered.narrow(dim, 0, length)
    found = ordered.contiguous()
    if back != sorted(back):
        found = found.permute(back)
    return found.clone() if found._is_view() else found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Exchange, backward: Exchange) -> Tensor:
        ctx.exchange = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange(grad), None, None


def exchange(tensor: Tensor, forward: Exchange, backward: Exchange) -> Tensor:
    """`forward(tensor)`, whose gradient is `backward` of the gradient."""
    exchanged: Tensor = _Exchange.apply(tensor, forward, backward)  # type: ignore[no-untyped-call]
    return exchanged


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, term: Tensor, bias: Tensor | None, dim: int, axis: DeviceMesh) -> Tensor:
        ctx.dim, ctx.axis, ctx.length = dim, axis, term.shape[dim]
        own = _reduce_scatter(term, dim, axis)
        return own if bias is None else own + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        whole = _all_gather(grad, ctx.dim, ctx.length, ctx.axis)
        bias_grad = whole.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return whole, bias_grad, None, None


def _redistribute(own: Tensor, num_blocks: int, axis: DeviceMesh, *, back: bool) -> Tensor:
    """Rows from their holders to their users, or `back`.

    The users need not sort: rows arrive in the order of their holders, which is the order of the rows.
    """
    degree, rank = axis.size(), axis.get_local_rank()
    num_rows = own.shape[0] * degree
    counts = rows_to_send(num_rows, num_blocks, degree)
    for_users, from_holders = counts[rank], [counts[holder][rank] for holder in range(degree)]
    held = slice_of(num_rows, degree, rank)[0]
    runs = [
        slice(start - held, stop - held)
        for user in range(degree)
        for start, stop in _runs(num_rows, num_blocks, degree, rank, user)
    ]
    if not back:
        outgoing = torch.cat([own[run] for run in runs])
        arrived = torch.empty_like(outgoing)
        dist.all_to_all_single(arrived, outgoing, from_holders, for_users, group=axis.get_group())
        return arrived
    arrived = torch.empty_like(own, memory_format=torch.contiguous_format)
    dist.all_to_all_single(arrived, own.contiguous(), for_users, from_holders, group=axis.get_group())
    sorted_rows = torch.empty_like(arrived)
    for run, rows in zip(runs, arrived.split([run.stop - run.start for run in runs]), strict=True):
        sorted_rows[run] = rows
    return sorted_rows
