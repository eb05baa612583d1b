"""Where a script's model or loss function keeps values from call to call: in attributes, dictionaries, variables."""

from __future__ import annotations

import copy
import dis
import functools
import types
from collections import ChainMap, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.own_generators import reached_by

OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "_compiled_call_impl"})
"""The names of the attributes that torch gives to modules; the last one holds what is called in place of a module."""
_DEPTH = 4
"""How far from a loss function values are looked for."""

_ASSIGNING = frozenset({"STORE_DEREF", "STORE_GLOBAL"})
_READING = frozenset({"LOAD_DEREF", "LOAD_GLOBAL"})

IsWanted = Callable[[Any], bool]
"""Whether a value is one of those that are looked for."""


class Namespace(Protocol):
    """Holds values by name: attributes, a dictionary, variables."""

    def get(self, name: str, /) -> Any: ...

    def __contains__(self, name: object, /) -> bool: ...

    def __setitem__(self, name: str, value: Any, /) -> None: ...

    def __delitem__(self, name: str, /) -> None: ...


@dataclass(frozen=True)
class KeptNames:
    """A namespace, or one name of it."""

    place: Namespace
    only: Any = None
    """None: all of its names."""
    is_only_read: bool = False
    """Whether it is a variable of a function that does not assign to it here."""

    @property
    def value(self) -> Any:
        """The value of the only name."""
        return self.place.get(self.only)

    def items(self) -> Iterator[tuple[Any, Any]]:
        if self.only is not None:
            yield self.only, self.place.get(self.only)
        elif isinstance(self.place, dict):
            yield from self.place.items()


Places = dict[str, tuple[Namespace, str]]
"""Where single values are, by their path, which is alike in every run of a program."""


def is_counted(value: object) -> bool:
    """Whether `kept.counters` watches such a value."""
    return type(value) in (int, float)


def places_in_model(model: nn.Module, is_wanted: IsWanted) -> Places:
    """The places in attributes of modules, in objects and dictionaries that are attributes, and in global variables
    that forward passes assign to."""
    seen: set[tuple[int, str]] = set()
    places: Places = {}
    for path, found in namespaces_in_model(model):
        for name, value in found.items():
            if is_wanted(value) and (id(found.place), name) not in seen:
                seen.add((id(found.place), name))
                places[f"{path}.{name}" if path else name] = found.place, name
    return places


def namespaces_in_model(model: nn.Module) -> Iterator[tuple[str, KeptNames]]:
    """What `places_in_model` looks at, by paths."""
    forwards = {}
    for path, module in model.named_modules():
        packages = _packages(module)
        for attributes in _attributes_of(module, packages):
            yield path, attributes
        for name, value in vars(module).items():
            if name not in OF_EVERY_MODULE:
                for inner in _attributes_or_entries(value, packages):
                    yield f"{path}.{name}" if path else name, inner
        forwards[getattr(type(module), "forward", None)] = path
    for forward, path in forwards.items():
        if isinstance(forward, types.FunctionType):
            for variables in _variables_of(forward, _ASSIGNING):
                yield f"{path}.forward" if path else "forward", variables


def name_in(path: str) -> str:
    """The name that a place has in the script."""
    return path.rpartition(" ")[2]


class FunctionNames:
    """What a loss function can name: variables, and the attributes and dictionaries of what it names; of modules also
    parameters and buffers. One search finds them for all that look for values there.

    What belongs to other packages counts only in modules: a loss of another library.
    """

    def __init__(self, function: object) -> None:
        self._found = list(namespaces_in_function(function))

    def places(self, is_wanted: IsWanted, *, reads: bool = False) -> Places:
        """
        Args:
            reads: whether variables that the function only reads count too.
        """
        places = {
            (id(found.place), name): (found.place, name)
            for found in self._found
            if reads or not found.is_only_read
            for name, value in found.items()
            if is_wanted(value)
        }
        return {f"{number} {name}": (place, name) for number, (place, name) in enumerate(places.values())}


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """A context after which the attributes of a module are as before, with what their containers and objects hold."""
    own, packages = {name: one for name, one in vars(module).items() if name not in OF_EVERY_MODULE}, _packages(module)
    objects = [vars(value) for value in own.values() if _is_own_object(value, packages)]
    holders = [vars(module), *objects]
    values = [*own.values(), *(value for attributes in objects for value in attributes.values())]
    kept = [(one, copy.copy(one)) for one in (*holders, *(v for v in values if type(v) in (list, dict, set, deque)))]
    try:
        yield
    finally:
        for held, before in kept:
            held.clear()
            held.extend(before) if isinstance(held, list | deque) else held.update(before)


