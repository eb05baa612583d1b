"""Ghost batch norm against the plain layer applied to each shard by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.errors import ModelError
from paceline.parallel.assignment import ShardRange
from paceline.parallel.batch_norm.norm import NormStatistics, ShardBatchNorm, replace_batch_norm
from paceline.parallel.batch_norm.sync_norm import SyncBatchNorm
from paceline.parallel.loss.companions import Companion, Companions


def _forward(
    layer: nn.Module,
    statistics: NormStatistics,
    x: torch.Tensor,
    sizes: tuple[int, ...],
    *,
    are_interleaved: bool = False,
) -> torch.Tensor:
    statistics.begin_pass(ShardRange(0, sizes, sizes, are_interleaved=are_interleaved))
    output: torch.Tensor = layer(x)
    statistics.apply(*torch.cat(list(statistics.collect(x))).split(statistics.lengths))
    statistics.end_pass()
    return output


@pytest.mark.parametrize("momentum", [0.1, None])
def test_each_shard_is_normalised_alone_and_running_statistics_are_their_mean(momentum: float | None) -> None:
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(3, momentum=momentum, dtype=torch.float64)
    ghost = replace_batch_norm(copy.deepcopy(plain), ShardBatchNorm)
    statistics = NormStatistics(ghost)
    mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    for step in range(3):
        x = torch.randn(10, 3, 4, 4, dtype=torch.float64) + 3
        output = _forward(ghost, statistics, x, (4, 3, 3))
        shards = x.split([4, 3, 3])
        factor = 1 / (step + 1) if momentum is None else momentum
        mean += factor * (sum(s.mean((0, 2, 3)) * len(s) / 10 for s in shards) - mean)
        var += factor * (sum(s.var((0, 2, 3)) * len(s) / 10 for s in shards) - var)
        torch.testing.assert_close(output, torch.cat([plain(shard) for shard in shards]))
    assert isinstance(ghost, ShardBatchNorm)
    torch.testing.assert_close(ghost.running_mean, mean)
    torch.testing.assert_close(ghost.running_var, var)
    assert ghost.num_batches_tracked == 3


@pytest.mark.parametrize(
    ("rows", "shape", "memory_format"),
    [
        (1, (3, 4, 4), torch.contiguous_format),
        (1, (3, 4, 4), torch.channels_last),
        (2, (3, 4, 4), torch.contiguous_format),
        (1, (3,), torch.contiguous_format),
        (2, (3, 5), torch.contiguous_format),
    ],
)
def test_shards_that_take_turns_are_normalised_as_one_after_the_other(
    rows: int, shape: tuple[int, ...], memory_format: torch.memory_format
) -> None:
    """With several rows a sample, too: all values, gradients and running statistics are those of shards in a row."""
    torch.manual_seed(0)
    in_a_row = replace_batch_norm(nn.BatchNorm2d(3, dtype=torch.float64), ShardBatchNorm)
    for parameter in in_a_row.parameters():
        nn.init.normal_(parameter)
    taking_turns = copy.deepcopy(in_a_row)
    x = torch.randn(4, 2 * rows, *shape, dtype=torch.float64) + 3  # shard, its samples
    factors = torch.randn_like(x)
    found = []
    for layer, is_interleaved in ((in_a_row, False), (taking_turns, True)):
        statistics = NormStatistics(layer)
        of_shards = x.view(4, 2, rows, *shape)
        values = (of_shards.transpose(0, 1) if is_interleaved else of_shards).reshape(-1, *shape)
        values = values.contiguous(memory_format=memory_format).requires_grad_()
        output = _forward(layer, statistics, values, (2, 2, 2, 2), are_interleaved=is_interleaved)
        assert output.is_contiguous(memory_format=memory_format)
        placed = output.view(2, 4, rows, *shape).transpose(0, 1) if is_interleaved else output
        (placed.reshape(factors.shape) * factors).sum().backward()
        assert values.grad is not None
        gradient = values.grad.view(2, 4, rows, *shape).transpose(0, 1) if is_interleaved else values.grad
        weights = [parameter.grad for parameter in layer.parameters()]
        found.append([placed.reshape(x.shape), gradient.reshape(x.shape), *weights, *layer.buffers()])
    torch.testing.assert_close(found[1], found[0])


def _with_gradients(
    normalise: Callable[[torch.Tensor], torch.Tensor], layer: nn.Module, x: torch.Tensor, factors: torch.Tensor
) -> list[torch.Tensor]:
    """The output for `x`, gradients, and gradients of these gradients."""
    values = x.clone().requires_grad_()
    wanted = [values, *layer.parameters()]
    output = normalise(values)
    first = torch.autograd.grad((output.to(factors.dtype) * factors).sum(), wanted, create_graph=True)
    of_squares = torch.stack([one.float().square().sum() for one in first]).sum()
    second = torch.autograd.grad(of_squares, wanted[:2])  # the bias is in none of them
    return [output, *first, *second]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_that_lie_in_a_row_are_normalised_where_they_lie(
    memory_format: torch.memory_format, dtype: torch.dtype
) -> None:
    """Values to the bit those of the plain layer, shard by shard; gradients too, but for the order of sums."""
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(3)
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    ghost = replace_batch_norm(copy.deepcopy(plain), ShardBatchNorm)
    statistics = NormStatistics(ghost)
    x = (torch.randn(10, 3, 4, 4) + 3).to(dtype).contiguous(memory_format=memory_format)
    factors = torch.randn(10, 3, 4, 4)
    found = _with_gradients(lambda values: _forward(ghost, statistics, values, (4, 3, 3)), ghost, x, factors)
    expected = _with_gradients(
        lambda values: torch.cat([plain(one) for one in values.split([4, 3, 3])]), plain, x, factors
    )
    assert torch.equal(found[0], expected[0])
    assert found[0].is_contiguous(memory_format=memory_format)
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(found[1:], expected[1:], rtol=tolerance, atol=tolerance)


def test_a_shard_with_one_value_says_nothing_about_variance() -> None:
    ghost = replace_batch_norm(nn.BatchNorm1d(2), ShardBatchNorm)
    statistics = NormStatistics(ghost)
    x = torch.tensor([[1.0, 2.0], [3.0, 6.0], [100.0, 100.0]], requires_grad=True)
    output = _forward(ghost, statistics, x, (2, 1))
    output.sum().backward()
    assert torch.isfinite(output).all()
    assert x.grad is not None and torch.isfinite(x.grad).all()
    assert isinstance(ghost, ShardBatchNorm)
    torch.testing.assert_close(ghost.running_mean, torch.tensor([0.2, 0.4]))
    # One sample in all: nothing to learn, and nothing broken.
    before = copy.deepcopy(ghost.state_dict())
    assert torch.isfinite(_forward(ghost, statistics, torch.ones(1, 2), (1,))).all()
    for name, value in ghost.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(("sizes", "are_interleaved"), [((1,), False), ((1, 1, 1), True), ((2, 1, 1), False)])
def test_the_norm_of_one_value_is_the_bias_to_the_bit(sizes: tuple[int, ...], are_interleaved: bool) -> None:
    """Rounding would decide on which side of a ReLU's kink it lies, and be another with other shards in the pass."""
    ghost = replace_batch_norm(nn.BatchNorm1d(16).double(), ShardBatchNorm)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), 16, dtype=torch.float64, generator=generator).requires_grad_()
    output = _forward(ghost, NormStatistics(ghost), x, sizes, are_interleaved=are_interleaved)
    alone = output[sum(size for size in sizes if size > 1) :]
    assert torch.equal(alone, torch.zeros_like(alone))
    alone.sum().backward()
    assert x.grad is not None and not x.grad.any()
    assert isinstance(ghost, ShardBatchNorm) and ghost.bias.grad is not None
    assert torch.equal(ghost.bias.grad, torch.full_like(ghost.bias, len(alone)))


