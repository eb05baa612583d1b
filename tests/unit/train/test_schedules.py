"""Learning rates count samples, so that neither the batch size nor the number of workers moves a schedule;
optimizers and schedulers are built as a job names them, and a mistake is named."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import JobError, ModelError
from paceline.spec import Job
from paceline.train.optim import build_optimizer, build_scheduler

RATE = 0.5
SIZE = 48


def rates_of(
    epochs: int,
    batch: int,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    *,
    model: nn.Module | None = None,
    **optim: Any,
) -> list[float]:
    """The learning rate of each step."""
    found = []
    with paceline.init(global_batch_size=batch, virtual_shards=1, epochs=epochs, optim=optim, progress=False) as run:
        model = model or nn.Linear(1, 1)
        made = torch.optim.SGD(model.parameters(), lr=RATE) if optimizer is None else optimizer(model)
        run.prepare(model, made)
        for batch_ in run.batches(TensorDataset(torch.zeros(SIZE, 1))):
            run.step(batch_, lambda model, shard: model(shard[0].to(model.bias.dtype)).mean())
            found.append(run.optimizer.param_groups[0]["lr"])
    return found


FACTORS: dict[str, tuple[dict[str, Any], Callable[[float], float]]] = {
    "constant": ({}, lambda _: 1.0),
    "linear": ({"schedule": "linear"}, lambda epoch: 1 - epoch / 4),
    "cosine": ({"schedule": "cosine"}, lambda epoch: 0.5 * (1 + math.cos(math.pi * epoch / 4))),
    "step": (
        {"schedule": "step", "step_epochs": [1, 3], "step_factor": 0.1},
        lambda epoch: 0.1 ** sum(epoch >= at for at in (1, 3)),
    ),
}


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("batch", [8, 12, 48])
def test_a_schedule_is_a_function_of_the_samples_seen(name: str, batch: int) -> None:
    optim, factor = FACTORS[name]
    steps = 4 * SIZE // batch
    assert rates_of(4, batch, **optim) == pytest.approx([RATE * factor(step * batch / SIZE) for step in range(steps)])


@pytest.mark.parametrize("batch", [8, 12])
def test_a_warmup_rises_from_zero_to_the_end_of_its_samples(batch: int) -> None:
    found = rates_of(3, batch, warmup_epochs=2.0)
    assert found == pytest.approx([RATE * min(1, (step + 1) * batch / (2 * SIZE)) for step in range(len(found))])


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
def test_a_base_batch_scales_the_rate_by_its_rule(rule: str, factor: float) -> None:
    found = rates_of(1, 16, base_batch_size=4, lr_scaling=rule)
    assert found == pytest.approx([RATE * factor] * 3)


def test_a_warmup_to_a_scaled_rate_starts_at_the_unscaled_one() -> None:
    """Goyal et al. 2017, section 2.2."""
    found = rates_of(3, 16, base_batch_size=4, lr_scaling="linear", warmup_epochs=2.0)
    assert found == pytest.approx([RATE * (1 + 3 * min(1, (step + 1) / 6)) for step in range(9)])
    assert RATE < found[0] < found[1] < found[5] == 4 * RATE


def test_each_group_keeps_its_share_of_the_rate() -> None:
    def groups(model: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.SGD(
            [{"params": [p], "lr": lr} for p, lr in zip(model.parameters(), (0.1, 0.4), strict=True)]
        )
        kept.append(made)
        return made

    kept: list[torch.optim.Optimizer] = []
    found = rates_of(2, 48, groups, schedule="linear")
    assert found == pytest.approx([0.1, 0.05])
    assert kept[0].param_groups[1]["lr"] == pytest.approx(0.2)


def test_a_group_that_is_added_on_the_way_follows_the_schedule_from_its_own_rate() -> None:
    class Growing(torch.optim.SGD):
        """Gets a second group in its first step."""

        def __init__(self, first: nn.Parameter, late: nn.Parameter) -> None:
            super().__init__([first], lr=0.1)
            self.late = late

        def step(self, closure: Any = None) -> Any:
            if len(self.param_groups) == 1:
                self.add_param_group({"params": [self.late], "lr": 0.4})
            return super().step(closure)

    def growing(model: nn.Module) -> torch.optim.Optimizer:
        kept.append(Growing(*model.parameters()))
        return kept[0]

    kept: list[torch.optim.Optimizer] = []
    assert rates_of(2, SIZE, growing, schedule="linear") == pytest.approx([0.1, 0.05])
    assert kept[0].param_groups[1]["lr"] == pytest.approx(0.2)


def test_a_group_that_is_added_to_the_first_of_two_optimizers_leaves_the_rates_of_the_second() -> None:
    layers = nn.Linear(1, 1), nn.Linear(1, 1)
    optim = {"schedule": "linear"}
    with paceline.init(global_batch_size=SIZE, virtual_shards=1, epochs=2, optim=optim, progress=False) as run:
        first, second = SGD([layers[0].weight], lr=0.1), AdamW(layers[1].parameters(), lr=0.01)
        run.prepare(nn.Sequential(*layers), [first, second])
        for batch in run.batches(TensorDataset(torch.zeros(SIZE, 1))):
            if run.steps:
                first.add_param_group({"params": [layers[0].bias], "lr": 0.04})
            run.step(batch, lambda model, shard: model(shard[0]).mean())
    assert [group["lr"] for group in (*first.param_groups, *second.param_groups)] == pytest.approx([0.05, 0.02, 0.005])
    assert second.param_groups[0]["fused"]  # as if it were the only one


class WithoutRate(torch.optim.Optimizer):
    """Without a learning rate."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": None})

    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        pass