def namespaces_in_function(function: object) -> Iterator[KeptNames]:
    """What `FunctionNames` looks at."""
    packages, seen, left = {package_of(function)}, set(), [(function, _DEPTH)]
    while left:
        thing, depth = left.pop()
        if id(thing) in seen or isinstance(thing, type | types.ModuleType) or not depth:
            continue
        seen.add(id(thing))
        if isinstance(thing, functools.partial):
            left += [(part, depth) for part in (thing.func, *thing.args, *thing.keywords.values())]
        elif isinstance(thing, types.MethodType):
            left += [(thing.__self__, depth), (thing.__func__, depth)]
        elif isinstance(thing, dict):
            yield KeptNames(thing)
        elif isinstance(thing, nn.Module):
            for module in thing.modules():
                yield from _attributes_of(module, _packages(module))
                yield KeptNames(module._parameters)
                if not isinstance(module, _BatchNorm):  # whose running statistics do not lead to its outputs
                    yield KeptNames(module._buffers)
        elif _is_own_object(thing, packages):
            yield from _attributes_of(thing, packages)
            if isinstance(thing, types.FunctionType):
                yield from _variables_of(thing, _ASSIGNING | _READING)
                parts = reached_by(thing)
            else:
                parts = iter((*vars(thing).values(), vars(type(thing)).get("__call__")))
            left += [(part, depth - 1) for part in parts]


def _is_own_object(thing: object, packages: Collection[str]) -> bool:
    """Whether it has attributes, and is of one of these packages."""
    is_other = isinstance(thing, type | types.ModuleType | nn.Module)
    return not is_other and package_of(thing) in packages and hasattr(thing, "__dict__")


def _attributes_of(thing: object, packages: Collection[str]) -> Iterator[KeptNames]:
    """Those of an object, and those for which its class, of one of these packages, has a None or a number so far."""
    own = vars(thing)
    yield KeptNames(own)
    known = set(own)
    for kind in type(thing).__mro__:
        if package_of(kind) in packages:
            for name, value in vars(kind).items():
                if name in known or name.startswith("__"):
                    continue
                known.add(name)
                if value is None:
                    yield KeptNames(own, name)
                elif is_counted(value):
                    yield KeptNames(ChainMap(own, {name: value}), name)


def _attributes_or_entries(value: object, packages: Collection[str]) -> Iterator[KeptNames]:
    if type(value) is dict:
        yield KeptNames(value)
    elif _is_own_object(value, packages):
        yield from _attributes_of(value, packages)


def _packages(module: nn.Module) -> set[str]:
    """The packages of the module's class and of its base classes: sharding puts another class in front."""
    return {package_of(kind) for kind in type(module).__mro__} - {"torch", "builtins"}


def package_of(thing: object) -> str:
    """The name of the package that a function, or the class of an object, belongs to."""
    while isinstance(thing, functools.partial | types.MethodType):
        thing = thing.func if isinstance(thing, functools.partial) else thing.__self__
    owner = thing if isinstance(thing, types.FunctionType | type) else type(thing)
    return str(owner.__module__).partition(".")[0]


def _variables_of(function: types.FunctionType, opcodes: Collection[str]) -> Iterator[KeptNames]:
    """The global variables, and those of functions around it, in a function's instructions with these opcodes."""
    cells = _Cells(dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)))
    for instruction in dis.get_instructions(function):
        if instruction.opname in opcodes:
            place: Namespace = cells if instruction.opname.endswith("_DEREF") else function.__globals__
            yield KeptNames(place, instruction.argval, instruction.opname in _READING)


@dataclass
class _Cells:
    """Variables of the functions around a function."""

    cells: dict[str, types.CellType]

    def get(self, name: str) -> Any:
        return self.cells[name].cell_contents if name in self else None

    def __contains__(self, name: object) -> bool:
        try:
            _ = self.cells[str(name)].cell_contents
        except (KeyError, ValueError):  # there is no such variable, or it is not assigned yet
            return False
        return True

    def __setitem__(self, name: str, value: Any) -> None:
        self.cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self.cells[name].cell_contents
