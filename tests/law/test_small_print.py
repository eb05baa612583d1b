"""What a run promises beside the law's table: losses that count for nothing, statistics that forward passes move,
evaluations that leave no trace, random numbers between steps, and workers that stop doing the same."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import paceline
from paceline.errors import PacelineError
from paceline.spec import Mesh
from tests.kit.workers import run_ranks

_sgd = functools.partial(torch.optim.SGD, lr=0.3)


class _Statistics(nn.Module):
    """A layer, and what its passes have seen: a count, the smallest and a mean, which an evaluation moves too; and a
    factor that is constant, what grows to infinity, a large number in double precision; and constants of rare kinds."""

    count: Tensor
    smallest: Tensor
    mean: Tensor
    factor: Tensor
    growing: Tensor
    large: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.dropout = nn.Linear(2, 1), nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(1).eval()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("smallest", torch.tensor(torch.inf))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("factor", torch.full((2,), 0.5))
        self.register_buffer("growing", torch.zeros(2))
        self.register_buffer("large", torch.zeros((), dtype=torch.float64))
        for number, one in enumerate([torch.ones(1, dtype=torch.uint16), torch.tensor(1j), torch.eye(2).to_sparse()]):
            self.register_buffer(f"constant_{number}", one, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.norm(self.layer(self.dropout(inputs - self.mean)) * self.factor[:1])
        self.count += (inputs > 0).sum()
        self.smallest.copy_(torch.minimum(self.smallest, inputs.min()))
        self.mean.lerp_(inputs.detach().mean(0), 0.5)
        self.growing = self.growing + torch.tensor([1.0, torch.inf])
        self.large += 1e9 + inputs.detach().double().sum()
        return output


def _pairs(num_samples: int = 8) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_samples, 2, generator=draw).relu()  # half of the numbers are 0, no number is below
    return TensorDataset(inputs, torch.randn(num_samples, 1, generator=draw))


def _squares(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
    inputs, targets = batch
    above = paceline.Mean(targets.relu().mean(), weight=2.0)
    return (model(inputs) - targets).square().mean(), {"above": above, "target": targets.mean()}


def _init(**job: Any) -> paceline.Run:
    values = {"global_batch_size": 8, "virtual_shards": 4, "epochs": 1, "eval_batch_size": 3} | job
    return paceline.init(progress=False, **values)


def _in_order(_seed: int, _epoch: int) -> range:
    return range(8)


def _moved_statistics(parity: str) -> list[Any]:
    with _init(parity=parity) as run:
        model, _ = run.prepare(found := _Statistics(), _sgd(found.parameters()))
        for batch in run.batches(_pairs(), sampler=_in_order):
            run.step(batch, _squares)
        means = [float(model.mean.sum()), float(run.values["target"]), float(model.large) - 1e9]
        return [int(model.count), float(model.smallest), model.norm.training, means, model.growing.tolist()]


@pytest.mark.parametrize("parity", ["numeric", "bitwise"])
def test_statistics_and_values_are_those_of_the_virtual_shards_on_any_number_of_workers(parity: str) -> None:
    inputs, targets = _pairs().tensors
    means = [float(inputs.mean(0).sum()) / 2, float(targets.mean()), float(inputs.double().sum()) / 4]
    expected = [int((inputs[:2] > 0).sum()), 0.0, False, pytest.approx(means, rel=1e-6), [1.0, 0.0]]
    for num_workers in (1, 2):
        assert all(found == expected for found in run_ranks(_moved_statistics, num_workers, parity))


class _RunTwice(nn.Module):
    """Layers that compute without gradients first, and once more in their backward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layers, self.head = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            shift = self.layers(inputs)
        output: Tensor = self.head(checkpoint(self.layers, self.first(inputs) + shift, use_reentrant=True)).float()
        return output


