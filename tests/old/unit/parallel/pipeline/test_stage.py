"""A stage as a module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.errors import ModelError
from paceline.parallel.pipeline.calls import ModelCall
from paceline.parallel.pipeline.recorder import record
from paceline.parallel.pipeline.stage import Stage, Stages


def test_parameters_come_in_the_models_order_in_every_process() -> None:
    """Python sorts a set of names differently in each, and workers who have the same stage sum by position."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))
    stage = Stage(record(model, ModelCall((torch.zeros(2, 4),))), 0, 12)
    assert [name for name, _ in stage.named_parameters()] == [name for name, _ in model.named_parameters()]


def test_layers_of_a_model_in_stages_are_not_reached_by_number() -> None:
    with pytest.raises(ModelError, match=r"model\[0\], and a worker of a pipeline has some layers"):
        Stages([], None, ())[0]


def test_what_a_model_in_stages_has_no_more_is_named_where_a_script_reaches_for_it() -> None:
    stages = Stages([], None, {"scale", "generate"})
    with pytest.raises(ModelError, match=r"uses model\.scale, and a worker of a pipeline has some layers"):
        stages.scale.clamp_(0, 1)
    assert not hasattr(stages, "generate")
    with pytest.raises(AttributeError, match="no attribute 'size'"):
        _ = stages.size


def test_a_model_with_an_attribute_that_is_called_stages() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    stages = Stages([Stage(record(model, ModelCall((torch.zeros(2, 4),))), 0, 2)], None, {"stages"})
    assert [name for name, _ in stages.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert stages.state_dict().keys() == model.state_dict().keys()
    with pytest.raises(ModelError, match=r"uses model\.stages"):
        _ = stages.stages