class Around(torch.optim.Optimizer):
    """Has no groups of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


def test_a_schedule_for_an_optimizer_without_a_rate_is_refused() -> None:
    assert rates_of(1, 48, lambda model: WithoutRate(model.parameters())) == [None]
    with pytest.raises(ModelError, match="WithoutRate"):
        rates_of(1, 48, lambda model: WithoutRate(model.parameters()), schedule="cosine")
    with pytest.raises(ModelError, match="Around"):
        rates_of(1, 48, lambda model: Around(model.parameters()), schedule="cosine")


# --- optimizers and schedulers by name ---


def spec(**values: Any) -> Any:
    return Job.from_mapping({"optim": values}).optim


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


@pytest.mark.parametrize("name", ["sgd", "Adam", "AdamW", "adagrad", "RMSprop", "nadam", "radam", "adamax", "adadelta"])
def test_an_optimizer_of_torch_makes_its_own_step(name: str) -> None:
    kind: Any = next(one for word, one in vars(torch.optim).items() if word.lower() == name.lower() and callable(one))
    built, plain = net(), net()
    made = build_optimizer(spec(name=name, lr=0.01), built)
    assert type(made).__name__ == kind.__name__
    options = {key: value for key, value in made.param_groups[0].items() if key in ("weight_decay", "momentum")}
    for model, optimizer in ((built, made), (plain, kind(plain.parameters(), lr=0.01, **options))):
        model(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
    for one, other in zip(built.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float, beta: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})


def test_weights_of_16_bits_are_updated_as_in_a_plain_loop() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(1, 64).bfloat16()
    ours = copy.deepcopy(plain)
    rates_of(8, SIZE, lambda model: torch.optim.AdamW(model.parameters(), lr=0.01), model=ours)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for _ in range(8):
        optimizer.zero_grad()
        plain(torch.zeros(SIZE, 1).bfloat16()).mean().backward()
        optimizer.step()
    assert torch.equal(ours.bias, plain.bias)


def test_an_optimizer_of_ones_own_gets_its_options_and_groups() -> None:
    groups = {"2.*": {"lr": 0.5}, "*.bias": {"beta": 0.1}}
    made = build_optimizer(
        spec(name=f"{__name__}:Lion", lr=0.01, weight_decay=0.1, options={"beta": 0.8}, groups=groups), net()
    )
    assert type(made) is Lion
    found = [(len(group["params"]), group["lr"], group["beta"]) for group in made.param_groups]
    assert found == [(2, 0.01, 0.8), (2, 0.01, 0.1), (2, 0.5, 0.8)]


def test_norms_and_biases_are_not_decayed_where_the_job_says_so_and_frozen_ones_are_left_out() -> None:
    model, no_decay = net(), spec(name="adamw", weight_decay=0.1, decay_norms_and_biases=False)
    decayed, others = build_optimizer(no_decay, model).param_groups
    assert [parameter.dim() for parameter in decayed["params"]] == [2, 2] and decayed["weight_decay"] == 0.1
    assert [parameter.dim() for parameter in others["params"]] == [1] * 4 and others["weight_decay"] == 0.0
    model[2].requires_grad_(False)
    assert sum(len(group["params"]) for group in build_optimizer(no_decay, model).param_groups) == 4


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"name": "adamm"}, ["adamm", "did you mean 'adam"]),
        ({"name": "adagrad", "options": {"lrdecay": 1}}, ["lrdecay", "did you mean 'lr_decay'"]),
        ({"name": "sgd", "momentum": 0.0, "options": {"nesterov": True}}, ["sgd", "momentum"]),
        ({"groups": {"head.*": {"lr": 1}}}, ["head.*", "parameter"]),
        ({"groups": {"0.*": {"rate": 1}}}, ["rate"]),
        ({"name": "nowhere.at_all:Lion"}, ["nowhere"]),
        ({"name": "torch.optim:Lionn"}, ["Lionn"]),
        ({"name": "torch.nn:Linear"}, ["lr"]),
    ],
)
def test_a_mistake_in_an_optimizer_is_named_in_one_line(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(JobError) as caught:
        build_optimizer(spec(**values), net())
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_scheduler_of_torch_knows_the_number_of_steps_and_a_mistake_is_named() -> None:
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    once: Any = {"name": "torch.optim.lr_scheduler:OneCycleLR", "options": {"max_lr": 0.2}}
    made: Any = build_scheduler(spec(scheduler=once).scheduler, optimizer, 30)
    assert made.total_steps == 30
    for name, options, word in (
        ("torch.optim.lr_scheduler:StepLR", {"steps": 1}, "step_size"),
        ("torch.optim.lr_scheduler:ReduceLROnPlateau", {}, "metric"),
    ):
        with pytest.raises(JobError, match=word):
            build_scheduler(spec(scheduler={"name": name, "options": options}).scheduler, optimizer, 30)
    with pytest.raises(JobError, match="schedule"):
        spec(schedule="cosine", scheduler={"name": "a:b"})
