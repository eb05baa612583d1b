"""Models, losses and scripts that take unusual paths: still the same result on any number of workers."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.errors import DataError, JobError, ModelError
from paceline.spec import Job, PipelineSpec, Plan
from tests.kit.workers import run_ranks
from tests.old.ranks.training import images, loss_fn, measure

PARITIES = pytest.mark.parametrize("parity", ["numeric", "bitwise"])
Losses = list[float]
Weights = dict[str, np.ndarray[Any, Any]]
Loss = Callable[[nn.Module, Any], Tensor]


def _train(
    build: Callable[[], nn.Module],
    values: dict[str, Any],
    loss: Loss = loss_fn,
    find_unused_parameters: bool = False,
    num_samples: int = 13,
) -> tuple[Losses, Weights]:
    """Three steps of `build()`; 13 samples in batches of 6 leave a last batch of one sample, and idle workers."""
    job = Job.from_mapping(
        {"global_batch_size": 6, "virtual_shards": 3, "precision": "float64", "optim": {"clip_norm": 1.0}} | values
    )
    algorithm: Any = "tree_exact" if job.parity == "bitwise" else "all_reduce"
    plan = Plan(world_size=worker_facts().world_size, algorithm=algorithm, timeout_s=30)
    with paceline.init(job, plan=plan, max_steps=3) as run:
        model = build()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.1)
        run.prepare(model, optimizer, find_unused_parameters=find_unused_parameters)
        losses = [float(run.step(batch, loss)) for batch in run.batches(images(num_samples))]
        weights: Weights = {name: value.numpy().copy() for name, value in run.model.state_dict().items()}
        return losses, weights


def _same_on(world_sizes: tuple[int, ...], *args: Any, **kwargs: Any) -> Weights:
    """Train alone and on each of `world_sizes`; all agree, bit for bit if that was asked for."""
    train = partial(_train, *args, **kwargs)
    losses: Losses
    weights: Weights
    ((losses, weights),) = run_ranks(train, 1)
    assert np.isfinite(losses).all()
    tolerance = 0.0 if args[1].get("parity") == "bitwise" else 1e-9
    for world_size in world_sizes:
        for their_losses, theirs in run_ranks(train, world_size):
            np.testing.assert_allclose(their_losses, losses, rtol=tolerance)
            for name, value in weights.items():
                np.testing.assert_allclose(theirs[name], value, rtol=tolerance, atol=tolerance, err_msg=name)
    return weights


class _Convolution(nn.Module):
    """A convolution, a norm and a head; subclasses go through them in their own ways."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 3, 1)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(192, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self._head(self._block(x))

    def _block(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.convolution(x)))

    def _head(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(x.flatten(1))
        return output


class _OneNormInTwoPlaces(_Convolution):
    def __init__(self) -> None:
        super().__init__()
        self.same_norm = self.norm

    def forward(self, x: Tensor) -> Tensor:
        return self._head(self.same_norm(self.convolution(self._block(x))))


class _Checkpointed(_Convolution):
    def forward(self, x: Tensor) -> Tensor:
        return self._head(checkpoint(self._block, x, use_reentrant=False))


class _DrawsInPythonAndNumPy(_Convolution):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (random.random() + float(np.random.rand()))


class _TwoHeads(_Convolution):
    """The second head is for training alone, as in Inception and its like."""

    def __init__(self, used: bool = True) -> None:
        super().__init__()
        self.second_head = nn.Linear(192, 10)
        self._used = used

    def _head(self, x: Tensor) -> Tensor:
        output = super()._head(x)
        return output + self.second_head(x.flatten(1)) if self._used and self.training else output


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(192, 192, bias=False), nn.Linear(192, 192, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(192, 10)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(x.flatten(1))))))
        return output


def _frozen() -> nn.Module:
    model = _Convolution()
    model.convolution.requires_grad_(False)
    return model


@PARITIES
@pytest.mark.parametrize("build", [_OneNormInTwoPlaces, _DrawsInPythonAndNumPy, _TwoHeads, _Tied, _frozen])
def test_unusual_models_agree_on_any_number_of_workers(build: Callable[[], nn.Module], parity: str) -> None:
    _same_on((3,), build, {"parity": parity})


