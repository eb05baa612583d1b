"""Parameters that several stages of a pipeline have, such as an embedding that is tied to the head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from paceline.dtensor_type import local_shard
from paceline.errors import ModelError
from paceline.parallel.dtensor import with_local
from paceline.parallel.pipeline.recording import Layer, Recording

Holders = dict[nn.Parameter, list[tuple[int, str]]]
"""The stages that have each parameter, in their order, and its name there."""


def holders_of(stages: Iterable[nn.Module]) -> Holders:
    holders: Holders = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            holders.setdefault(parameter, []).append((number, name))
    return holders


class SharedParameters:
    """Adds the gradients of one micro-batch, from the last stage that has a parameter to the first.

    So does the whole model, whose backward pass comes to the later uses first; what each micro-batch adds to a gradient
    has the same bits. The gradients travel with those of activations, and stay in the first stage.
    """

    def __init__(self, recording: Recording, starts: Sequence[int], holders: Holders) -> None:
        """
        Args:
            starts: the first layer of every stage.

        Raises:
            ModelError: the stages would add in another order than the whole model.
        """
        self._shared: list[dict[int, str]] = []
        """For each parameter the stages that have it, in order, and its name there."""
        for parameter in recording.model.parameters():
            if parameter.requires_grad and len(holders[parameter]) > 1:
                self._shared.append(dict(holders[parameter]))
                for number, name in holders[parameter][:-1]:
                    layers = recording.layers[starts[number] : starts[number + 1]]
                    if sum(_uses(recording.model, layer, parameter) for layer in layers) > 1:
                        raise ModelError(
                            f"The stage before '{recording.name(starts[number + 1])}' uses '{name}' more than once, "
                            "and a later stage uses it too, so its gradients would be added in another order than on "
                            "one worker; cut the model elsewhere (pipeline.cuts), or use parity = 'numeric'."
                        )

    def are_in(self, stage: int) -> bool:
        """Whether a stage has any."""
        return any(stage in names for names in self._shared)

    def add(self, number: int, stage: nn.Module, carried: Sequence[Tensor]) -> list[Tensor]:
        """Add a stage's gradients of a micro-batch to those that later stages have sent; returns what to send on.

        `.grad` is then the sum in the first stage that has a parameter, and None in the others.
        """
        arrived, leaving = iter(carried), []
        for names in self._shared:
            first, last = min(names), max(names)
            if not first <= number <= last:
                continue
            total = next(arrived) if number < last else None
            if number in names:
                parameter = stage.get_parameter(names[number])
                total = _sum(total, None if parameter.grad is None else local_shard(parameter.grad))
                if total is None:
                    raise ModelError(
                        f"The loss does not depend on '{names[number]}' in the last of the stages that share it, and "
                        "parity = 'bitwise' cannot tell the others so; use parity = 'numeric'."
                    )
                parameter.grad = with_local(total, parameter) if number == first else None
            if number > first:
                assert total is not None
                leaving.append(total)
        return leaving


def _uses(model: nn.Module, layer: Layer, parameter: nn.Parameter) -> bool:
    if layer.function is None:
        return any(one is parameter for one in model.get_submodule(layer.name).parameters())
    return any(model.get_parameter(name) is parameter for name in layer.parameters)


def _sum(later: Tensor | None, own: Tensor | None) -> Tensor | None:
    if later is None or own is None:
        return own if later is None else later
    return torch.add(later, own)
