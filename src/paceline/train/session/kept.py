"""Objects of a user's script that are saved with every checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from paceline.errors import JobError, shown
from paceline.own_generators import RandomGenerator, full_state, set_state


@runtime_checkable
class Stateful(Protocol):
    """Anything that a checkpoint can keep."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


Keepable = Stateful | RandomGenerator
"""Objects that a script may ask a run to save with checkpoints."""


class KeptGenerator:
    """A generator of random numbers as something that a checkpoint can keep."""

    def __init__(self, generator: RandomGenerator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": _without_arrays(full_state(self.generator))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state(self.generator, state["state"])


def _without_arrays(state: Any) -> Any:
    """A state with lists in the place of NumPy's arrays, which its generator takes too."""
    if isinstance(state, Mapping):
        return {key: _without_arrays(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


class Kept:
    """Objects of the user's script that are saved with every checkpoint, by name."""

    def __init__(self) -> None:
        self._things: dict[str, Stateful] = {}
        self.moves_between_steps = False
        """Whether the script changes any of them itself."""
        self._restored: dict[str, Any] = {}
        """States from a checkpoint that have not been claimed yet."""
        self._after_restoring: Callable[[], None] = lambda: None

    def add(self, name: str, thing: Keepable, *, in_step: bool = False) -> None:
        """
        Args:
            in_step: whether it moves in `Run.step` alone, not in what the script does between two steps.

        Raises:
            JobError: a thing without a state, or a name that another thing has.
        """
        if not isinstance(thing, Keepable):
            raise JobError(
                f"run.keep({name!r}, …) takes something with state_dict() and load_state_dict(state), or a generator "
                f"of random numbers, not {shown(thing)}; put numbers into an object of your own that has both."
            )
        kept = KeptGenerator(thing) if isinstance(thing, RandomGenerator) else thing
        if name in self._things:
            raise JobError(f"run.keep({name!r}, …) was called before; give each thing a name of its own.")
        self._things[name] = kept
        self.moves_between_steps |= not in_step
        if name in self._restored:
            kept.load_state_dict(self._restored.pop(name))
            self._after_restoring()

    def state_dict(self) -> dict[str, Any]:
        return {name: thing.state_dict() for name, thing in self._things.items()}

    def load_state_dict(self, state: dict[str, Any], after_restoring: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            after_restoring: called after a thing has got its state back.
        """
        self._restored, self._after_restoring = dict(state), after_restoring
        for name in self._things.keys() & state.keys():  # what the script gave before `Run.prepare`
            self._things[name].load_state_dict(self._restored.pop(name))
        after_restoring()
