"""Models that draw random numbers: virtual shards go through them together where each can draw its own, and one by one
where not; losses and weights are equal on any number of workers either way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.env import worker_facts
from paceline.spec import Job, Plan, parse_mesh
from tests.kit.workers import run_ranks
from tests.old.ranks.training import images, loss_fn

Outcome = tuple[list[float], dict[str, np.ndarray[Any, Any]], list[int]]
"""Losses, weights, and the most shards that shared a pass in each step."""


class _Net(nn.Module):
    """Two layers; subclasses draw random numbers between them."""

    inputs: Tensor
    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(192, 16)
        self.second = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        self.inputs = x
        output: Tensor = self.second(self.draw(torch.tanh(self.first(x.flatten(1)))))
        return output

    def draw(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


class _Dropout(_Net):
    def draw(self, hidden: Tensor) -> Tensor:
        return F.dropout(hidden, 0.4)


class _NoiseAndDepth(_Net):
    def draw(self, hidden: Tensor) -> Tensor:
        kept = torch.rand(len(hidden), 1, dtype=hidden.dtype) < 0.8
        return hidden * kept + 0.1 * torch.randn_like(hidden)


class _Convolutions(nn.Module):
    """Batch norm, for which shards take turns, with dropped channels and stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout2d(F.relu(self.norm(self.first(x))), 0.2)
        kept = torch.rand(len(x), 1, 1, 1, dtype=x.dtype) < 0.7
        output: Tensor = self.last((hidden + kept * self.second(hidden)).mean((2, 3)))
        return output


class _Transposed(_Net):
    """Two samples lie in memory with their channels last, and one alone does not, as attention gives them back."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Conv2d(4, 4, 3, padding=1)

    def draw(self, hidden: Tensor) -> Tensor:
        squares = hidden.view(-1, 4, 4).transpose(1, 2).reshape(-1, 4, 2, 2)
        return F.dropout(F.silu(self.middle(squares)), 0.4).flatten(1)


class _ChannelsLast(_Convolutions):
    def __init__(self) -> None:
        super().__init__()
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.contiguous(memory_format=torch.channels_last))


class _LengthFirst(nn.Module):
    """An encoder whose samples lie in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 2, 16, dropout=0.3), 2)
        self.last = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.encoder(x.reshape(len(x), 8, 24).transpose(0, 1)).mean(0))
        return output


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(24, 12, num_layers=2, dropout=0.3)
        self.last = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.recurrent(x.reshape(len(x), 8, 24).transpose(0, 1))[0].mean(0))
        return output


class _LateAttention(_Net):
    """Attention that drops nothing at first: a function that was seen not to draw draws later."""

    def draw(self, hidden: Tensor) -> Tensor:
        heads = hidden.view(len(hidden), 2, 4, 2)
        rate = 0.0 if self.steps < 3 else 0.3
        attended: Tensor = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=rate)
        return attended.reshape(len(hidden), 16)


class _LateGenerator(_Net):
    """Draws with a generator of its own at first, and then from torch's with the same function."""

    def draw(self, hidden: Tensor) -> Tensor:
        own = torch.Generator().manual_seed(1) if self.steps < 3 else None
        noise = torch.randn(1 if own else len(hidden), 1, dtype=hidden.dtype, generator=own)
        return F.dropout(hidden, 0.4) + 0.1 * noise


class _Operator(_Net):
    def draw(self, hidden: Tensor) -> Tensor:
        drawn: Tensor = torch.ops.aten.dropout(hidden, 0.4, True)
        return drawn


