"""Sees what a model's forward pass calls, in its own order: the modules that are layers, and operations between them.

The forward pass itself runs as it was written, so nothing in it need be understood. `Recorder` writes down what it
sees, and `Replay` computes a part of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction, checkpoint

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_CALL = "_compiled_call_impl"
"""The attribute of a module that torch calls in place of it, hooks and all."""


def opened_modules(model: nn.Module) -> frozenset[nn.Module]:
    """The modules that are no layers, but call layers: containers, and the modules around the model's repeated blocks.

    Blocks are opened only where they are containers themselves: what a block computes with, experts perhaps, may be
    called in another order for every batch.
    """
    opened = {model}
    for module in model.modules():
        if module in opened or isinstance(module, CONTAINERS):
            repeated = _repeated(module)
            for child in module.children():
                if isinstance(child, CONTAINERS) or (child not in repeated and _has_repeated_blocks(child)):
                    opened.add(child)
    return frozenset(opened)


def _repeated(module: nn.Module) -> set[nn.Module]:
    """The children of a container that several of them are like: composite, and of one kind."""
    if not isinstance(module, CONTAINERS):
        return set()
    blocks = [child for child in module.children() if not isinstance(child, CONTAINERS) and any(child.children())]
    kinds = [type(child) for child in blocks]
    return {child for child in blocks if kinds.count(type(child)) > 1}


def _has_repeated_blocks(module: nn.Module) -> bool:
    return any(_repeated(part) for part in module.modules())


class Watch(TorchFunctionMode):
    """A context in which the calls of one model's forward pass are seen, but none of those inside of its layers."""

    def __init__(self, model: nn.Module, opened: frozenset[nn.Module]) -> None:
        super().__init__()
        self._model = model
        self._opened = opened
        self._names = {module: name for name, module in model.named_modules()}
        self._is_inside = False
        self._restore: Callable[[], None] = lambda: None

    def on_module(self, name: str, module: nn.Module, call: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """A layer is called; returns what it returns."""
        raise NotImplementedError

    def on_function(self, function: Any, call: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """A function of torch, or of a `torch.autograd.Function`, is called between layers."""
        raise NotImplementedError

    def on_inner_module(self, name: str, output: Any) -> None:
        """A module that a layer is made of returned `output`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        call = functools.partial(func, *args, **kwargs)
        return call() if self._is_inside else self.on_function(func, call, args, kwargs)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """What is called here belongs to a layer."""
        was_inside, self._is_inside = self._is_inside, True
        try:
            # A mode, even one that does nothing, takes time at every call.
            with _pop_mode_temporarily() if _get_current_function_mode() is self else nullcontext():
                yield
        finally:
            self._is_inside = was_inside

    def __enter__(self) -> Self:
        # Where torch looks for a compiled call, module by module: to replace `nn.Module.__call__` would have Python
        # go through all classes of modules there are, and forget what it knows of their attributes.
        before = {module: vars(module).get(_CALL) for module in self._names}
        for module, name in self._names.items():
            if module not in self._opened:
                vars(module)[_CALL] = functools.partial(self._see, name, module, before[module] or module._call_impl)
        original_apply = torch.autograd.Function.__dict__["apply"]

        def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
            if not self._is_inside and cls is CheckpointFunction:  # which would hide the layers that it calls
                needs_gradient = any(tensor.requires_grad for tensor in tensors_in(args[2:]))
                with nullcontext() if needs_gradient else torch.no_grad():  # without, it has none either
                    return checkpoint(args[0], *args[2:], use_reentrant=False, preserve_rng_state=args[1])
            call = functools.partial(original_apply.__func__, cls, *args, **kwargs)
            return call() if self._is_inside else self.on_function(cls, call, args, kwargs)

        def restore() -> None:
            for module, call in before.items():
                vars(module).pop(_CALL, None)
                if call is not None:
                    vars(module)[_CALL] = call
            torch.autograd.Function.apply = original_apply  # type: ignore[method-assign]

        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
        self._restore = restore
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def _see(self, name: str, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A module that is not opened is called."""
        call = functools.partial(original, *args, **kwargs)
        if self._is_inside:
            output = call()
            self.on_inner_module(name, output)
            return output
        return self.on_module(name, module, call, args, kwargs)

    def __exit__(self, *error: Any) -> None:
        self._restore()
        super().__exit__(*error)  # type: ignore[no-untyped-call]


def know_dataclasses(value: Any) -> None:
    """Let torch look into the dataclasses in a value, as it does into tuples, lists and dictionaries."""
    for leaf in pytree.tree_leaves(value):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            pytree.register_dataclass(type(leaf))
            know_dataclasses([getattr(leaf, one.name) for one in dataclasses.fields(leaf)])


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a value, however nested."""
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
