"""What a loss function returns, as numbers that shards and workers can add.

The loss of a step is

    L = sum over s of w_s l_s / sum over s of w_s

over the virtual shards s of the global batch, and the gradient is that of L. A plain loss is a mean over samples: w_s
is the number of samples in a shard, and the sum of all w_s is known before the step begins. The total weight of a
`Mean` (its valid tokens, say) is known at the end of the step only. So every shard contributes w_s l_s / N and w_s / N
with N the samples of the global batch, and the summed gradient is multiplied once by N / sum of w_s, on the device.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import ModelError
from paceline.object_collectives import all_gather_objects
from paceline.tensors import tensors

LossOf = Callable[[nn.Module, Any], Any]
"""The loss of a batch, as `StepInput` has it."""


@dataclass(frozen=True)
class Mean:
    """A mean with its weight: what a loss function or a metric returns if it is not a mean over its samples.

    `paceline.Mean(loss, weight=num_tokens)` is the mean loss over `num_tokens` valid tokens. Means of different samples
    are combined as sum(weight * value) / sum(weight), so that the result is the mean over all tokens.
    """

    value: Tensor | float
    """The mean, one number."""
    weight: Tensor | float
    """The number of units that it is the mean of, or their total weight; 0: `value` does not count."""


Value = Tensor | float | Mean
"""A further number from a loss function: a mean over its samples, or over its own weight."""

Loss = Tensor | Mean | tuple[Tensor | Mean, Mapping[str, Value]]
"""What a loss function returns: the mean over the samples it was given, or a `Mean`; and further numbers by name."""


@dataclass(frozen=True)
class LossLayout:
    """Which numbers a loss function returns; the same for all virtual shards."""

    is_weighted: bool = False
    """Whether the loss is a `Mean`."""
    values: tuple[tuple[str, bool], ...] = ()
    """The further values by name, and whether each is a `Mean`."""

    @property
    def length(self) -> int:
        """How many sums describe a step."""
        return 1 + self.is_weighted + sum(1 + is_weighted for _, is_weighted in self.values)

    def describe(self) -> str:
        """The form in words, for errors."""
        names = ", ".join(f"'{name}'{' (a Mean)' if is_weighted else ''}" for name, is_weighted in self.values)
        return f"a {'paceline.Mean' if self.is_weighted else 'plain loss'} and {names or 'no further values'}"


@dataclass(frozen=True)
class ShardLoss:
    """The loss of a virtual shard."""

    layout: LossLayout
    mean: Tensor
    """Can be differentiated."""
    weight: float | Tensor
    """The weight of the shard in the sum over the global batch."""
    weighted: Tensor
    """The loss times its weight, a scalar: the sum of this over all shards is differentiated."""
    sums: Tensor
    """`layout.length` numbers to be added over all shards: each value times its weight, each `Mean`'s followed by the
    weight."""


class LossLayouts:
    """Which numbers each loss function of a run returns; by the name of the function."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """`group`: the workers that train together; None: this one alone."""
        self._group = group
        self._own: dict[str, LossLayout] = {}
        self._agreed: dict[str, LossLayout] = {}

    def has_returned(self, name: str, layout: LossLayout) -> None:
        """Note what a loss function returned on this worker. Raises `ModelError` where it returned other numbers
        before."""
        before = self._own.setdefault(name, layout)
        if before != layout:
            raise _differ(before, layout)

    def of(self, name: str) -> LossLayout:
        """The layout of a loss function that has been called on this or another worker; a collective in its first step.
        Raises `ModelError` where the workers' shards returned different numbers."""
        if name not in self._agreed:
            everyone = all_gather_objects(self._own.get(name), self._group, (LossLayout,))
            layouts = [one for one in everyone if one is not None]
            for one in layouts[1:]:
                if one != layouts[0]:
                    raise _differ(layouts[0], one)
            self._agreed[name] = layouts[0]
        return self._agreed[name]


def _differ(one: LossLayout, other: LossLayout) -> ModelError:
    return ModelError(
        f"The loss function returned {one.describe()} for some samples, and {other.describe()} for others; it should "
        "return the same names in every step, with weight 0 (paceline.Mean) where there is nothing to count."
    )


