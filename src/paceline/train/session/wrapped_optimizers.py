"""What an optimizer keeps beside its own state: in optimizers that it has in it, as SAM has the one that makes its
updates, and in tensors in attributes, as Lookahead's slow weights. A `state_dict` need not have them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from paceline.containers import tensors
from paceline.train.optimizers.joint_optimizer import parts_of

_OF_EVERY_OPTIMIZER = ("state", "param_groups", "defaults")


def wrapped_in(optimizer: Optimizer) -> list[tuple[Optimizer, Optimizer]]:
    """Each optimizer that has another one in an attribute, and that one."""
    parts = parts_of(optimizer)
    return [(part, one) for part in parts for one in vars(part).values() if isinstance(one, Optimizer)]


def holders(optimizer: Optimizer) -> list[Optimizer]:
    """The parts of an optimizer, and the optimizers that these wrap."""
    return [*parts_of(optimizer), *(inner for _, inner in wrapped_in(optimizer))]


def add_wrapped_state(optimizer: Optimizer, names: Mapping[int, str], state: dict[str, dict[str, Any]]) -> None:
    """Add to the state of every parameter what wrapped optimizers hold of it and `state` lacks.

    Args:
        names: of the parameters, by their ids.
    """
    known = {id(value) for entries in state.values() for value in entries.values()}
    for number, (_, inner) in enumerate(wrapped_in(optimizer)):
        for parameter, entries in inner.state.items():
            own = {f"{number}/{key}": value for key, value in entries.items() if id(value) not in known}
            if own and id(parameter) in names:
                name = names[id(parameter)]
                state[name] = state.get(name, {}) | own


def is_wrapped(key: str) -> bool:
    """Whether an entry of a parameter's state belongs to a wrapped optimizer."""
    return key.partition("/")[0].isdecimal()


def load_wrapped_state(optimizer: Optimizer, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Give wrapped optimizers what `add_wrapped_state` found of each parameter."""
    for number, (outer, inner) in enumerate(wrapped_in(optimizer)):
        own = {
            parameter: {key.partition("/")[2]: value for key, value in entries.items() if key.startswith(f"{number}/")}
            for parameter, entries in state.items()
        }
        if inner.state is not outer.state and any(own.values()):
            inner.state.clear()
            inner.state.update({parameter: entries for parameter, entries in own.items() if entries})


@contextmanager
def sharing_kept(optimizer: Optimizer) -> Iterator[None]:
    """A context for `load_state_dict`, which makes new groups: those that were shared with a wrapped optimizer still
    are, so that both have one learning rate."""
    shared = [
        (outer, inner, name, getattr(outer, name))
        for outer, inner in wrapped_in(optimizer)
        for name in ("param_groups", "state")
        if getattr(outer, name) is getattr(inner, name)
    ]
    yield
    for outer, inner, name, before in shared:
        if getattr(outer, name) is not before:
            setattr(inner, name, getattr(outer, name))
        elif getattr(inner, name) is not before:
            setattr(outer, name, getattr(inner, name))


def attribute_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """The tensors in attributes of an optimizer and of those that it wraps, but for parameters and what is in their
    states, by their places."""
    all_of_them = holders(optimizer)
    others = {id(p) for one in all_of_them for group in one.param_groups for p in group["params"]}
    others |= {id(value) for one in all_of_them for entries in one.state.values() for value in entries.values()}
    return {
        f"{number}/{name}/{place}": tensor
        for number, holder in enumerate(all_of_them)
        for name, value in vars(holder).items()
        if name not in _OF_EVERY_OPTIMIZER and not isinstance(value, Optimizer)
        for place, tensor in enumerate(tensors(value))
        if id(tensor) not in others
    }