@PARITIES
def test_activation_checkpointing_leaves_the_norms_statistics_alone(parity: str) -> None:
    plain = _same_on((2,), _Convolution, {"parity": parity})
    checkpointed = _same_on((2,), _Checkpointed, {"parity": parity})
    for name, value in plain.items():
        np.testing.assert_allclose(checkpointed[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


@PARITIES
def test_a_parameter_that_nobody_uses_is_left_alone(parity: str) -> None:
    weights = _same_on((2,), partial(_TwoHeads, used=False), {"parity": parity}, find_unused_parameters=True)
    random.seed(0)
    torch.default_generator.manual_seed(0)  # as the run's seed does
    untouched = _TwoHeads().second_head.weight.detach().double()
    np.testing.assert_array_equal(weights["second_head.weight"], untouched)


def test_a_parameter_without_a_gradient_is_named() -> None:
    with pytest.raises(AssertionError, match=r"'second_head\.weight' got no gradient.*find_unused_parameters=True"):
        run_ranks(partial(_train, partial(_TwoHeads, used=False), {}), 2)


def _one_shard_overflows(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    losses = F.cross_entropy(model(inputs), targets, reduction="none")
    return torch.where(targets == 3, losses * 1e38, losses).mean()


@PARITIES
def test_an_overflow_on_one_worker_makes_all_of_them_skip_the_step(parity: str) -> None:
    train = partial(_train, _Tied, {"precision": "float16", "parity": parity}, _one_shard_overflows, num_samples=18)
    (alone,) = run_ranks(train, 1)
    for spread in run_ranks(train, 3):
        np.testing.assert_allclose(spread[0], alone[0], rtol=1e-2)
        for name, value in alone[1].items():
            assert np.isfinite(value).all()
            np.testing.assert_allclose(spread[1][name], value, atol=1e-2, err_msg=name)


def test_gradients_are_clipped_by_their_norm_without_the_loss_scale() -> None:
    """Every second step measures noise, for which the norm of the scaled gradient is known already."""
    clipped = {"optim": {"clip_norm": 0.1}}
    ((_, exact),) = run_ranks(partial(_train, _Tied, clipped, num_samples=18), 1)
    for _, weights in run_ranks(partial(_train, _Tied, clipped | {"precision": "float16"}, num_samples=18), 2):
        for name, value in exact.items():
            np.testing.assert_allclose(weights[name], value, atol=1e-3, err_msg=name)


class _OverflowsOnStandIns(_Convolution):
    """Once trained for a step, one sample without normalisation is too much: what idle workers compute is infinite."""

    def _block(self, x: Tensor) -> Tensor:
        normalised: Tensor = self.norm(self.convolution(x))
        return normalised if self.norm.training else normalised / 0.0


def test_what_an_idle_worker_computes_counts_for_nothing() -> None:
    _same_on((3,), _OverflowsOnStandIns, {})


def _two_runs_and_an_evaluation_after_them() -> list[Any]:
    seen: list[Any] = []
    for parity in ("bitwise", "numeric"):
        algorithm: Any = "tree_exact" if parity == "bitwise" else "all_reduce"
        plan = Plan(world_size=worker_facts().world_size, algorithm=algorithm, threads_per_worker=2, timeout_s=30)
        with paceline.init(global_batch_size=8, seed=1, parity=parity, precision="float64", plan=plan) as run:
            run.prepare(net := _Convolution(), torch.optim.SGD(net.parameters(), lr=0.1))
            seen += [float(run.step(batch, loss_fn)) for batch in run.batches(images(20))]
            assert torch.are_deterministic_algorithms_enabled() == (parity == "bitwise")
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.get_num_threads() == 1
    return [*seen, *run.evaluate(images(5), measure).values()]


def test_one_process_can_run_twice_and_evaluate_after_the_run() -> None:
    (alone,) = run_ranks(_two_runs_and_an_evaluation_after_them, 1)
    for spread in run_ranks(_two_runs_and_an_evaluation_after_them, 2):
        assert spread == pytest.approx(alone, rel=1e-9)


def _in_a_group_of_the_users() -> bool:
    facts = worker_facts()
    dist.init_process_group("gloo", init_method=facts.init_method, rank=facts.rank, world_size=facts.world_size)
    _train(_Convolution, {})
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return bool(ones == 2)


def test_a_process_group_of_the_users_survives_the_run() -> None:
    assert run_ranks(_in_a_group_of_the_users, 2) == [True, True]


def _evaluations() -> tuple[Any, ...]:
    """Two sets one after the other in the same memory, a metric that draws, a layer that the user froze."""

    def brightness(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"value": batch[0].flatten(1).mean(1), "drawn": torch.rand(len(batch[0]))}

    with paceline.init(global_batch_size=8, eval_batch_size=2) as run:
        net = _Convolution()
        run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for batch in run.batches(images(20)):
            run.step(batch, loss_fn)
        run.model.get_submodule("norm").eval()
        # Per-device statistics differ from worker to worker, but one model is evaluated.
        statistics = run.model.state_dict()
        agreed = run.evaluate(
            images(5), lambda _, batch: {"mean": statistics["norm.running_mean"][:1].repeat(len(batch[0]))}
        )
        values = [run.evaluate(images(n), brightness) for n in (3, 4, 3)]
        modes = run.model.training, run.model.get_submodule("norm").training
        return (
            values,
            modes,
            float(torch.rand(())),
            agreed["mean"] == pytest.approx(float(statistics["norm.running_mean"][0])),
        )


def test_evaluation_depends_on_its_set_and_the_model_alone() -> None:
    (alone,) = run_ranks(_evaluations, 1)
    values, modes, _, _ = alone
    assert values[0]["value"] == values[2]["value"] != values[1]["value"]
    assert modes == (True, False)
    for spread in run_ranks(_evaluations, 3):
        assert spread[:3] == alone[:3]
        assert spread[3]


def _nan_loss(model: nn.Module, batch: Any) -> Tensor:
    return loss_fn(model, batch) * float("nan")


@PARITIES
def test_a_run_that_diverges_says_so_on_every_worker(parity: str) -> None:
    for losses, weights in run_ranks(partial(_train, _Tied, {"parity": parity, "nonfinite": "ignore"}, _nan_loss), 2):
        assert np.isnan(losses).all()
        assert np.isnan(weights["head.weight"]).all()


def test_mistakes_in_a_script_are_one_sentence() -> None:
    with paceline.init(global_batch_size=6, virtual_shards=3, plan=Plan()) as run:
        net = _Convolution()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        run.prepare(net, optimizer)
        with pytest.raises(ModelError, match="belongs to the model 'model' already"):
            run.prepare(net, optimizer)
        loader = torch.utils.data.DataLoader(TensorDataset(torch.zeros(4)))
        with pytest.raises(DataError, match="batch_size=1 and the job global_batch_size=6"):
            next(run.batches(loader))
        inputs, targets = next(run.batches(images(6)))
        with pytest.raises(ModelError, match=r"shape \(5,\) for 6 samples"):
            run.step((inputs, targets[:5]), loss_fn)


def test_a_job_made_in_python_is_checked_too() -> None:
    with pytest.raises(JobError, match="epochs = 0 should be at least 1"):
        paceline.init(Job(epochs=0), plan=Plan())


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (Plan(algorithm="two_tree"), "algorithm = 'two_tree' is not possible"),  # type: ignore[arg-type]
        (Plan(pipeline=PipelineSpec("zigzag")), "pipeline.schedule = 'zigzag' is not possible"),  # type: ignore[arg-type]
        (Plan(mesh="dp2"), "mesh = 'dp2' should be a table"),  # type: ignore[arg-type]
    ],
)
def test_a_plan_made_in_python_is_checked_too(plan: Plan, sentence: str) -> None:
    with pytest.raises(JobError, match=re.escape(sentence)):
        paceline.init(plan=plan)
