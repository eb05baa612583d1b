"""Refuses losses that follow from tensors which a model or a loss function keeps from call to call outside of buffers.

How many passes a step takes depends on the number of workers, and with it how often such a tensor is moved. What
workers hold in buffers is combined over the passes of a step (`parallel.kept.forward_buffers`). A tensor in an
attribute is more often a harmless one: the last activations, a mask that is computed once, a sum for a log. So it is
refused only if a pass replaces or changes it, and the loss of that pass follows from what was there before.

What the script itself changes between two steps, such as the centre of a teacher's outputs, is compared among workers
if the loss follows from it: the script may have computed it of one worker's samples.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.containers import open_object, tensors, versions
from paceline.errors import ModelError
from paceline.parallel.kept.kept_values import OF_EVERY_MODULE, FunctionNames, Places, name_in, places_in_model
from paceline.parallel.losses import LossOf

_CALLS_TO_LOOK = 4
"""Calls in which every place is looked at; later ones look only at places that hold tensors, or if these are many, at
those that were changed."""
_MANY = 256
_CALLS_TO_FOLLOW = 3
"""Calls in which everything computed from a changed tensor is tracked, operator by operator, which takes time; steps,
if the script changes the tensor."""
_MOST_IN_LIST = 1024
"""Longer lists are assumed to hold data, such as tokens, and are skipped."""
_OVERWRITING = (torch.ops.aten.copy_.default, torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar)
"""Operators that overwrite their first argument."""

_Held = tuple[tuple[weakref.ref[Tensor], int], ...]
"""The tensors in a place, and how often each was changed."""


class KeptTensors:
    """The tensors that some places hold, and what calls of a loss function make of them."""

    def __init__(self, places: Places, owner: str) -> None:
        """
        Args:
            owner: what keeps the tensors, for messages: "The forward pass", "The loss function".
        """
        self._places = places
        self._owner = owner
        self._num_calls = 0
        self._left_to_follow: dict[str, int] = {}
        """For the path of each place that calls have changed: in how many more calls its tensors are tracked."""
        self._after_step: dict[str, _Held] | None = None
        """The contents of the places at the end of the last step; None before the first one has ended."""
        self._steps_left: dict[str, int] = {}
        """For the path of each place that the script has changed: in how many more steps its tensors are tracked."""
        self._given: dict[str, float] = {}
        """Checksums of tracked tensors that the script has changed since the last step, by path."""
        self.leading: dict[str, float] = {}
        """The entries of `_given` that the loss of this step is computed from, by name."""
        self._told: set[str] = set()

    @classmethod
    def of_model(cls, model: nn.Module) -> KeptTensors:
        return cls(_without(places_in_model(model, _may_hold_tensors), ()), "The forward pass")

    @classmethod
    def of_function(cls, names: FunctionNames, models: Iterable[nn.Module]) -> KeptTensors:
        """
        Args:
            models: the models of the run, whose attributes do not count as the loss function's own.
        """
        return cls(_without(names.places(_may_hold_tensors, reads=True), models), "The loss function")

    def begin_step(self) -> None:
        """Look at what the script has changed since `end_step`."""
        self._given, self.leading = {}, {}
        if self._after_step is None:
            return
        held = self._held()
        for path in _changed(self._after_step, held):
            left = self._steps_left.setdefault(path, _CALLS_TO_FOLLOW)
            if left:
                self._steps_left[path] -= 1
                self._given[path] = sum(map(_checksum, _alive(held[path])))

    def newly_leading(self) -> dict[str, list[Tensor]]:
        """The tensors, of any shapes, in the places in `leading` of which this has not been told before."""
        found: dict[str, list[Tensor]] = {}
        for path in self._given:
            if (name := name_in(path)) in self.leading and path not in self._told:
                self._told.add(path)
                place, key = self._places[path]
                found.setdefault(name, []).extend(_tensors_in(place.get(key)))
        return found

    def end_step(self) -> None:
        """Note the state after a step: whatever changes until `begin_step` was changed by the script."""
        self._after_step = self._held()

    def around(self, loss_of: LossOf) -> LossOf:
        """A loss function whose calls are watched.

        Its calls raise:
            ModelError: the loss follows from a tensor that an earlier call left in a place, and this call changed it.
        """
        return functools.partial(self._call, loss_of) if self._places else loss_of

    def _call(self, loss_of: LossOf, model: nn.Module, content: Any) -> Any:
        before = self._held()
        if self._num_calls == _CALLS_TO_LOOK:
            self._look_at_fewer(before)
        self._num_calls += 1  # now: the first stages of a pipeline never return
        of_calls = [path for path, left in self._left_to_follow.items() if left and path in before]
        given = [path for path in self._given if path in before]
        roots = {path: _alive(before[path]) for path in (*of_calls, *given)}
        follower = _Follower(roots) if roots else None
        try:
            with follower or nullcontext():
                returned = loss_of(model, content)
        except RuntimeError as problem:
            # Other passes are of other numbers of samples, for which the tensor has another shape.
            led = follower.failed if follower else frozenset()
            wrong = next((path for path in of_calls if path in led or _is_about(problem, roots[path])), None)
            if wrong is None:
                raise
            raise self._refusal(wrong) from problem
        held = self._held()
        changed = _changed(before, held)
        if follower is not None:
            leading = [path for path in roots if follower.leads_to(path, returned)]
            self.leading |= {name_in(path): self._given[path] for path in given if path in leading}
            for path in of_calls:
                self._left_to_follow[path] -= 1
                if path in changed and path in leading:
                    raise self._refusal(path)
        for path in changed:
            self._left_to_follow.setdefault(path, _CALLS_TO_FOLLOW)
        return returned

    def _look_at_fewer(self, held: Mapping[str, _Held]) -> None:
        """Look only at places that hold tensors, or nothing: the script may put something there later. Where these are
        many, at those that calls have changed."""
        empty = [path for path, (place, name) in self._places.items() if place.get(name) is None]
        kept = {*held, *empty} if len(held) + len(empty) <= _MANY else set(self._left_to_follow)
        self._places = {path: place for path, place in self._places.items() if path in kept}

    def _held(self) -> dict[str, _Held]:
        """What is in every place that holds tensors."""
        held = {path: tuple(_tensors_in(place.get(name))) for path, (place, name) in self._places.items()}
        return {
            path: tuple((weakref.ref(one), version) for one, version in zip(some, versions(some), strict=True))
            for path, some in held.items()
            if some
        }

    def _refusal(self, path: str) -> ModelError:
        return ModelError(
            f"{self._owner} computes with a tensor that an earlier pass left in '{name_in(path)}', and changes it; how "
            "many passes a step takes depends on the number of workers. Hold it in a buffer of the model "
            "(register_buffer) of a fixed size: buffers are combined over the passes of a step."
        )


class _Follower(TorchDispatchMode):
    """A dispatch mode that tracks which tensors are computed from given ones; not within compiled functions."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, roots: Mapping[str, Iterable[Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._paths_of: dict[int, frozenset[str]] = {}
        """For each storage, the places that its values were computed from."""
        self.failed = frozenset[str]()
        """The places that the arguments of a failed operator were computed from."""
        self._kept: list[Tensor] = []
        """The tensors found so far, kept so that no other tensor gets their storage."""
        for path, some in roots.items():
            for one in some:
                self._reach(one, self._of(one) | {path})

    def leads_to(self, path: str, returned: Any) -> bool:
        """Whether the returned tensors were computed from those in a place."""
        return any(path in self._of(one) for one in tensors(returned, open_object))

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            returned = operator(*args, **kwargs)
        except RuntimeError:
            self.failed = self._of_all((args, kwargs))
            raise
        overwrites = operator in _OVERWRITING and _is_whole(args[0])
        paths = self._of_all((args[1:], kwargs) if overwrites else (args, kwargs))
        if overwrites:
            self._paths_of.pop(_storage(args[0]), None)
        if paths:
            for one in pytree.tree_leaves((returned, written_arguments(operator, args, kwargs))):
                if isinstance(one, Tensor):
                    self._reach(one, self._of(one) | paths)
        return returned

    def _of_all(self, arguments: Any) -> frozenset[str]:
        found = (self._of(one) for one in pytree.tree_leaves(arguments) if isinstance(one, Tensor))
        return frozenset().union(*found)

    def _of(self, tensor: Tensor) -> frozenset[str]:
        return self._paths_of.get(_storage(tensor), frozenset())

    def _reach(self, tensor: Tensor, paths: frozenset[str]) -> None:
        self._paths_of[_storage(tensor)] = paths
        self._kept.append(tensor.detach())