def _trained_in_bfloat16(optimizer_of: Any, keeps_casts: bool) -> list[Any]:
    torch.set_autocast_cache_enabled(keeps_casts)
    with _init(precision="bfloat16") as run:
        run.prepare(found := _RunTwice(), optimizer_of(found.parameters()))
        for batch in run.batches(_pairs(32)):
            run.step(batch, _squares)
        return [parameter.tolist() for parameter in found.parameters()]


@pytest.mark.parametrize("optimizer_of", [_sgd, functools.partial(torch.optim.LBFGS, lr=0.3, max_iter=3)])
def test_casts_of_weights_that_serve_all_shards_are_those_of_each_shard(optimizer_of: Any) -> None:
    """In a step whose optimizer computes the gradient again, until it moves the weights."""
    kept, fresh = (run_ranks(_trained_in_bfloat16, 1, optimizer_of, keeps) for keeps in (True, False))
    assert kept == fresh


class _Masked(nn.Module):
    """Layers without random numbers, and buffers: a constant one, a count and those of a norm."""

    mask: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.norm, self.head = nn.BatchNorm1d(2), nn.Linear(2, 1)
        self.register_buffer("mask", torch.tensor([1.0, 2.0]))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.count += 1
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        output: Tensor = self.head(self.norm(inputs * self.mask))
        return output


