"""Random numbers of virtual shards in one pass: the bits that each shard draws alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.parallel.assignment import ShardRange
from paceline.parallel.random_numbers.shard_draws import ShardDraws, SharedPass

Draw = Callable[[Tensor], Tensor]
CPU = torch.device("cpu")


def _seed_of(shard: int) -> int:
    return 1000 + shard


def _range(sizes: tuple[int, ...], *, are_interleaved: bool = False) -> ShardRange:
    return ShardRange(3, sizes, (1, 1, 1, *sizes, 1), are_interleaved=are_interleaved)


def _interleave(shards: list[Tensor]) -> Tensor:
    return torch.stack(shards, 1).flatten(0, 1)


def _alone(draw: Draw, values: Tensor, shard: int) -> Tensor:
    torch.default_generator.manual_seed(_seed_of(shard))
    return draw(values)


def _rehearsed(draw: Draw, samples: Tensor, shards: ShardRange) -> ShardDraws:
    """What is known after a rehearsal of these samples."""
    known = ShardDraws(CPU)
    singles = []
    start = 0
    for number, size in enumerate(shards.sizes):
        alone = ShardRange(shards.first_shard + number, (size,), shards.all_sizes)
        one = samples[number :: len(shards.sizes)] if shards.are_interleaved else samples[start : start + size]
        with known.single_rehearsal(alone, _seed_of) as rehearsal:
            draw(one)
        singles.append(rehearsal)
        start += size
    with known.shared_rehearsal(shards, _seed_of, singles) as together:
        draw(samples)
    assert together.is_known and together.is_possible and together.pattern
    known.learn(together.pattern)
    return known


def _transformer(samples: Tensor) -> Tensor:
    output: Tensor = _LAYER(samples.transpose(0, 1))
    return output.transpose(0, 1)


_LAYER = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, dtype=torch.float64)


def _weights_of(values: Tensor) -> Tensor:
    return torch.full_like(values, 0.3)


DRAWS: dict[str, Draw] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "channels dropped": lambda x: F.dropout2d(x.unsqueeze(-1), 0.3).squeeze(-1),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "native dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "stochastic depth": lambda x: x * (torch.rand(len(x), 1, 1, dtype=x.dtype) < 0.7),
    "bernoulli in place": lambda x: x * x.new_empty(len(x), 1, 1).bernoulli_(0.7),
    "bernoulli with probabilities": lambda x: x * torch.bernoulli(_weights_of(x)),
    "bernoulli with one probability": lambda x: x * torch.bernoulli(x, 0.3),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn_like": lambda x: x + 0.1 * torch.randn_like(x),
    "randn": lambda x: x + torch.randn(x.shape, dtype=x.dtype),
    "randint": lambda x: x + torch.randint(0, 100, (len(x), 1, 1)),
    "randint from": lambda x: x + torch.randint(50, 100, (len(x), 1, 1)),
    "gumbel softmax": lambda x: F.gumbel_softmax(x, dim=-1),
    "rows of a sample": lambda x: F.dropout(x.flatten(0, 1), 0.5).view(x.shape),
    "samples second": lambda x: F.dropout(x.transpose(0, 1).contiguous(), 0.5).transpose(0, 1),
    "length before samples": _transformer,
    "no generator, normal": lambda x: x + torch.randn(x.shape, generator=None),
    "no generator, uniform": lambda x: x + torch.rand(x.shape, generator=None),
    "no generator, integers": lambda x: x + torch.randint(9, x.shape, generator=None),
    "no generator, integers from": lambda x: x + torch.randint(2, 9, x.shape, generator=None),
    "two draws": lambda x: F.dropout(F.dropout(x, 0.3) + torch.rand_like(x), 0.5),
}


@pytest.mark.parametrize("sizes", [(3, 2, 2), (4, 4)])
@pytest.mark.parametrize("name", DRAWS)
def test_shards_in_a_row(name: str, sizes: tuple[int, ...]) -> None:
    draw, shards = DRAWS[name], _range(sizes)
    samples = torch.rand(sum(sizes), 6, 4, dtype=torch.float64)
    known = _rehearsed(draw, samples, shards)
    with known.shared_pass(shards, _seed_of) as together:
        found = draw(samples)
    assert known.knows(together)
    alone = [_alone(draw, one, 3 + number) for number, one in enumerate(samples.split(list(sizes)))]
    torch.testing.assert_close(found, torch.cat(alone), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("name", DRAWS)
def test_shards_that_take_turns(name: str) -> None:
    draw, shards = DRAWS[name], _range((4, 4, 4), are_interleaved=True)
    singles = list(torch.rand(3, 4, 6, 4, dtype=torch.float64))
    samples = _interleave(singles)
    known = _rehearsed(draw, samples, shards)
    with known.shared_pass(shards, _seed_of) as together:
        found = draw(samples)
    assert known.knows(together)
    alone = [_alone(draw, one, 3 + number) for number, one in enumerate(singles)]
    torch.testing.assert_close(found, _interleave(alone), rtol=1e-14, atol=1e-15)


def test_channels_last() -> None:
    shards = _range((4, 4))
    samples = torch.rand(8, 3, 5, 5).to(memory_format=torch.channels_last)
    draw: Draw = lambda x: F.dropout(x, 0.3)  # noqa: E731
    known = _rehearsed(draw, samples, shards)
    with known.shared_pass(shards, _seed_of):
        found = draw(samples)
    assert torch.equal(found, torch.cat([_alone(draw, samples[:4], 3), _alone(draw, samples[4:], 4)]))


def _shared(draw: Draw, sizes: tuple[int, ...] = (2, 2), samples: Tensor | None = None) -> SharedPass:
    """A pass after a rehearsal of one dropout."""
    shards = _range(sizes)
    known = _rehearsed(lambda x: F.dropout(x, 0.3), torch.rand(sum(sizes), 6, 4), shards)
    samples = torch.rand(sum(sizes), 6, 4) if samples is None else samples
    with known.shared_pass(shards, _seed_of) as together:
        draw(samples)
    together.is_known = known.knows(together)
    return together


def test_what_was_not_rehearsed_is_noticed() -> None:
    assert _shared(lambda x: F.dropout(x, 0.9)).is_known  # the rate does not matter
    assert _shared(lambda x: x).is_known
    assert _shared(lambda x: F.dropout(x, 0.3), samples=torch.rand(4, 9, 4)).is_known
    assert not _shared(lambda x: F.dropout(F.dropout(x, 0.3), 0.3)).is_known
    assert not _shared(torch.rand_like).is_known
    assert not _shared(lambda x: F.dropout(x.flatten(1), 0.3)).is_known


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: F.dropout(x * float(x.amax()), 0.3),
        lambda x: F.dropout(x[:3], 0.3),
        lambda x: x[torch.randperm(len(x))],
        lambda x: torch.multinomial(x.sum(1), 1),
    ],
    ids=["a number read", "no whole shards", "randperm", "multinomial"],
)
def test_what_no_shard_can_have_as_its_own_is_noticed(draw: Draw) -> None:
    assert not _shared(draw).is_possible


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_layers_that_run_again_in_backward_are_noticed(is_reentrant: bool) -> None:
    def draw(x: Tensor) -> Tensor:
        x.requires_grad_()
        output: Tensor = checkpoint(F.dropout, x, 0.3, use_reentrant=is_reentrant)
        return output

    assert not _shared(draw).is_possible


def test_a_dimension_without_samples_is_not_known() -> None:
    shards = _range((2, 2))
    known = ShardDraws(CPU)
    singles = []
    for number in range(2):
        with known.single_rehearsal(ShardRange(3 + number, (2,), shards.all_sizes), _seed_of) as rehearsal:
            F.dropout(torch.ones(5, 5), 0.3)
        singles.append(rehearsal)
    with known.shared_rehearsal(shards, _seed_of, singles) as together:
        F.dropout(torch.ones(5, 5), 0.3)
    assert not together.is_known


def test_a_generator_of_the_users_own_is_left_alone() -> None:
    own = torch.Generator().manual_seed(5)
    expected = torch.rand(4, generator=torch.Generator().manual_seed(5))
    with ShardDraws(CPU).shared_pass(_range((2, 2)), _seed_of) as together:
        assert torch.equal(torch.rand(4, generator=own), expected)
    assert together.is_known and not together.pattern


def test_a_rehearsal_draws_masks_that_show() -> None:
    alone = ShardRange(0, (1000,), (1000,))
    with ShardDraws(CPU).single_rehearsal(alone, _seed_of):
        mask = F.dropout(torch.ones(1000), 1e-6)
        path = torch.rand(1000) < 1 - 1e-6
    assert 400 < int((mask == 0).sum()) < 600
    assert 400 < int(path.sum()) < 600
