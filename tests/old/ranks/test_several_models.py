"""Several models and optimizers in one run: the same results on any number of workers, killed and resumed or not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from paceline.dtensor_type import local_shard
from paceline.env import worker_facts
from paceline.errors import PacelineError
from paceline.spec import Job, Plan
from paceline.train.run import Run
from tests.kit.workers import in_turn, run_ranks

STEPS = 5
SHARDS = 6
DRAW = torch.Generator().manual_seed(3)
SAMPLES = [
    (torch.randn(6, generator=DRAW), torch.randn(2, generator=DRAW)) for _ in range(116)
]  # the last batch is short
Weights = dict[str, np.ndarray[Any, Any]]


# A bias before batch norm has a gradient of rounding alone, of which Adam would make steps.
class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 6)
        )

    def forward(self, noise: Tensor) -> Tensor:
        out: Tensor = self.layers(noise)
        return out


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 16, bias=False))
        self.layers = nn.Sequential(first, nn.BatchNorm1d(16), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(16, 1))

    def forward(self, samples: Tensor) -> Tensor:
        out: Tensor = self.layers(samples)
        return out

    def score(self, samples: Tensor) -> Tensor:
        """A method that computes gradients and is not `forward`."""
        return F.softplus(self(samples)).mean()


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.actor, self.critic = nn.Linear(6, 16), nn.Linear(16, 2), nn.Linear(16, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(state).tanh()
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation (Foret et al. 2021): climb, compute the gradient again, step from where it was."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        before = [p.clone() for p in parameters]
        for p in parameters:
            p.add_(p.grad, alpha=float(0.05 / (norm + 1e-12)))
        self.zero_grad()
        closure()
        for p, old in zip(parameters, before, strict=True):
            p.copy_(old)
            p.add_(p.grad, alpha=-self.param_groups[0]["lr"])


class LostError(Exception):
    """Something that ends a run between the two steps of a batch."""


def _copies(model: nn.Module) -> list[Tensor]:
    return [local_shard(tensor).detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def _gan(run: Run, data: Any, fails_in: int | None = None) -> dict[str, nn.Module]:
    generator: nn.Module = Generator()
    discriminator = Discriminator()
    generator, _ = run.prepare(generator, torch.optim.SGD(generator.parameters(), lr=0.05), name="generator")
    opt_d = torch.optim.Adam(discriminator.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt_d, 0.9)
    discriminator, opt_d = run.prepare(discriminator, opt_d, name="discriminator", scheduler=scheduler)

    def fake(real: Tensor) -> Tensor:
        out: Tensor = generator(torch.randn(len(real), 4, dtype=real.dtype))
        return out

    def loss_d(model: Any, batch: Any) -> Tensor:
        real = batch[0]
        out: Tensor = model.score(-real) + model.score(fake(real))
        return out

    def loss_g(model: nn.Module, batch: Any) -> Tensor:
        real = batch[0]
        if run.steps == fails_in:
            raise LostError
        return F.softplus(-discriminator(model(torch.randn(len(real), 4, dtype=real.dtype)))).mean()

    for batch in run.batches(data):
        before = _copies(generator)
        run.step(batch, loss_d, model=discriminator)
        assert all(torch.equal(one, other) for one, other in zip(before, _copies(generator), strict=True))
        assert all(p.grad is None and p.requires_grad for p in generator.parameters())
        run.step(batch, loss_g, model=generator)
        assert all(p.grad is None for p in discriminator.parameters())
    assert opt_d.param_groups[0]["lr"] == pytest.approx(0.02 * 0.9**run.steps)
    assert generator.training and discriminator.training
    return {"generator": generator, "discriminator": discriminator}


def _actor_critic(run: Run, data: Any) -> dict[str, nn.Module]:
    """Two optimizers over one model, each with a loss of its own and several steps a batch."""
    model = ActorCritic()
    opt_actor = torch.optim.Adam([*model.trunk.parameters(), *model.actor.parameters()], lr=0.01)
    opt_critic = torch.optim.SGD(model.critic.parameters(), lr=0.05, momentum=0.9)
    model, _ = run.prepare(model, [opt_actor, opt_critic], find_unused_parameters=True)

    def loss_actor(model: nn.Module, batch: Any) -> Tensor:
        logits, value = model(batch[0])
        advantage = batch[1][:, 0] - value.detach()
        chosen = torch.distributions.Categorical(logits=logits).sample()
        loss: Tensor = -(logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0] * advantage).mean()
        return loss

    def loss_critic(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0])[1], batch[1][:, 0])

    for batch in run.batches(data):
        actor = _copies(model.trunk)
        for _ in range(2):
            run.step(batch, loss_critic, optimizer=opt_critic)
        assert all(torch.equal(one, other) for one, other in zip(actor, _copies(model.trunk), strict=True))
        run.step(batch, loss_actor, optimizer=opt_actor)
    return {"model": model}


def _distillation(run: Run, data: Any, seed: int = 0) -> dict[str, nn.Module]:
    torch.manual_seed(seed + run.rank)  # rank 0's weights win
    teacher = run.prepare(Discriminator())
    assert not teacher.training and not any(p.requires_grad for p in teacher.parameters())
    student = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))
    encoder, head = student[:3], student[3]
    optimizers = [torch.optim.AdamW(encoder.parameters(), lr=0.01), torch.optim.SGD(head.parameters(), lr=0.1)]
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in optimizers]
    student, _ = run.prepare(student, optimizers, scheduler=schedulers)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            target = teacher(batch[0])
        return F.mse_loss(model(batch[0]), target)

    for batch in run.batches(data):
        run.step(batch, loss_fn)
    return {"student": student, "teacher": teacher}


def _sam(run: Run, data: Any) -> dict[str, nn.Module]:
    model: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 2))
    model, _ = run.prepare(model, SAM(model.parameters(), lr=0.1))
    for batch in run.batches(data):
        run.step(batch, lambda model, batch: F.mse_loss(model(batch[0]), batch[1]))
    return {"model": model}


CASES: dict[str, Callable[[Run, Any], dict[str, nn.Module]]] = {
    "gan": _gan,
    "actor_critic": _actor_critic,
    "distillation": _distillation,
    "sam": _sam,
}


def _job(parity: str, seed: int = 0) -> tuple[Job, Plan]:
    values = {"parity": parity, "precision": "float32" if parity == "bitwise" else "float64", "seed": seed}
    job = Job.from_mapping(
        {"global_batch_size": 24, "virtual_shards": SHARDS, "epochs": 1, "checkpoint": {"every_steps": 1}, **values}
    )
    algorithm: Any = "tree_exact" if parity == "bitwise" else "all_reduce"
    return job, Plan(world_size=worker_facts().world_size, algorithm=algorithm, timeout_s=120)


def _data(parity: str) -> Any:
    return SAMPLES if parity == "bitwise" else [(one.double(), other.double()) for one, other in SAMPLES]


def _train(
    case: str,
    parity: str,
    folder: str | None = None,
    max_steps: int = STEPS,
    fails_in: int = -1,
    strategy: str | None = None,
) -> Weights:
    job, plan = _job(parity)
    spread: dict[str, Any] = {"plan": plan} if strategy is None else {"strategy": strategy}
    with paceline.init(job, max_steps=max_steps, checkpoint_dir=folder, **spread) as run:
        models = CASES[case](run, _data(parity)) if fails_in < 0 else _gan(run, _data(parity), fails_in)
        return _weights(run, models)


def _weights(run: Run, models: dict[str, nn.Module]) -> Weights:
    found: Weights = {}
    for name, model in models.items():
        state = model.state_dict() if name == "teacher" else run.whole_state(model)
        found |= {f"{name}.{key}": value.detach().cpu().numpy().copy() for key, value in state.items()}
    return found


def _all(cases: list[tuple[str, str]]) -> list[Weights]:
    return in_turn(_train, cases)


def _differ(one: Weights, other: Weights) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(value.astype(np.float64) - other[name]).max()) for name, value in one.items())


@pytest.mark.timeout(600)
def test_every_number_of_workers_learns_the_same() -> None:
    cases = [(case, parity) for case in CASES for parity in ("bitwise", "numeric")]
    (alone,) = run_ranks(_all, 1, cases, timeout_s=300)
    for world_size in (2, 3):
        for of_worker in run_ranks(_all, world_size, cases, timeout_s=300):
            for (case, parity), expected, found in zip(cases, alone, of_worker, strict=True):
                most = 0.0 if parity == "bitwise" else 1e-12
                assert _differ(expected, found) <= most, (case, parity, world_size)


def _plain_gan() -> Weights:
    """The loop that a script without Paceline would have, on one virtual shard."""
    job, plan = _job("numeric")
    job = Job.from_mapping(job.to_mapping() | {"virtual_shards": 1})
    found: list[Weights] = []
    with paceline.init(job, plan=plan, max_steps=STEPS) as run:
        model: nn.Module = nn.Linear(6, 3)
        other: nn.Module = nn.Linear(3, 6)
        mirror = copy.deepcopy(model).double(), copy.deepcopy(other).double()
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        other, _ = run.prepare(other, torch.optim.SGD(other.parameters(), lr=0.2))
        opts = [torch.optim.SGD(one.parameters(), lr=lr) for one, lr in zip(mirror, (0.1, 0.2), strict=True)]

        def loss(first: nn.Module, last: nn.Module, batch: Any) -> Tensor:
            return F.mse_loss(last(first(batch[0]).tanh()), batch[0])

        for batch in run.batches(_data("numeric")):
            run.step(batch, lambda stepped, batch: loss(stepped, other, batch), model=model)
            run.step(batch, lambda stepped, batch: loss(model, stepped, batch), model=other)
            for opt in opts:
                for each in mirror:
                    each.zero_grad()
                loss(*mirror, batch).backward()
                opt.step()
        for pair in ((model, other), mirror):
            states = [one.state_dict().items() for one in pair]
            found.append({f"{n}{name}": v.numpy() for n, state in enumerate(states) for name, v in state})
    assert _differ(*found) < 1e-12
    return found[0]


def test_steps_are_those_of_a_plain_loop() -> None:
    _plain_gan()


def _broken_off(folders: dict[str, str]) -> None:
    for case, folder in folders.items():
        if case == "gan":
            with pytest.raises(LostError):
                _train(case, "bitwise", folder, fails_in=3)
        else:
            _train(case, "bitwise", folder, max_steps=2)


def _gone_on(folders: dict[str, str]) -> list[Weights]:
    return [_train(case, "bitwise", folder) for case, folder in folders.items()]


def _other_models(folders: dict[str, str]) -> list[str]:
    said = []
    for change in ("one model", "another teacher"):
        job, plan = _job("bitwise")
        case = "gan" if change == "one model" else "distillation"
        with (
            pytest.raises(PacelineError) as refused,
            paceline.init(job, plan=plan, checkpoint_dir=folders[case]) as run,
        ):
            if change == "one model":
                generator = Generator()
                run.prepare(generator, torch.optim.SGD(generator.parameters(), lr=0.05), name="generator")
                next(iter(run.batches(SAMPLES)))
            else:
                _distillation(run, SAMPLES, seed=5)
        said.append(str(refused.value))
    return said


@pytest.mark.timeout(600)
def test_a_run_that_was_broken_off_goes_on_exactly(tmp_path: Path) -> None:
    """The GAN fails between the two steps of its fourth batch: nothing of that batch is in the checkpoint."""
    folders = {case: str(tmp_path / case) for case in CASES if case != "sam"}
    expected = run_ranks(_all, 1, [(case, "bitwise") for case in folders], timeout_s=200)[0]
    run_ranks(_broken_off, 2, folders, timeout_s=200)
    assert [path.name for path in (tmp_path / "gan").glob("step-*")]
    one_model, teacher = run_ranks(_other_models, 1, folders, timeout_s=200)[0]
    assert "has a model 'discriminator', which this run has not prepared" in one_model
    assert "The frozen model 'model' does not have the weights" in teacher
    for found in run_ranks(_gone_on, 3, folders, timeout_s=200):
        for one, other in zip(expected, found, strict=True):
            assert _differ(one, other) == 0.0


def _spread(folder: str) -> dict[str, Weights]:
    found = {
        f"{case} {strategy}": _train(case, "numeric", strategy=strategy)
        for case in ("gan", "actor_critic", "distillation")
        for strategy in ("fsdp",)
    }
    _train("gan", "numeric", folder, max_steps=2, strategy="fsdp")
    found["gan resumed"] = _train("gan", "numeric", folder, strategy="fsdp")
    return found


@pytest.mark.timeout(600)
def test_sharded_models_learn_the_same(tmp_path: Path) -> None:
    cases = [(case, "numeric") for case in ("gan", "actor_critic", "distillation")]
    (alone,) = run_ranks(_all, 1, cases, timeout_s=200)
    expected = {case: found for (case, _), found in zip(cases, alone, strict=True)}
    for found in run_ranks(_spread, 2, str(tmp_path), timeout_s=300)[:1]:
        for name, weights in found.items():
            assert _differ(expected[name.split()[0]], weights) <= 1e-12, name


def _in_shards() -> dict[str, Weights]:
    cases = [
        *((case, "bitwise", strategy) for case in ("gan", "actor_critic") for strategy in ("fsdp", "zero1", "zero2")),
        *(("gan", "numeric", strategy) for strategy in ("zero1", "zero2")),
    ]
    found = in_turn(lambda model, parity, strategy: _train(model, parity, strategy=strategy), cases)
    return {" ".join(case): weights for case, weights in zip(cases, found, strict=True)}


@pytest.mark.timeout(600)
def test_gathered_parameters_of_other_models_leave_no_trace() -> None:
    """Neither that they were frozen while another model was trained, nor a gradient."""
    cases = [(case, parity) for case in ("gan", "actor_critic") for parity in ("bitwise", "numeric")]
    expected = dict(zip(map(" ".join, cases), run_ranks(_all, 1, cases, timeout_s=200)[0], strict=True))
    for name, weights in run_ranks(_in_shards, 2, timeout_s=300)[0].items():
        case, parity, _ = name.split()
        assert _differ(expected[f"{case} {parity}"], weights) <= (0.0 if parity == "bitwise" else 1e-12), name


class Around(nn.Module):
    """A model with a method that computes gradients without its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(3)), nn.Linear(6, 3)

    def forward(self, values: Tensor) -> Tensor:
        out: Tensor = self.layer(values) * self.scale
        return out

    def training_step(self, batch: Any) -> Tensor:
        out: Tensor = (self.layer(batch[0]) * self.scale).square().mean()
        return out


