"""torch's operators that draw random numbers, each as a tensor and the call that fills it.

torch itself makes most of them of an empty tensor and an operator that fills it in place, so numbers have the same bits
either way. The tensor can then be filled in parts, with a generator for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten


class UnknownOperatorError(Exception):
    """An operator draws random numbers in a way that is not known here."""


@dataclass(frozen=True)
class Fill:
    """Fills a tensor with random numbers."""

    call: Callable[[Tensor, Tensor | None, torch.Generator | None], Any]
    """call(values, probabilities, generator)"""
    limits: tuple[float, float] | None = None
    """The range of uniformly distributed numbers."""
    is_of_two: bool = False
    """Whether all numbers are 0 or 1."""
    probabilities: Tensor | None = None
    """The probability of 1 for each element, of the tensor's shape; None if all have the same."""

    def __call__(self, values: Tensor, generator: torch.Generator | None = None) -> None:
        """Fill `values`; without a generator from torch's own."""
        self.call(values, self.probabilities, generator)

    def rehearse(self, values: Tensor, generator: torch.Generator) -> None:
        """Fill `values` with numbers of the same kind that hardly ever are the same for two samples: half of a mask is
        zero, whatever its rate, and uniform numbers are near their limits, on either side of any threshold."""
        if self.is_of_two:
            values.bernoulli_(0.5, generator=generator)
        elif self.limits is not None:
            lowest, highest = self.limits
            margin = math.ldexp(highest - lowest, -6 if values.dtype.itemsize < 4 else -20)
            values.bernoulli_(0.5, generator=generator).mul_(highest - lowest - 2 * margin).add_(lowest + margin)
        else:
            self(values, generator)

    def repeat_one(self, values: Tensor, generator: torch.Generator) -> None:
        """Fill `values` with a single number of the same kind: 1 in a mask, the middle of uniform numbers."""
        if self.is_of_two:
            values.fill_(1)
        elif self.limits is not None:
            values.fill_(sum(self.limits) / 2)
        else:
            number = values.new_empty(1)
            self.call(number, None, generator)
            values.copy_(number.expand_as(values))