def test_the_norm_of_one_value_has_the_type_of_the_value() -> None:
    ghost = replace_batch_norm(nn.BatchNorm1d(16), ShardBatchNorm)
    values = torch.randn(1, 16, dtype=torch.bfloat16)
    assert _forward(ghost, NormStatistics(ghost), values, (1,)).dtype == torch.bfloat16


def test_replacing_keeps_parameters_names_and_evaluation() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Sequential(nn.BatchNorm2d(4, affine=False)))
    reference = copy.deepcopy(model).eval()
    parameters = list(model.parameters())
    for kind in (ShardBatchNorm, SyncBatchNorm):
        replaced = replace_batch_norm(copy.deepcopy(model), kind)
        assert list(replaced.state_dict()) == list(reference.state_dict())
        x = torch.randn(2, 1, 8, 8)
        torch.testing.assert_close(replaced.eval()(x), reference(x))
    assert all(a is b for a, b in zip(replace_batch_norm(model, ShardBatchNorm).parameters(), parameters, strict=True))


def test_rows_that_belong_to_no_shard_are_refused() -> None:
    ghost = replace_batch_norm(nn.BatchNorm1d(2), ShardBatchNorm)
    statistics = NormStatistics(ghost)
    with pytest.raises(ModelError, match="which row"):
        _forward(ghost, statistics, torch.ones(5, 2), (2, 1))
    # A layer that sees several rows a sample (frames of a clip) still knows whose they are.
    assert _forward(ghost, statistics, torch.randn(6, 2), (2, 1)).shape == (6, 2)


def test_rows_of_a_shard_alone_are_its_own() -> None:
    plain = nn.BatchNorm1d(2)
    ghost = replace_batch_norm(copy.deepcopy(plain), ShardBatchNorm)
    statistics = NormStatistics(ghost)
    nodes = torch.randn(5, 2)  # of the graphs of two samples
    torch.testing.assert_close(_forward(ghost, statistics, nodes, (2,)), plain(nodes))
    torch.testing.assert_close(ghost.running_var, plain.running_var)
    _forward(ghost, statistics, nodes[:1], (2,))  # one value has no variance, and counts for nothing
    torch.testing.assert_close(ghost.running_var, plain.running_var)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [ShardBatchNorm, SyncBatchNorm])