def _around(strategy: str | None) -> list[float]:
    """The difference from a plain step on the whole batch, computed by each worker for itself."""
    data = _data("numeric")
    job, plan = _job("numeric")
    spread: dict[str, Any] = {"plan": plan} if strategy is None else {"strategy": strategy}
    with paceline.init(Job.from_mapping(job.to_mapping() | {"global_batch_size": 116}), **spread) as run:
        model = Around()
        plain = copy.deepcopy(model).double()
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        plain.training_step((torch.stack([one for one, _ in data]),)).backward()
        torch.optim.SGD(plain.parameters(), lr=0.5).step()
        for batch in run.batches(data):
            run.step(batch, lambda model, batch: cast(Around, model).training_step(batch))
        return [float((one - two).abs().max()) for one, two in zip(model.parameters(), plain.parameters(), strict=True)]


def _with_teacher(strategy: str) -> list[np.ndarray[Any, Any]]:
    torch.manual_seed(1)
    job, plan = _job("numeric")
    with paceline.init(job, max_steps=2, **({"strategy": strategy} if strategy != "dp" else {"plan": plan})) as run:
        student: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        teacher = run.prepare(nn.Linear(6, 1))
        example = torch.randn(4, 6, dtype=torch.float64)
        student, _ = run.prepare(student, torch.optim.SGD(student.parameters(), lr=0.1), example=example)
        for batch in run.batches(_data("numeric")):
            run.step(batch, lambda model, batch: F.mse_loss(model(batch[0]), teacher(batch[0])))
        return [value.detach().cpu().numpy().copy() for value in run.whole_state().values()]