def draws_random_numbers(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operator draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    arguments = operator._schema.arguments
    given = {one.name: one.default_value for one in arguments}
    given |= {one.name: value for one, value in zip(arguments, args, strict=False)}
    # Attention is tagged as well, and draws only where it drops something.
    return (given | dict(kwargs)).get("dropout_p") != 0.0


class NotesDraws(TorchDispatchMode):
    """Notes whether what runs inside draws random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.has_drawn |= draws_random_numbers(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


Filled = Callable[[str, Tensor, Fill], None]
"""filled(operator, values, fill): fills a tensor for the operator of this name, as `fill` does."""


def call_filled_by(filled: Filled, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator that draws from torch's own generator, with its numbers from `filled`.

    Raises:
        UnknownOperatorError: before anything is drawn.
    """
    if operator is _aten.native_dropout.default:
        return _dropout(filled, *args)
    if operator in _NORMAL:
        return _normal(filled, *args)
    if operator in _IN_PLACE:
        values, fill = args[0], _IN_PLACE[operator](*args[1:])
    elif operator in _NEW:
        values, fill = _NEW[operator](*args, **{name: one for name, one in kwargs.items() if name != "generator"})
    else:
        raise UnknownOperatorError
    _check_can_be_filled(values)
    filled(str(operator), values, fill)
    return values


def _check_can_be_filled(values: Tensor) -> None:
    if values.is_complex() or values.layout != torch.strided:
        raise UnknownOperatorError


def _dropout(filled: Filled, input: Tensor, rate: float, train: bool | None = True) -> Any:
    """`native_dropout`, which takes no generator: dropout on a GPU, whose kernel draws a mask of its own kind."""

    def draw(mask: Tensor, _: Tensor | None, generator: torch.Generator | None) -> None:
        ones = torch.ones_like(mask, dtype=input.dtype)
        with nullcontext() if generator is None else drawing_from(generator):
            mask.copy_(_aten.native_dropout.default(ones, rate, train)[1])

    mask = torch.empty_like(input, dtype=torch.bool)
    filled("native_dropout", mask, Fill(draw, is_of_two=0 < rate < 1))
    return input * mask * (0.0 if rate == 1 else 1 / (1 - rate)), mask


def _normal(filled: Filled, mean: Tensor | float, std: Tensor | float = 1.0) -> Tensor:
    """Normally distributed numbers, each of its own distribution."""
    like = mean + std
    assert isinstance(like, Tensor)
    _check_can_be_filled(like)
    values = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    filled("normal", values, _filling(_aten.normal_.default))
    return values.mul_(std).add_(mean)


_NORMAL = {_aten.normal.Tensor_Tensor, _aten.normal.Tensor_float, _aten.normal.float_Tensor}


@contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Inside, torch's own generator of the same device draws what `generator` would draw."""
    device = generator.device
    default = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    before = default.get_state()
    default.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(default.get_state())
        default.set_state(before)


# --- operators by what they fill a tensor with ---


def _filling(operator: Any, *arguments: Any, **facts: Any) -> Fill:
    def call(values: Tensor, _: Tensor | None, generator: torch.Generator | None) -> None:
        operator(values, *arguments, generator=generator)

    return Fill(call, **facts)


def _uniform(lowest: float = 0.0, highest: float = 1.0) -> Fill:
    return _filling(_aten.uniform_.default, lowest, highest, limits=(lowest, highest))


def _bernoulli(probability: float = 0.5) -> Fill:
    return _filling(_aten.bernoulli_.float, probability, is_of_two=0 < probability < 1)


def _bernoulli_each(probabilities: Tensor) -> Fill:
    def call(values: Tensor, own: Tensor | None, generator: torch.Generator | None) -> None:
        assert own is not None
        _aten.bernoulli_.Tensor(values, own, generator=generator)

    return Fill(call, is_of_two=True, probabilities=probabilities)


def _new(form: Any, fill: Fill, **options: Any) -> tuple[Tensor, Fill]:
    """A tensor like another one, or of a size, and what fills it."""
    return (torch.empty_like if isinstance(form, Tensor) else torch.empty)(form, **options), fill


def _integers(size: Any, lowest: int, beyond: int, **options: Any) -> tuple[Tensor, Fill]:
    return _new(size, _filling(_random_from, lowest, beyond), **({"dtype": torch.int64} | options))


_random_from = getattr(_aten.random_, "from")

LEAST_DIMS_OF_ROWS = {
    _aten.poisson.default: 1,
    _aten.binomial.default: 1,
    _aten._standard_gamma.default: 1,
    _aten._sample_dirichlet.default: 1,
    _aten.multinomial.default: 2,
}
"""Operators that fill no tensor, and draw a row for each row of the tensors that they are given; how many dimensions
these have at least if they have rows."""

_IN_PLACE: dict[Any, Callable[..., Fill]] = {
    _aten.uniform_.default: _uniform,
    _aten.normal_.default: partial(_filling, _aten.normal_.default),
    **{
        one: partial(_filling, one)
        for one in (
            _aten.exponential_.default,
            _aten.log_normal_.default,
            _aten.cauchy_.default,
            _aten.geometric_.default,
        )
    },
    _aten.random_.default: partial(_filling, _aten.random_.default),
    _aten.random_.to: partial(_filling, _aten.random_.to),
    _random_from: partial(_filling, _random_from),
    _aten.bernoulli_.float: _bernoulli,
    _aten.bernoulli_.Tensor: _bernoulli_each,
}
"""Operators that fill their first argument, by what they are called with besides."""

_NEW: dict[Any, Callable[..., tuple[Tensor, Fill]]] = {
    **dict.fromkeys(
        (_aten.rand.default, _aten.rand.generator, _aten.rand_like.default),
        lambda form, **options: _new(form, _uniform(), **options),
    ),
    **dict.fromkeys(
        (_aten.randn.default, _aten.randn.generator, _aten.randn_like.default),
        lambda form, **options: _new(form, _filling(_aten.normal_.default), **options),
    ),
    **dict.fromkeys(
        (_aten.randint.low, _aten.randint.low_generator),
        lambda lowest, beyond, size, **options: _integers(size, lowest, beyond, **options),
    ),
    **dict.fromkeys(
        (_aten.randint.default, _aten.randint.generator),
        lambda beyond, size, **options: _integers(size, 0, beyond, **options),
    ),
    _aten.normal.float_float: lambda mean, std, size, **options: _new(
        size, _filling(_aten.normal_.default, mean, std), **options
    ),
    _aten.randint_like.default: lambda like, beyond, **options: _new(
        like, _filling(_random_from, 0, beyond), **options
    ),
    _aten.bernoulli.p: lambda like, probability: _new(like, _bernoulli(probability)),
    _aten.bernoulli.default: lambda probabilities: _new(probabilities, _bernoulli_each(probabilities)),
}
"""Operators that make a tensor and fill it. Those that are named for a generator are called with none too."""