def _compiled_after_prepare() -> list[Any]:
    graphs, losses = [], []

    def keep(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def loss_fn(model: nn.Module, batch: Any) -> paceline.Mean:
        return paceline.Mean(_squares(model, batch)[0], weight=len(batch[0]))

    for is_compiled in (False, True):
        with _init(epochs=4) as run:
            run.prepare(model := _Masked(), _sgd(model.parameters()))
            if is_compiled:
                model.compile(backend=keep)
            losses.append([float(run.step(batch, loss_fn)) for batch in run.batches(_pairs(), sampler=_in_order)])
            losses[-1].append(float(model.count))
    return [len(graphs), *losses]


def test_a_model_that_is_compiled_in_place_is_compiled_once_and_learns_the_same() -> None:
    ((num_graphs, eager, compiled),) = run_ranks(_compiled_after_prepare, 1)
    assert num_graphs == 1
    assert compiled == pytest.approx(eager, rel=1e-5)


def _dropped(is_compiled: bool) -> list[float]:
    """The loss of outputs of which a block of a compiled model that runs as it is drops some; or the loss function."""
    torch.manual_seed(0)
    parts = nn.Linear(2, 2), nn.Dropout(0.5)
    with _init(compile=is_compiled) as run, torch.compiler.set_stance("force_eager"):
        model, last = (nn.Sequential(*parts), nn.Identity()) if is_compiled else parts
        run.prepare(model, _sgd(model.parameters()))
        batches = run.batches(torch.ones(8, 2))
        return [float(run.step(batch, lambda model, shard: last(model(shard)).mean())) for batch in batches]


def test_a_compiled_model_that_falls_back_draws_by_shard_alone() -> None:
    assert run_ranks(_dropped, 1, True) == run_ranks(_dropped, 1, False)


def _places_of_gradients() -> tuple[int, int, bool]:
    """How many places gradients of one layer had in all passes and steps, and all gradients after a step; and whether a
    parameter that nobody uses has none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    seen: set[int] = set()

    def squares(model: nn.Module, batch: Any) -> Any:
        if (gradient := model.get_parameter("0.weight").grad) is not None:
            seen.add(gradient.data_ptr())
        return _squares(model, batch)

    with _init() as run:
        run.prepare(model, _sgd(model.parameters()))
        for batch in run.batches(_pairs(24)):
            run.step(batch, squares)
            gradients = [one.grad for one in model.parameters() if one.grad is not None]
            seen.add(gradients[0].data_ptr())
    return len(seen), len({one.untyped_storage().data_ptr() for one in gradients}), model.unused.grad is None


def test_gradients_of_replicas_exist_once_in_the_vector_that_is_sent() -> None:
    assert run_ranks(_places_of_gradients, 2) == [(1, 1, True)] * 2


def _beside_the_optimizer(parity: str, dtype: torch.dtype) -> list[Any]:
    """Train one of two layers: the other gets gradients, which count in the norm, and no update."""
    torch.manual_seed(0)
    trained, other = nn.Linear(2, 2), nn.Linear(2, 1, dtype=dtype)
    other.register_forward_pre_hook(lambda _layer, inputs: (inputs[0].to(dtype),))
    other.register_forward_hook(lambda _layer, _inputs, output: output.float())
    with _init(optim={"clip_norm": 0.1}, parity=parity) as run:
        run.prepare(nn.Sequential(trained, other), _sgd(trained.parameters()))
        for batch in run.batches(_pairs(24)):
            run.step(batch, _squares)
        found: list[Any] = trained.weight.flatten().tolist()
        return found


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-3)])
@pytest.mark.parametrize("parity", ["numeric", "bitwise"])
def test_gradients_beside_the_optimizer_are_those_of_one_step(parity: str, dtype: torch.dtype, rounding: float) -> None:
    (alone,) = run_ranks(_beside_the_optimizer, 1, parity, dtype)
    for found in run_ranks(_beside_the_optimizer, 2, parity, dtype):
        assert found == pytest.approx(alone, rel=0.0 if parity == "bitwise" else rounding)


def _each_by_its_own_step(parity: str) -> list[float]:
    """Two optimizers over one model, each with a step of its own, and a limit that both gradients pass."""
    torch.manual_seed(0)
    layers = nn.Linear(2, 2), nn.Linear(2, 1)
    with _init(optim={"clip_norm": 0.1}, parity=parity, precision="float64") as run:
        run.prepare(nn.Sequential(*layers), optimizers := [_sgd(layer.parameters()) for layer in layers])
        for batch in run.batches(_pairs(24)):
            for optimizer in optimizers:
                run.step(batch, _squares, optimizer=optimizer)
        return [float(one) for layer in layers for one in layer.weight.flatten()]


def test_a_step_of_one_of_several_optimizers_is_clipped_by_the_norm_of_its_own_gradient() -> None:
    (bitwise,), (numeric,) = (run_ranks(_each_by_its_own_step, 1, parity) for parity in ("bitwise", "numeric"))
    assert bitwise == pytest.approx(numeric, rel=1e-9)


def _after_a_change_in_place(folder: Path | None) -> list[float]:
    """The losses of a second model, whose steps come after a loss function that changes the batch, and its buffers."""

    def doubled(model: nn.Module, batch: Any) -> Any:
        batch[0].mul_(2)
        return _squares(model, batch)[0] + models[1](batch[0]).mean()

    torch.manual_seed(0)
    models = nn.Linear(2, 1), _Statistics()
    with _init(checkpoint_dir=folder, checkpoint={"every_steps": 4, "every_minutes": None}) as run:
        for model in models:
            run.prepare(model, _sgd(model.parameters()))
        found = []
        for batch in run.batches(_pairs(40)):
            run.step(batch, doubled, model=models[0])
            found.append(float(run.step(batch, _squares, model=models[1])))
        return found


def test_what_a_step_changes_beside_its_model_is_nothing_to_the_next_one(tmp_path: Path) -> None:
    assert run_ranks(_after_a_change_in_place, 1, None) == run_ranks(_after_a_change_in_place, 1, tmp_path)


def _noisy(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    inputs, _ = batch
    return {"noisy": model(inputs).flatten() + torch.rand(len(inputs))}


def _with_evaluations(*, are_made: bool) -> list[Any]:
    """What is learned and drawn, and what the evaluations found."""
    found, drawn = [], []
    with _init(global_batch_size=4, epochs=2) as run:
        model, _ = run.prepare(made := _Statistics(), _sgd(made.parameters()))
        for batch in run.batches(_pairs()):
            run.step(batch, _squares)
            if are_made:
                found.append(run.evaluate(_pairs(7), _noisy)["noisy"])
            drawn.append(float(torch.rand(())))
        return [run.weights_sha256(), drawn, model.norm.training, model.layer.training, found]


def test_an_evaluation_leaves_no_trace_and_workers_draw_alike_between_steps() -> None:
    (plain,) = run_ranks(functools.partial(_with_evaluations, are_made=False), 1)
    evaluated = functools.partial(_with_evaluations, are_made=True)
    (alone,) = run_ranks(evaluated, 1)
    assert alone[0] == plain[0] and alone[2:4] == plain[2:4] == [False, True]
    first, second = run_ranks(evaluated, 2)
    assert first[1:] == second[1:]
    assert first[1] == alone[1]
    assert first[4] == pytest.approx(alone[4], rel=1e-5)


class _Spread(nn.Module):
    """A layer, and the spread of a shard's samples, whose gradient is not finite where there is one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layer(inputs)
        spread: Tensor = (hidden - hidden.mean(0)).square().mean(0).sqrt()
        output: Tensor = hidden.sum(1, keepdim=True) + spread.sum()
        return output


class _Stream(IterableDataset[Any]):
    """Pairs in four shards of its own, of which the first two give four samples and the others two."""

    num_shards = 4

    def __init__(self, begin: int = 0, end: int = 16) -> None:
        self._begin, self._end = begin, end

    def shard(self, num_shards: int, index: int) -> _Stream:
        begin = index * (self._end // num_shards)
        return _Stream(begin, min(self._end, begin + (4 if index < 2 else 2)))

    def __iter__(self) -> Any:
        angles = torch.arange(float(self._begin), float(self._end))
        return zip(torch.stack([angles.sin(), angles.cos()], 1), angles[:, None] / 16, strict=True)


def _without_samples_in_the_last_step() -> list[Any]:
    with _init(precision="float64") as run:
        torch.manual_seed(0)
        run.prepare(model := _Spread(), _sgd(model.parameters()))
        made = [float(run.step(batch, _squares)) for batch in run.batches(_Stream())]
        return [*made, *(one.sum().item() for one in model.parameters())]


def test_what_a_worker_without_samples_computes_counts_for_nothing() -> None:
    (alone,) = run_ranks(_without_samples_in_the_last_step, 1)
    assert len(alone) == 2 + 2 and all(number == number for number in alone)
    for spread in run_ranks(_without_samples_in_the_last_step, 2):
        assert spread == pytest.approx(alone, rel=1e-12)


def _evaluated() -> tuple[float, list[str]]:
    """The mean over a stream, and in which order the states of a metric were merged, on rank 0."""
    merged: list[str] = []

    def compute(state: str) -> float:
        merged.append(state)
        return 0.0

    metric = (lambda some: ",".join(map(str, some.int().tolist())), "({} {})".format, compute)
    with _init() as run:
        run.prepare(model := nn.Linear(2, 1), _sgd(model.parameters()))
        run.evaluate(TensorDataset(torch.arange(17.0)), lambda _model, batch: {"order": batch}, {"order": metric})
        found = run.evaluate(_Stream(), lambda _model, batch: {"mean": 16 * batch[1].flatten()})
        return found["mean"], merged


def test_evaluations_read_all_of_a_stream_and_merge_states_in_one_order() -> None:
    (alone,) = run_ranks(_evaluated, 1)
    assert alone[0] == pytest.approx((sum(range(8)) + 8 + 9 + 12 + 13) / 12)
    first, second = run_ranks(_evaluated, 2)
    assert first == alone and second == (alone[0], [])


class _InAnotherOrder(nn.Module):
    """Two layers, made in another order on rank 1."""

    first: nn.Linear
    second: nn.Linear

    def __init__(self, rank: int) -> None:
        super().__init__()
        for name in ("second", "first") if rank else ("first", "second"):
            setattr(self, name, nn.Linear(2, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(inputs)).sum(1, keepdim=True)
        return output


def _lazy(_rank: int) -> nn.Module:
    return nn.LazyLinear(1)


def _in_two_dtypes(_rank: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).bfloat16())


def _counting(_rank: int) -> nn.Module:
    return _Masked()


class _CountingReads(Dataset[Any]):
    """Samples that depend on how many were read before."""

    num_reads = 0

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.num_reads += 1
        return torch.tensor([index / 32, self.num_reads / 32]), torch.zeros(1)


class _Langevin(torch.optim.SGD):
    """Adds noise to the weights."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.data.mul_(1 + 0.01 * float(torch.randn(())))


def _end_of(
    model_of: Any = None,
    data: Any = None,
    *,
    optimizer_of: Any = _sgd,
    scheduler_of: Any = None,
    has_own_order: bool = False,
    changes_weights: bool = False,
    gets_weights: bool = False,
    example: Any = None,
    **job: Any,
) -> tuple[int, str]:
    """How many steps are made, and why there are no more."""
    made = 0
    try:
        with _init(**job) as run:
            model = nn.Linear(2, 1) if model_of is None else model_of(run.rank)
            optimizer = optimizer_of(model.parameters())
            run.prepare(model, optimizer, scheduler=scheduler_of and scheduler_of(optimizer), example=example)
            if gets_weights:
                model.weight = nn.Parameter(torch.ones(1, 2))
                optimizer.add_param_group({"params": [model.weight]})
            sampler = (lambda _seed, _epoch: range(32)[:: 1 - 2 * run.rank]) if has_own_order else None
            for batch in run.batches(data or _pairs(32), sampler=sampler):
                run.step(batch, _squares)
                made += 1
                if changes_weights and made == 1:
                    model.weight.data.mul_(1.0 + run.rank)
    except PacelineError as refusal:
        return made, str(refusal)
    return made, "they trained"


REFUSED: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "layers in another order": ({"model_of": _InAnotherOrder}, 0, ("rank 1", "first", "second", "step 1")),
    "a layer without a shape yet": ({"model_of": _lazy}, 0, ("'weight'", "lazy", "run.prepare")),
    "samples in another order": ({"has_own_order": True}, 0, ("rank 1", "order")),
    "a stream without samples": ({"data": _Stream(0, 0)}, 0, ("no sample",)),
    "more workers than virtual shards": ({"virtual_shards": 1}, 0, ("2", "virtual_shards = 1")),
    "samples that count how often they are read": ({"data": _CountingReads()}, 3, ("ample",)),
    "weights that rank 1 changes": ({"changes_weights": True}, 3, ("differ",)),
    "weights in the place of those that were prepared": ({"gets_weights": True}, 1, ("differ", "run.prepare")),
    "a count of calls in a pipeline": (
        {"model_of": _counting, "strategy": "pp", "example": torch.ones(2, 2)},
        0,
        ("buffers (count)", "use dp"),
    ),
    "a block of two dtypes in shards": (
        {"model_of": _in_two_dtypes, "strategy": "fsdp"},
        0,
        ("torch.bfloat16, torch.float32", "strategy dp"),
    ),
    "noise that an optimizer adds to shards of parameters": (
        {"optimizer_of": functools.partial(_Langevin, lr=0.1), "plan": paceline.Plan(world_size=2, mesh=Mesh(fsdp=2))},
        0,
        ("_Langevin", "random numbers", "strategy dp"),
    ),
    "a scheduler that needs a metric": ({"scheduler_of": ReduceLROnPlateau}, 0, ("run.keep", "run.evaluate")),
}
"""What is wrong, how many steps may be made with it, and words of the refusal."""


@pytest.mark.parametrize("name", REFUSED)
def test_workers_that_would_not_do_the_same_are_told_so(name: str) -> None:
    case, most_steps, words = REFUSED[name]
    for made, said in run_ranks(functools.partial(_end_of, **case), 2):
        assert made <= most_steps and all(word in said for word in words), said
