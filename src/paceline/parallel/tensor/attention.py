"""Finds attention modules whose heads can be divided among workers, and checks each by computing it both ways.

A candidate has an attribute that counts heads, and four linear layers, or two of which the first makes query, key and
value at once. It is computed whole and worker by worker, here, on random input with random weights: what enters the
output layer must be the same. Where it is not (other dimensions derived from the number of heads, dropout on the
attention weights, arguments that cannot be guessed), heads stay together and the layers are shared one by one.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.tensor.exchange import block_runs
from paceline.parallel.tensor.plan import check_heads


@dataclass(frozen=True)
class Heads:
    """How an attention module is divided. Names are relative to the module."""

    inputs: tuple[str, ...]
    """The layers of query, key and value, or one of all three."""
    output: str
    num_blocks: int
    """Matrices above each other in an input layer: 3 or 1."""
    own_numbers: tuple[str, ...]
    """Attributes that count a worker's own heads or features."""
    has_one_input: bool
    """Whether all input layers take the same tensor."""


class _EnteredOutput(Exception):  # noqa: N818 - it ends a trial's forward pass
    """What enters the output layer."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def find_heads(name: str, module: nn.Module, degree: int) -> Heads | None:
    """How `degree` workers can divide the heads of `module`; None if it is no attention that we can divide.

    Raises:
        ModelError: it is, and their number does not divide by `degree`.
    """
    counts = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, int) and not isinstance(value, bool) and value > 0 and _counts_heads(key)
    }
    layers = {key: child for key, child in module.named_children() if type(child) is nn.Linear}
    if not counts or len(layers) not in (2, 4):
        return None
    if any(value % degree for value in counts.values()):
        num_heads = max(counts.values())
        if _divide(module, layers, counts, num_heads) is None:
            return None
        check_heads(name, next(value for value in counts.values() if value % degree), degree)
    return _divide(module, layers, counts, degree)


def _counts_heads(attribute: str) -> bool:
    return "head" in attribute and not any(word in attribute for word in ("dim", "size", "width"))


def _divide(module: nn.Module, layers: dict[str, nn.Linear], counts: dict[str, int], degree: int) -> Heads | None:
    if any(value % degree for value in counts.values()):
        return None
    try:
        with torch.random.fork_rng(devices=[]):
            return _try_out(module, layers, counts, degree)
    except Exception:  # whatever a forward does with input that it was not made for
        return None


def _try_out(module: nn.Module, layers: dict[str, nn.Linear], counts: dict[str, int], degree: int) -> Heads | None:
    trial = _fresh_copy(module)
    called: list[tuple[str, Tensor]] = []
    for key in layers:
        trial.get_submodule(key).register_forward_pre_hook(lambda _, args, key=key: called.append((key, args[0])))
    inputs = _inputs(trial, layers)
    _forward(trial, inputs)
    output, entered = called[-1]
    given = [(key, value) for key, value in called[:-1]]
    if sorted(key for key, _ in called) != sorted(layers):
        return None
    width = layers[output].in_features
    num_blocks = 3 if len(given) == 1 else 1
    if any(layers[key].out_features % (num_blocks * degree) for key, _ in given):
        return None
    if num_blocks == 3 and layers[given[0][0]].out_features != 3 * width:
        return None
    for divided in ({}, {key: value for key, value in vars(module).items() if _is_width(value, width)}):
        numbers = {key: value // degree for key, value in (counts | divided).items()}
        slices = [
            _heads_of(trial, [key for key, _ in given], output, num_blocks, numbers, inputs, rank, degree)
            for rank in range(degree)
        ]
        whole = torch.cat([own for own in slices if own is not None], -1) if None not in slices else None
        if whole is not None and whole.shape == entered.shape and torch.allclose(whole, entered, rtol=1e-3, atol=1e-4):
            has_one_input = all(value is given[0][1] for _, value in given)
            return Heads(tuple(key for key, _ in given), output, num_blocks, tuple(numbers), has_one_input)
    return None


def _is_width(value: Any, width: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value == width


def _fresh_copy(module: nn.Module) -> nn.Module:
    """The module in host memory and float32, with weights that hide nothing: zeros, or none on the meta device, do."""
    tensors = [*module.parameters(), *module.buffers()]
    trial = copy.deepcopy(module)
    trial = trial.to_empty(device="cpu") if any(tensor.is_meta for tensor in tensors) else trial.cpu()
    for parameter in trial.float().train().parameters():
        parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    return trial


def _inputs(trial: nn.Module, layers: dict[str, nn.Linear]) -> list[Tensor]:
    """One random tensor (2, 5, features) for every argument that forward must have."""
    required = [
        p for p in inspect.signature(trial.forward).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    width = next(iter(layers.values())).in_features
    return [torch.randn(2, 5, width) for _ in required]


def _forward(module: nn.Module, inputs: list[Tensor]) -> None:
    torch.manual_seed(1)  # a mask drawn for fewer heads is another one, and shows
    with torch.no_grad():
        module(*inputs)


def _heads_of(
    trial: nn.Module,
    given: list[str],
    output: str,
    num_blocks: int,
    numbers: dict[str, int],
    inputs: list[Tensor],
    rank: int,
    degree: int,
) -> Tensor | None:
    """What enters the output layer of one worker; None if its forward fails."""
    own = copy.deepcopy(trial, {id(parameter): parameter for parameter in trial.parameters()})
    vars(own).update(numbers)
    for key in given:
        layer = own.get_submodule(key)
        assert isinstance(layer, nn.Linear)
        runs = block_runs(layer.out_features, num_blocks, degree, rank)
        for kind, parameter in list(layer.named_parameters()):
            rows = torch.cat([parameter.data[start:stop] for start, stop in runs])
            setattr(layer, kind, nn.Parameter(rows))

    def stop(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        raise _EnteredOutput(args[0])

    own.get_submodule(output).register_forward_pre_hook(stop)
    try:
        _forward(own, inputs)
    except _EnteredOutput as entered:
        return entered.value
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
    return None
