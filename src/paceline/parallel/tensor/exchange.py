"""What workers of the tensor axis tell each other: pairs of a forward and a backward act, none of which divides.

Shoeybi et al. 2019, "Megatron-LM", section 3: where a layer's parts begin, its whole input is left as it is and the
input's gradients, of which each worker has one part's, are summed in backward (their f); where parts end, the outputs
are summed in forward and the gradient, which is whole on every worker, is left as it is (their g), or the outputs are
laid side by side and every worker takes its own slice of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from paceline.parallel.tensor.axis import Axis, part, part_size


def enter(whole: Tensor, axis: Axis) -> Tensor:
    """The whole tensor, of which this worker goes on to compute a part of something; its gradient is summed."""
    if not (whole.requires_grad and torch.is_grad_enabled()):
        return whole
    entered: Tensor = _Enter.apply(whole, axis)  # type: ignore[no-untyped-call]
    return entered


def total(term: Tensor, axis: Axis) -> Tensor:
    """The sum of every worker's term, whole on all of them."""
    summed: Tensor = _Total.apply(term, axis)  # type: ignore[no-untyped-call]
    return summed


def gather(own: Tensor, dim: int, length: int, axis: Axis) -> Tensor:
    """All workers' parts side by side along `dim`, `length` in all."""
    gathered: Tensor = _Gather.apply(own, dim % own.dim(), length, axis, _own_slice)  # type: ignore[no-untyped-call]
    return gathered


def sum_gradients(parameters: Sequence[Tensor], axis: Axis) -> tuple[Tensor, ...]:
    """Parameters with which this worker goes on to treat its part of the positions; their gradients are summed."""
    if not (torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters)):
        return tuple(parameters)
    summed: tuple[Tensor, ...] = _SumGradients.apply(axis, *parameters)  # type: ignore[no-untyped-call]
    return summed


def enter_from_parts(own: Tensor, dim: int, length: int, axis: Axis) -> Tensor:
    """All workers' parts side by side along `dim`, of which this worker goes on to compute a part of something.

    The gradients of the whole, of which each worker has one part's, are summed, and every worker gets its slice.
    """
    entered: Tensor = _Gather.apply(own, dim % own.dim(), length, axis, _reduce_scatter)  # type: ignore[no-untyped-call]
    return entered


def total_in_parts(term: Tensor, bias: Tensor | None, dim: int, axis: Axis) -> Tensor:
    """This worker's slice along `dim` of the sum of every worker's term, plus the bias; the gradient is gathered.

    `bias` is whole and runs along the last dimension; so is its gradient, because the term's is gathered anyway.
    """
    own: Tensor = _TotalInParts.apply(term, bias, dim % term.dim(), axis)  # type: ignore[no-untyped-call]
    return own


def take_own(whole: Tensor, dim: int, axis: Axis) -> Tensor:
    """This worker's slice along `dim`, the only one that it uses; the slices' gradients are gathered."""
    own: Tensor = _TakeOwn.apply(whole, dim % whole.dim(), axis)  # type: ignore[no-untyped-call]
    return own


def trade_rows(own: Tensor, num_blocks: int, axis: Axis) -> Tensor:
    """From this worker's rows of a matrix to its part of each of the matrix's `num_blocks` equal blocks.

    The matrix of (all rows, ...) is query, key and value above each other, and a worker that holds neighbouring rows
    of it needs its heads' rows of all three. Rows and blocks divide by the degree.
    """
    traded: Tensor = _TradeRows.apply(own, num_blocks, axis)  # type: ignore[no-untyped-call]
    return traded


def rows_to_trade(num_rows: int, num_blocks: int, degree: int) -> list[list[int]]:
    """How many rows each worker (outer list) has of what each one needs, itself included."""
    workers = range(degree)
    return [[sum(b - a for a, b in _runs(num_rows, num_blocks, degree, h, u)) for u in workers] for h in workers]


def _runs(num_rows: int, num_blocks: int, degree: int, holder: int, user: int) -> list[tuple[int, int]]:
    """The rows start … stop - 1 that lie with `holder` and are for `user`, in order."""
    first, last = part(num_rows, degree, holder)
    wanted = block_runs(num_rows, num_blocks, degree, user)
    common = [(max(first, start), min(last, stop)) for start, stop in wanted]
    return [(start, stop) for start, stop in common if start < stop]


def block_runs(num_rows: int, num_blocks: int, degree: int, rank: int) -> list[tuple[int, int]]:
    """The rows start … stop - 1 of `rank`'s part of every block, in order."""
    block = num_rows // num_blocks
    start, stop = part(block, degree, rank)
    return [(first + start, first + stop) for first in range(0, num_rows, block)]


def memory_order(tensor: Tensor) -> tuple[list[int], list[int]]:
    """The dimensions as they lie in memory, outermost first, and the way back; random numbers are drawn in that order.

    A dropout behind an exchange draws the numbers of one device only if its input lies as it would there.
    """
    order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
    if not tensor.permute(order).is_contiguous():  # a view with gaps, or stretched: whatever is made of it is new
        order = list(range(tensor.dim()))
    return order, sorted(range(len(order)), key=order.__getitem__)