def written_arguments(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors, of any shapes, that a call of an operator changes in place, as far as it says so."""
    if not isinstance(operator, OpOverload) or not operator._schema.is_mutable:
        return []
    arguments = operator._schema.arguments
    given = {one.name: value for one, value in zip(arguments, args, strict=False)} | dict(kwargs)
    written = [given.get(one.name) for one in arguments if one.alias_info is not None and one.alias_info.is_write]
    return [one for one in pytree.tree_leaves(written) if isinstance(one, Tensor)]


def _checksum(tensor: Tensor) -> float:
    """A number that moves with any in the tensor; 0 for a sharded one, which is each worker's own."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_complex():
        return 0.0
    numbers = tensor.detach().double().nan_to_num().flatten()
    numbers = numbers.abs() + numbers.clamp(min=0)  # of which none cancel
    return float(numbers @ torch.linspace(1, 2, len(numbers), dtype=numbers.dtype, device=numbers.device))


def _storage(tensor: Tensor) -> int:
    """Names the memory that a tensor lies in; that of views is the same."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # it has none of its own, as a sharded one
        return id(tensor)


def _is_whole(tensor: Any) -> bool:
    """Whether a tensor is all that lies in its memory."""
    return type(tensor) is Tensor and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _changed(before: Mapping[str, _Held], now: Mapping[str, _Held]) -> list[str]:
    """The paths of the places that hold other tensors now, or whose tensors were changed."""
    return [path for path, held in now.items() if not _are_same(held, before.get(path, ()))]


def _are_same(some: _Held, others: _Held) -> bool:
    return len(some) == len(others) and all(
        one() is other() and version == other_version
        for (one, version), (other, other_version) in zip(some, others, strict=True)
    )


def _is_about(problem: RuntimeError, some: Iterable[Tensor]) -> bool:
    """Whether an error names the shape of one of some tensors."""
    return any(name in str(problem) for one in some for name in (str([*one.shape]), str(tuple(one.shape))) if one.dim())


def _alive(held: _Held) -> list[Tensor]:
    return [one for reference, _ in held if (one := reference()) is not None]


def _may_hold_tensors(value: object) -> bool:
    may_hold = isinstance(value, Tensor | list | tuple | dict | deque) and not isinstance(value, nn.Parameter)
    return value is None or may_hold


def _tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in a value except parameters: recurrent layers list theirs, which sharding replaces in every pass."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict | deque) and len(value) <= _MOST_IN_LIST:
        held = tensors(list(value) if isinstance(value, deque) else value)
        yield from (one for one in held if not isinstance(one, nn.Parameter))


def _without(places: Places, models: Iterable[nn.Module]) -> Places:
    """Without what every module has, and what some models have."""
    others = {id(place) for model in models for one in model.modules() for place in (vars(one), one._buffers)}
    return {
        path: (place, name)
        for path, (place, name) in places.items()
        if name not in OF_EVERY_MODULE and id(place) not in others
    }