class _Mask(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        mask = torch.bernoulli(torch.full_like(hidden, 0.6))
        ctx.save_for_backward(mask)
        return hidden * mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return gradient * mask


class _OwnFunction(_Net):
    def draw(self, hidden: Tensor) -> Tensor:
        masked: Tensor = _Mask.apply(hidden)  # type: ignore[no-untyped-call]
        return masked


class _Traced(_Net):
    """Its random numbers are drawn where no function of torch is called from Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.jit.trace(nn.Sequential(nn.Tanh(), nn.Dropout(0.4)), torch.ones(2, 16), check_trace=False)

    def draw(self, hidden: Tensor) -> Tensor:
        masked: Tensor = self.layers(hidden)
        return masked


class _AsksBefore(_Net):
    """Asks for a truth value first, as models of transformers do of their masks."""

    def draw(self, hidden: Tensor) -> Tensor:
        mask = None if bool((self.inputs > -99).all()) else self.inputs.flatten(1)[:, :16] > -99
        dropped = F.dropout(hidden, 0.4)
        return dropped if mask is None else dropped * mask


class _DrawsIfBright(_Net):
    """Whether a shard draws depends on its samples."""

    def draw(self, hidden: Tensor) -> Tensor:
        return F.dropout(hidden, 0.4) if bool((self.inputs > 1.99).any()) else hidden


class _WeightDropout(_Net):
    """Drops weights, not samples."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(F.linear(x.flatten(1), F.dropout(self.first.weight, 0.4), self.first.bias))
        output: Tensor = self.second(hidden)
        return output


class _SkipsLayers(_Net):
    def draw(self, hidden: Tensor) -> Tensor:
        return hidden if torch.rand(()) < 0.5 else hidden * 0.5


class _Shuffles(_Net):
    """Mixes samples of a batch at random."""

    def draw(self, hidden: Tensor) -> Tensor:
        return 0.7 * hidden + 0.3 * hidden[torch.randperm(len(hidden))]


class _RowsOfSamplesLast(_Net):
    """The dimension that grows with the samples holds them in another order than the batch."""

    def draw(self, hidden: Tensor) -> Tensor:
        by_feature = hidden.t().reshape(-1)
        return F.dropout(by_feature, 0.4).view(hidden.shape[1], len(hidden)).t()


class _Checkpointed(_Net):
    def draw(self, hidden: Tensor) -> Tensor:
        output: Tensor = checkpoint(F.dropout, hidden, 0.4, use_reentrant=False)
        return output


class _HostDraws(_Net):
    def draw(self, hidden: Tensor) -> Tensor:
        return F.dropout(hidden, 0.4) * (1 + float(np.random.rand()))


TOGETHER = [
    _Dropout, _NoiseAndDepth, _Convolutions, _ChannelsLast, _LengthFirst, _Recurrent, _AsksBefore, _Operator, _Traced,
]  # fmt: skip
LATE = [_LateAttention, _LateGenerator]
ONE_BY_ONE = [
    _DrawsIfBright, _WeightDropout, _SkipsLayers, _Shuffles, _RowsOfSamplesLast, _Checkpointed, _HostDraws,
    _OwnFunction,
]  # fmt: skip


def _drawing_loss(model: nn.Module, batch: Any) -> Tensor:
    """Noise that a loss function draws, as of diffusion models."""
    inputs, targets = batch
    level = torch.randint(1, 10, (len(inputs),)).to(inputs.dtype).view(-1, 1, 1, 1) / 10
    return F.cross_entropy(model(inputs + level * torch.randn_like(inputs)), targets)


def _train(
    build: Callable[[], nn.Module], values: dict[str, Any], plan: dict[str, Any], draws_in_loss: bool
) -> Outcome:
    defaults = {"global_batch_size": 13, "virtual_shards": 6, "precision": "float64", "epochs": 2, "seed": 3}
    job = Job().with_values(**defaults | values)
    spread: dict[str, Any] = {"world_size": worker_facts().world_size, "algorithm": "all_reduce", "timeout_s": 60}
    with paceline.init(job, plan=Plan(**spread | plan), max_steps=5) as run:
        model = build()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        losses, shared = [], []
        for batch in run.batches(images(36)):
            setattr(model, "steps", run.steps)  # noqa: B010 - nets of torch have attributes of other types only
            losses.append(float(run.step(batch, _drawing_loss if draws_in_loss else loss_fn)))
            passes = getattr(run.engine, "_passes")  # noqa: B009 - no user needs to know
            shared.append(passes.num_shards_in_pass)
        weights = {name: value.detach().numpy().copy() for name, value in run.whole_state().items()}
        return losses, weights, shared


def _outcomes(
    build: Callable[[], nn.Module],
    world_size: int,
    values: dict[str, Any] | None = None,
    draws_in_loss: bool = False,
    **plan: Any,
) -> list[Outcome]:
    return run_ranks(_train, world_size, build, values or {}, plan, draws_in_loss)


def _assert_equal(outcomes: list[Outcome], expected: Outcome, rtol: float = 1e-12) -> None:
    for rank, (losses, weights, _) in enumerate(outcomes):
        np.testing.assert_allclose(losses, expected[0], rtol=rtol)
        for name, value in expected[1].items() if weights or rank == 0 else ():
            np.testing.assert_allclose(weights[name], value, rtol=rtol, atol=rtol / 10, err_msg=name)


def _shard_by_shard(build: Callable[[], nn.Module], draws_in_loss: bool = False) -> Outcome:
    """What one worker learns that computes each shard alone."""
    return _outcomes(build, 1, {"shard_by_shard": True}, draws_in_loss)[0]


def _shared_by_workers(build: Callable[[], nn.Module]) -> Iterator[tuple[int, list[int]]]:
    """For each worker of runs on 1, 2 and 3, which learn what one learns shard by shard: the number of its shards, and
    the most that shared a pass in each step."""
    expected = _shard_by_shard(build)
    for world_size in (1, 2, 3):
        outcomes = _outcomes(build, world_size)
        _assert_equal(outcomes, expected)
        yield from ((6 // world_size, shared) for _, _, shared in outcomes)


@pytest.mark.parametrize("build", TOGETHER, ids=lambda build: build.__name__)
def test_shards_share_passes(build: Callable[[], nn.Module]) -> None:
    for num_own, shared in _shared_by_workers(build):
        assert shared == [num_own - 1, num_own, num_own, num_own, num_own], "the first shard of all goes alone"


@pytest.mark.parametrize("build", LATE, ids=lambda build: build.__name__)
def test_a_function_that_did_not_draw_draws_later(build: Callable[[], nn.Module]) -> None:
    for num_own, shared in _shared_by_workers(build):
        assert shared[-1] == num_own


def test_a_sample_alone_may_lie_in_memory_otherwise() -> None:
    """In the third and fifth batch some shards have one sample, where all had two or three."""
    expected = _shard_by_shard(_Transposed)
    for world_size in (1, 2, 3):
        _assert_equal(_outcomes(_Transposed, world_size), expected)


def test_a_loss_function_that_draws() -> None:
    expected = _shard_by_shard(_Dropout, draws_in_loss=True)
    for world_size in (1, 3):
        outcomes = _outcomes(_Dropout, world_size, draws_in_loss=True)
        _assert_equal(outcomes, expected)
        assert all(shared[-1] == 6 // world_size for _, _, shared in outcomes)


def _notes(build: Callable[[], nn.Module], is_contrastive: bool) -> list[str]:
    def contrastive(model: nn.Module, batch: Any) -> Tensor:
        outputs = F.normalize(model(batch[0]), dim=1)
        return F.cross_entropy(outputs @ outputs.T / 0.1, torch.arange(len(outputs)))

    plan = Plan(world_size=worker_facts().world_size, algorithm="all_reduce", timeout_s=60)
    job = Job(global_batch_size=16, virtual_shards=4, precision="float64")
    with paceline.init(job, plan=plan, max_steps=2, progress=False) as run:
        model = build()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.batches(images(36)):
            run.step(batch, contrastive if is_contrastive else loss_fn)
        return [note for note in run.notes if "is not the mean of their own losses" in note]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("build", [_Dropout, _WeightDropout], ids=lambda build: build.__name__)
def test_a_loss_that_compares_samples_is_told_beside_random_draws(
    build: Callable[[], nn.Module], world_size: int
) -> None:
    assert all(len(notes) == 1 for notes in run_ranks(_notes, world_size, build, True))
    assert not any(run_ranks(_notes, world_size, build, False))


@pytest.mark.parametrize("build", ONE_BY_ONE, ids=lambda build: build.__name__)
def test_shards_go_one_by_one(build: Callable[[], nn.Module]) -> None:
    for _, shared in _shared_by_workers(build):
        assert shared[-1] == 1


@pytest.mark.parametrize("build", [_Dropout, _LengthFirst, _AsksBefore], ids=lambda build: build.__name__)
@pytest.mark.parametrize("mesh", ["fsdp2", "dp2 x fsdp2", "zero1:2"])
def test_sharded_models(build: Callable[[], nn.Module], mesh: str) -> None:
    expected = _shard_by_shard(build)
    outcomes = _outcomes(build, 4 if " x " in mesh else 2, mesh=parse_mesh(mesh, 4 if " x " in mesh else 2))
    _assert_equal(outcomes, expected)
    asks = build is _AsksBefore  # with another answer a sharded model might call other collectives
    assert (max(shared[-1] for _, _, shared in outcomes) == 1) is asks


def test_a_coarse_precision_needs_three_rehearsals_and_finds_the_same() -> None:
    ((losses, _, shared),) = _outcomes(_Dropout, 1, {"precision": "bfloat16"})
    assert shared[-1] == 6
    ((wrong, _, alone),) = _outcomes(_RowsOfSamplesLast, 1, {"precision": "bfloat16"})
    assert alone[-1] == 1
    np.testing.assert_allclose(losses, _shard_by_shard(_Dropout)[0], rtol=2e-2)
    np.testing.assert_allclose(wrong, _shard_by_shard(_RowsOfSamplesLast)[0], rtol=2e-2)