def _all_reduce(term: Tensor, axis: Axis) -> Tensor:
    order, back = memory_order(term)
    summed = term.permute(order).clone(memory_format=torch.contiguous_format)
    dist.all_reduce(summed, group=axis.group)
    return summed.permute(back)


def _filled(tensor: Tensor, dim: int, length: int) -> Tensor:
    """As long as that along `dim`, with zeros behind: collectives want equal parts."""
    missing = length - tensor.shape[dim]
    return F.pad(tensor, (*(0, 0) * (tensor.dim() - 1 - dim), 0, missing)) if missing else tensor


def _all_gather(own: Tensor, dim: int, length: int, axis: Axis) -> Tensor:
    order, back = memory_order(own)
    own, dim = own.permute(order), order.index(dim)
    own = _filled(own, dim, part_size(length, axis.degree)).contiguous()
    parts = own.new_empty(axis.degree, *own.shape)
    dist.all_gather(list(parts.unbind()), own, group=axis.group)
    whole = torch.cat(parts.unbind(), dim).narrow(dim, 0, length)
    return whole.contiguous().permute(back)


def _reduce_scatter(term: Tensor, dim: int, axis: Axis) -> Tensor:
    order, back = memory_order(term)
    term, dim = term.permute(order), order.index(dim)
    length, size = term.shape[dim], part_size(term.shape[dim], axis.degree)
    parts = torch.stack(_filled(term, dim, size * axis.degree).split(size, dim))
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, list(parts.unbind()), group=axis.group)
    start, stop = part(length, axis.degree, axis.rank)
    return own.narrow(dim, 0, stop - start).contiguous().permute(back)


def _own_slice(whole: Tensor, dim: int, axis: Axis) -> Tensor:
    start, stop = part(whole.shape[dim], axis.degree, axis.rank)
    own = whole.narrow(dim, start, stop - start)
    order, back = memory_order(whole)
    return own.permute(order).contiguous().permute(back)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.axis), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, term: Tensor, axis: Axis) -> Tensor:
        return _all_reduce(term, axis)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    """`back` makes the part's gradient of the whole's: (gradient, dim, axis) -> this worker's slice."""

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, dim: int, length: int, axis: Axis, back: Callable[[Tensor, int, Axis], Tensor]
    ) -> Tensor:
        ctx.dim, ctx.axis, ctx.back = dim, axis, back
        return _all_gather(own, dim, length, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.back(grad, ctx.dim, ctx.axis), None, None, None, None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        trained = [grad for grad, needed in zip(grads, ctx.needs_input_grad[1:], strict=True) if needed]
        flat = _all_reduce(torch.cat([grad.reshape(-1) for grad in trained]), ctx.axis)
        parts = iter(flat.split([grad.numel() for grad in trained]))
        summed = (
            next(parts).view(grad.shape) if needed else None
            for grad, needed in zip(grads, ctx.needs_input_grad[1:], strict=True)
        )
        return None, *summed


class _TotalInParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, term: Tensor, bias: Tensor | None, dim: int, axis: Axis) -> Tensor:
        ctx.dim, ctx.axis, ctx.length = dim, axis, term.shape[dim]
        own = _reduce_scatter(term, dim, axis)
        return own if bias is None else own + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        whole = _all_gather(grad, ctx.dim, ctx.length, ctx.axis)
        bias_grad = whole.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return whole, bias_grad, None, None


class _TakeOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, axis: Axis) -> Tensor:
        ctx.dim, ctx.axis, ctx.length = dim, axis, whole.shape[dim]
        return _own_slice(whole, dim, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(grad, ctx.dim, ctx.length, ctx.axis), None, None


class _TradeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, num_blocks: int, axis: Axis) -> Tensor:
        ctx.num_blocks, ctx.axis = num_blocks, axis
        return _trade(own, num_blocks, axis, back=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _trade(grad, ctx.num_blocks, ctx.axis, back=True), None, None


def _trade(own: Tensor, num_blocks: int, axis: Axis, *, back: bool) -> Tensor:
    """Rows from their holders to their users, or `back`.

    The users need not sort: rows arrive in the order of their holders, which is the order of the rows.
    """
    degree, rank = axis.degree, axis.rank
    num_rows = own.shape[0] * degree
    counts = rows_to_trade(num_rows, num_blocks, degree)
    for_users, from_holders = counts[rank], [counts[holder][rank] for holder in range(degree)]
    held = part(num_rows, degree, rank)[0]
    runs = [
        slice(start - held, stop - held)
        for user in range(degree)
        for start, stop in _runs(num_rows, num_blocks, degree, rank, user)
    ]
    if not back:
        outgoing = torch.cat([own[run] for run in runs])
        arrived = torch.empty_like(outgoing)
        dist.all_to_all_single(arrived, outgoing, from_holders, for_users, group=axis.group)
        return arrived
    arrived = torch.empty_like(own, memory_format=torch.contiguous_format)
    dist.all_to_all_single(arrived, own.contiguous(), for_users, from_holders, group=axis.group)
    sorted_rows = torch.empty_like(arrived)
    for run, rows in zip(runs, arrived.split([run.stop - run.start for run in runs]), strict=True):
        sorted_rows[run] = rows
    return sorted_rows
