"""Checks that the stages of a model, one after the other, compute for the example what the whole model computes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import ModelError
from paceline.parallel.pipeline.calls import ModelCall, generator_state
from paceline.parallel.pipeline.recorder import untouched
from paceline.parallel.pipeline.recording import Recording
from paceline.parallel.pipeline.stage import Stage
from paceline.parallel.pipeline.watch import tensors_in

_SAME = 1e-3
"""Two runs of the same operations differ by less, relative to the largest number."""


def check_stages(recording: Recording, stages: Sequence[Stage], example: ModelCall, device: torch.device) -> None:
    """Raise `ModelError` if the stages compute something else than the model, as where a value reaches a later stage
    unseen.

    What a stage does not have is NaN in it, so that nothing can be right by chance.
    """
    model = recording.model
    modes = {module: module.training for root in (model, *stages) for module in root.modules()}
    try:
        for training in (True, False):
            for module in (model, *stages):
                module.train(training)
            start = generator_state(device), np.random.get_state(), random.getstate()
            with untouched(model), torch.no_grad():
                computed = [tensor.clone() for tensor in tensors_in(model(*example.args, **example.kwargs))]
            with untouched(model), torch.no_grad():
                values: tuple[Any, ...] = ()
                for stage in stages:
                    np.random.set_state(start[1])
                    random.setstate(start[2])
                    values = stage(example, *values)
            found = tensors_in(values[0])
            if len(found) != len(computed) or not all(map(_is_same, found, computed)):
                raise ModelError(
                    f"{type(model).__name__} cannot be cut before {' and '.join(stage.name for stage in stages[1:])}: "
                    "in stages it computes something else, as where a layer leaves a tensor in a place that a later "
                    "stage reads; let it return the tensor, or choose another strategy."
                )
    finally:
        for module, was_training in modes.items():
            module.training = was_training


def _is_same(found: Tensor, computed: Tensor) -> bool:
    if found.shape != computed.shape or found.dtype != computed.dtype:
        return False
    if not computed.is_floating_point() and not computed.is_complex():
        return torch.equal(found, computed)
    finite = computed.abs().nan_to_num(0.0, 0.0)
    scale = float(finite.max()) if computed.numel() else 1.0
    return torch.allclose(found, computed, rtol=_SAME, atol=_SAME * scale, equal_nan=True)
