"""Optimizers and schedulers that a job names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import JobError
from paceline.spec import Job
from paceline.spec.optim import OptimSpec
from paceline.train.optimizers.optim import build_optimizer, build_scheduler, parameter_groups


def _spec(**values: Any) -> OptimSpec:
    return Job.from_mapping({"optim": values}).optim


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


@pytest.mark.parametrize(
    "name", ["sgd", "Adam", "AdamW", "adagrad", "RMSprop", "nadam", "radam", "adamax", "adadelta", "torch.optim:Rprop"]
)
def test_any_optimizer_of_torch_makes_a_step(name: str) -> None:
    model = _model()
    optimizer = build_optimizer(_spec(name=name, lr=0.01), model)
    assert type(optimizer).__name__.lower() == name.split(":")[-1].lower()
    before = model[0].weight.detach().clone()  # type: ignore[index]
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(before, model[0].weight)  # type: ignore[index]


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float, beta: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})


def test_an_optimizer_of_ones_own_with_options_and_groups() -> None:
    groups = {"2.*": {"lr": 0.5}, "*.bias": {"beta": 0.1}}
    spec = _spec(name=f"{__name__}:Lion", lr=0.01, weight_decay=0.1, options={"beta": 0.8}, groups=groups)
    optimizer = build_optimizer(spec, _model())
    assert isinstance(optimizer, Lion)
    found = [(len(group["params"]), group["lr"], group["beta"]) for group in optimizer.param_groups]
    assert found == [(2, 0.01, 0.8), (2, 0.01, 0.1), (2, 0.5, 0.8)]


def test_no_decay_for_norms_and_biases() -> None:
    model = _model()
    spec = _spec(name="adamw", weight_decay=0.1, decay_norms_and_biases=False)
    decayed, others = build_optimizer(spec, model).param_groups
    assert [parameter.dim() for parameter in decayed["params"]] == [2, 2] and decayed["weight_decay"] == 0.1
    assert [parameter.dim() for parameter in others["params"]] == [1] * 4 and others["weight_decay"] == 0.0
    model[2].requires_grad_(False)  # type: ignore[index]
    assert sum(len(group["params"]) for group in parameter_groups(spec, model)) == 4


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"name": "adamm"}, "There is no optimizer 'adamm': did you mean 'adam"),
        ({"name": "adagrad", "options": {"lrdecay": 1}}, "has no option 'lrdecay': did you mean 'lr_decay'"),
        ({"groups": {"head.*": {"lr": 1}}}, "the pattern 'head.\\*' fits no trainable parameter"),
        ({"groups": {"0.*": {"rate": 1}}}, "has no option 'rate'"),
        ({"name": "nowhere.at_all:Lion"}, "there is no module 'nowhere'"),
        ({"name": "torch.optim:Lionn"}, "has no 'Lionn'"),
        ({"name": "torch.nn:Linear"}, "has no option 'lr'"),
    ],
)
def test_refusals_are_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(JobError, match=sentence) as refused:
        build_optimizer(_spec(**values), _model())
    assert "\n" not in str(refused.value)


def test_schedulers() -> None:
    optimizer = torch.optim.SGD(_model().parameters(), lr=0.1)
    spec = _spec(scheduler={"name": "torch.optim.lr_scheduler:OneCycleLR", "options": {"max_lr": 0.2}}).scheduler
    assert build_scheduler(spec, optimizer, 30).total_steps == 30  # type: ignore[attr-defined]
    for name, options, sentence in (
        ("torch.optim.lr_scheduler:StepLR", {"steps": 1}, "has no option 'steps': did you mean 'step_size'"),
        ("torch.optim.lr_scheduler:ReduceLROnPlateau", {}, "needs a metric"),
        ("torch.nn:Linear", {"in_features": 1}, "no scheduler|has no option"),
    ):
        spec = _spec(scheduler={"name": name, "options": options}).scheduler
        with pytest.raises((JobError, TypeError), match=sentence):
            build_scheduler(spec, optimizer, 30)
    with pytest.raises(JobError, match="sets the learning rate by itself"):
        _spec(schedule="cosine", scheduler={"name": "a:b"})