def _refused(what: str) -> str:
    job, plan = _job("numeric")
    values = {"aggregation": {"method": "local_sgd"}} if what == "local_sgd" else {}
    job = Job.from_mapping(job.to_mapping() | values)
    spread: dict[str, Any] = {"strategy": "pp"} if what == "pp" else {"plan": plan}
    with pytest.raises(PacelineError) as refused, paceline.init(job, **spread) as run:
        first = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        other = first[2] if what == "shared" else nn.Linear(6, 1)
        opt, second = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (first, other))
        schedulers: dict[str, Any] = {
            "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(opt),
            "another's scheduler": torch.optim.lr_scheduler.StepLR(second, 2),
        }
        example = torch.randn(4, 6, dtype=torch.float64)
        first, _ = run.prepare(first, opt, scheduler=schedulers.get(what), example=example)
        if what == "late":
            next(iter(run.batches(_data("numeric"))))
        run.prepare(other, second, name="model" if what == "name" else None)
        for batch in run.batches(_data("numeric")):
            run.step(
                batch, lambda model, batch: model(batch[0]).mean(), model=nn.Linear(1, 1) if what == "model" else None
            )
    return str(refused.value)


REFUSED = {
    "pp": "cannot have several models: with the strategy pp2",
    "local_sgd": "cannot have several models: with aggregation.method = 'local_sgd'",
    "shared": "belongs to the model 'model' already",
    "plateau": "needs a metric",
    "another's scheduler": "belongs to another optimizer",
    "late": "call run.prepare for every model before run.batches",
    "name": "has a model called 'model' already",
    "model": "a model that run.prepare did not return",
    "which": "trains several models (model, model 2); say which",
}


def _odds_and_ends() -> tuple[list[float], str, list[list[np.ndarray[Any, Any]]], dict[str, str]]:
    said = {what: _refused(what) for what in REFUSED}
    with pytest.raises(PacelineError) as refused:
        _around("fsdp")
    return _around(None), str(refused.value), [_with_teacher(one) for one in ("dp", "pp", "fsdp")], said


@pytest.mark.timeout(400)
def test_methods_teachers_and_what_is_refused() -> None:
    (differences, under_fsdp, with_teacher, said), _ = run_ranks(_odds_and_ends, 2, timeout_s=300)
    assert max(differences) < 1e-12
    assert "without calling the model, whose forward pass gathers their shards under fsdp" in under_fsdp
    for other in with_teacher[1:]:
        for one, two in zip(with_teacher[0], other, strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-12, atol=1e-14)
    for what, sentence in REFUSED.items():
        assert sentence in said[what], said[what]