def test_layers_of_low_precision_are_normalised_and_trained(
    kind: type[ShardBatchNorm | SyncBatchNorm], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    plain = nn.BatchNorm1d(3)
    low = replace_batch_norm(copy.deepcopy(plain).to(dtype), kind)
    x = torch.randn(8, 3).to(dtype)
    output = low(x) if kind is SyncBatchNorm else _forward(low, NormStatistics(low), x, (8,))
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), plain(x.float()), atol=0.02, rtol=0.02)
    (output * x).sum().backward()
    (plain(x.float()) * x.float()).sum().backward()
    for ours, theirs in zip(low.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert ours.grad.dtype == dtype
        torch.testing.assert_close(ours.grad.float(), theirs.grad, atol=0.05, rtol=0.02)
    assert all(one.dtype in (dtype, torch.int64) for one in low.buffers())


def test_sync_batch_norm_alone_is_batch_norm() -> None:
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(3, dtype=torch.float64)
    sync = replace_batch_norm(copy.deepcopy(plain), SyncBatchNorm)
    x = torch.randn(5, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    weight = torch.randn_like(x)
    (plain(x) * weight).sum().backward()
    (sync(y) * weight).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    for (name, a), (_, b) in zip(plain.named_parameters(), sync.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)
    for ours, theirs in zip(sync.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_layer_that_is_called_twice_has_the_mean_of_both_calls() -> None:
    ghost = replace_batch_norm(nn.BatchNorm1d(1, momentum=0.5), ShardBatchNorm)
    statistics = NormStatistics(ghost)
    statistics.begin_pass(ShardRange(0, (2, 2), (2, 2)))
    for offset in (0.0, 10.0):
        ghost(torch.tensor([[1.0], [3.0], [1.0], [3.0]]) + offset)
    with statistics.backward():  # what checkpointing computes again is no news
        ghost(torch.full((4, 1), 1e6))
    statistics.apply(*torch.cat(list(statistics.collect(torch.zeros(1)))).split(statistics.lengths))
    assert isinstance(ghost, ShardBatchNorm)
    torch.testing.assert_close(ghost.running_mean, torch.tensor([0.5 * 7.0]))
    torch.testing.assert_close(ghost.running_var, torch.tensor([0.5 * 1.0 + 0.5 * 2.0]))
    assert ghost.num_batches_tracked == 1


def test_a_layer_in_several_places_is_replaced_in_all_of_them_by_one() -> None:
    norm = nn.BatchNorm1d(2)
    model = nn.Sequential(norm, nn.Sequential(norm), norm)
    replaced = replace_batch_norm(model, ShardBatchNorm)
    assert isinstance(replaced, nn.Sequential) and isinstance(replaced[1], nn.Sequential)
    assert isinstance(replaced[0], ShardBatchNorm)
    assert replaced[0] is replaced[1][0] is replaced[2]
    assert replaced[0].weight is norm.weight
    assert len(NormStatistics(replaced).layers) == 1


@pytest.mark.parametrize("are_interleaved", [False, True])
def test_a_companion_may_compute_its_layers_again_in_backward(are_interleaved: bool) -> None:
    torch.manual_seed(0)
    model = replace_batch_norm(nn.BatchNorm2d(3), ShardBatchNorm)
    before = copy.deepcopy(model.state_dict())
    companions = Companions((Companion.of(model),))
    x = torch.randn(4, 3, 5, 5)
    gradients = []
    for is_checkpointed in (False, True):
        values = x.clone().requires_grad_()
        with companions.unchanged():
            companions.enter(ShardRange(0, (2, 2), (2, 2), are_interleaved=are_interleaved))
            output = checkpoint(model, values, use_reentrant=False) if is_checkpointed else model(values)
            with companions.backward():
                output.square().sum().backward()
        gradients.append(values.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_layers_of_two_dtypes_have_running_statistics_of_their_own() -> None:
    torch.manual_seed(0)
    dtypes = (torch.float64, torch.float32, torch.float64)
    plain = nn.ModuleList(nn.BatchNorm1d(2, dtype=dtype) for dtype in dtypes)
    ghost = replace_batch_norm(copy.deepcopy(plain), ShardBatchNorm)
    assert isinstance(ghost, nn.ModuleList)
    statistics = NormStatistics(ghost)
    statistics.begin_pass(ShardRange(0, (4, 4), (4, 4)))
    for number, dtype in enumerate(dtypes):
        x = torch.randn(4, 2, dtype=dtype) + number
        plain[number](x)
        ghost[number](torch.cat([x, x]))
    statistics.apply(
        *torch.cat(list(statistics.collect(torch.zeros((), dtype=torch.float64)))).split(statistics.lengths)
    )
    torch.testing.assert_close(list(ghost.buffers()), list(plain.buffers()))
