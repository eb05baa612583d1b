"""An exponential moving average of a run's weights (Polyak and Juditsky 1992; Tarvainen and Valpola 2017)."""

from __future__ import annotations

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from paceline.errors import JobError
from paceline.parallel import Engine


def averaged(model: nn.Module, engine: Engine, decay: float) -> AveragedModel:
    """A copy of `model` that moves by 1 - decay towards it with every `update_parameters`; buffers are the model's.
    Raises `JobError` for a decay outside of [0, 1), or where workers do not all hold the same whole model."""
    if not 0 <= decay < 1:
        raise JobError(f"run.average({decay!r}) should have a decay of at least 0 and below 1, such as 0.999.")
    if not engine.holds_all or engine.weights_diverge:
        raise JobError(
            "run.average needs the whole model, the same on every worker after every step: the strategy dp and "
            "aggregation.method = 'every_step'."
        )
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    for parameter in average.parameters():
        parameter.requires_grad_(False)
    return average