@dataclass(frozen=True)
class StepLoss:
    """The loss of a step and its further values, detached scalars, the same on every worker that trained on it."""

    loss: Tensor
    values: Mapping[str, Tensor] = field(default_factory=dict)
    rescale: Tensor | None = None
    """The factor from the sum of weighted shards to the gradient of `loss`; None: 1."""

    @classmethod
    def of(cls, sums: Tensor, layout: LossLayout) -> StepLoss:
        """The loss of a step from the sums over all shards of the global batch, [layout.length]."""
        loss, rescale, place = sums[0], None, 1
        if layout.is_weighted:
            loss, rescale, place = sums[0] / sums[1], sums[1].reciprocal(), 2
        values = {}
        for name, is_weighted in layout.values:
            values[name] = sums[place] / sums[place + 1] if is_weighted else sums[place]
            place += 1 + is_weighted
        return cls(loss, values, rescale)


def read_loss(returned: Any, fraction: float, num_in_batch: int, like: Tensor) -> ShardLoss:
    """The loss, a scalar with its weight, that a loss function returned for some samples of a global batch. Raises
    `ModelError` where it is no loss.

    Args:
        fraction: that these samples are of the global batch.
        num_in_batch: the samples of the global batch.
        like: a tensor of the dtype and on the device in which losses are added.
    """
    is_pair = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)
    loss, values = returned if is_pair else (returned, {})
    mean = loss.value if isinstance(loss, Mean) else loss
    if not isinstance(mean, Tensor) or mean.numel() != 1:
        raise ModelError(
            f"The loss function returned {_form(mean)}; it should return one number, the mean loss over its samples, "
            "or paceline.Mean(loss, weight=…), or a pair of that and a dict of further numbers."
        )
    if torch.is_grad_enabled() and not mean.requires_grad:
        raise ModelError("The loss does not depend on any trainable parameter of the prepared model.")
    mean = mean.view(()) if mean.dim() else mean
    if isinstance(loss, Mean):
        sums = _weighed(mean, loss.weight, "loss", num_in_batch, like)
        weight: float | Tensor = sums[1].view(())
        weighted = mean * weight
    else:
        weight, weighted = fraction, mean if fraction == 1 else mean * fraction
        sums = [weighted.detach().to(like.dtype).view(1)]
    kinds = []
    for name, value in sorted(values.items()):
        if is_weighted := isinstance(value, Mean):
            sums += _weighed(value.value, value.weight, name, num_in_batch, like)
        else:
            sums.append(_number(value, f"'{name}'", like) * fraction)
        kinds.append((str(name), is_weighted))
    layout = LossLayout(isinstance(loss, Mean), tuple(kinds))
    return ShardLoss(layout, mean, weight, weighted, sums[0] if len(sums) == 1 else torch.cat(sums))


def _weighed(value: Any, weight: Any, name: str, num_in_batch: int, like: Tensor) -> list[Tensor]:
    """[the value times its weight, the weight], of shape (1,) each; the mean over nothing, which is NaN, counts for
    nothing, and a weight that turns out to be negative is NaN."""
    if isinstance(weight, Tensor) and weight.requires_grad:
        raise ModelError(
            f"The weight of '{name}' requires a gradient; a weight only counts, so give paceline.Mean weight.detach()."
        )
    number = _number(weight, f"the weight of '{name}'", like)
    if isinstance(weight, Tensor) and weight.device.type != "cpu":  # to read it would make the CPU wait
        number = torch.where(number < 0, torch.nan, number)
    elif not 0 <= float(number) < math.inf:
        raise ModelError(
            f"The weight of '{name}' is {float(number):g}; it should be 0 or more, such as the number of tokens."
        )
    total = number / num_in_batch
    return [torch.where(total == 0, 0.0, _number(value, f"'{name}'", like) * total), total]


def _number(value: Any, what: str, like: Tensor) -> Tensor:
    """A value as a tensor of shape (1,), detached."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().to(like.device, like.dtype, non_blocking=True).view(1)
    if isinstance(value, numbers.Real):
        return like.new_tensor([float(value)])
    raise ModelError(f"The loss function returned {_form(value)} as {what}; it should be one number.")


def _form(value: Any) -> str:
    """A value's form in words, for errors."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def block_gradients_unless(is_counted: Tensor | bool, outputs: Sequence[Any]) -> None:
    """Let nothing flow back through a model's outputs if the loss counts for nothing: 0 times the gradient of a mean
    over nothing would be NaN.

    Args:
        is_counted: whether the loss has a weight, a scalar.
        outputs: what the model returned, be it plain objects with tensors as attributes.
    """
    counts = torch.as_tensor(is_counted)  # a scalar of the host may stand beside tensors of any device
    for output in outputs:
        for tensor in tensors(output, in_objects=True):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: torch.where(counts, gradient, 0.0))
