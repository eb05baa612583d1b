"""Layers shared by workers: the losses and gradients of one worker, and the bytes of the formula."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import paceline
from paceline.dtensor_type import local_shard
from paceline.env import worker_facts
from paceline.models import build
from paceline.parallel.sharded import recompute
from paceline.parallel.tensor import (
    TensorPlan,
    bytes_per_sample,
    find_plan,
    layer_sizes,
    tensor_parallel,
)
from paceline.parallel.tensor.plan import LAYER_STYLES, given_plan
from paceline.parallel.tensor.sequence_region import SequenceLayerNorm
from paceline.spec import Job, ModelSpec, PipelineSpec, Plan, parse_mesh
from paceline.train.optimizers.optim import build_optimizer
from paceline.train.process.process_group import join
from tests.kit.workers import in_turn, run_ranks
from tests.old.ranks.tensor_zoo import WORDS, ZOO, Asking, Language
from tests.old.traffic import bytes_per_pass


def _mesh(*degrees: int, names: tuple[str, ...] = ("tp",)) -> DeviceMesh:
    facts = worker_facts()
    join(facts, Plan(world_size=facts.world_size, timeout_s=150))
    return init_device_mesh("cpu", degrees or (facts.world_size,), mesh_dim_names=names)


def _images(num_samples: int, channels: int, side: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(num_samples, channels, side, side, dtype=dtype), torch.randint(10, (num_samples,))


def _tokens(num_samples: int, length: int, vocabulary: int, _: torch.dtype) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocabulary, (num_samples, length + 1))
    return tokens[:, :-1], tokens[:, 1:]


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, targets.dim() - 1), targets.flatten())


def _call(inputs: Tensor, model: nn.Module) -> Tensor:
    output: Tensor = model(inputs)
    return output


def _error(ours: Tensor, whole: Tensor) -> float:
    """The largest deviation, relative to the largest value of the tensor; a part is compared with its part."""
    scale = whole.abs().max().clamp(min=1e-30)
    if isinstance(ours, DTensor):
        whole = distribute_tensor(whole, ours.device_mesh, ours.placements, src_data_rank=None).to_local()
        ours = ours.to_local()
    return float((ours - whole).abs().max() / scale) if whole.numel() else 0.0


def _train(case: Case, dtype: torch.dtype, num_steps: int) -> dict[str, Any]:
    """Both models side by side on every worker, two micro-batches a step with a mask each."""
    mesh = _mesh()
    torch.manual_seed(0)
    whole = case.make_model().to(dtype)
    inputs, targets = case.make_batch(dtype)
    model = copy.deepcopy(whole)
    tensor_parallel(model, mesh, given=case.plan(model, mesh.size()))
    models = (whole, model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.002, momentum=0.9, foreach=False) for m in models]
    errors: dict[str, float] = {"loss": 0.0, "gradient": 0.0}
    spread = 0.0
    for step in range(num_steps):
        losses = [0.0, 0.0]
        for which, (net, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            pieces = torch.arange(len(inputs)).chunk(2)
            for shard, rows in enumerate(pieces):
                torch.manual_seed(100 * step + shard)
                loss = _loss(net, inputs[rows], targets[rows]) * (len(rows) / len(inputs))
                loss.backward()
                losses[which] += float(loss.detach())
        errors["loss"] = max(errors["loss"], abs(losses[1] - losses[0]) / abs(losses[0]))
        whole_gradients = torch.cat([p.grad.flatten() for p in whole.parameters() if p.grad is not None])
        deviation = 0.0
        for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None and ours.shape == theirs.shape
            if step == num_steps - 1 and isinstance(ours.grad, DTensor):
                errors[name] = max(errors.get(name, 0.0), _error(ours.grad.full_tensor(), theirs.grad))
            deviation = max(deviation, _error(ours.grad, theirs.grad) * float(theirs.grad.abs().max()))
            errors[name] = max(errors.get(name, 0.0), _error(ours.grad, theirs.grad))
            if not isinstance(ours, DTensor):
                spread = max(spread, _spread(ours.grad, mesh))
        errors["gradient"] = max(errors["gradient"], deviation / float(whole_gradients.abs().max()))
        for optimizer in optimizers:
            optimizer.step()
    torch.manual_seed(0)
    whole.eval(), model.eval()
    with torch.no_grad():
        errors["evaluation"] = _error(model(inputs), whole(inputs))
    parts = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
    return {
        "errors": errors,
        "spread": spread,
        "part": parts / sum(p.numel() for p in whole.parameters()),
    }


def _spread(gradient: Tensor, mesh: DeviceMesh) -> float:
    """How far workers are apart on what each has whole."""
    largest, smallest = gradient.clone(), gradient.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group=mesh.get_group())
    return float((largest - smallest).abs().max())


@dataclass(frozen=True)
class Case:
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[torch.dtype], tuple[Tensor, Tensor]]
    large: int = 0
    sequence_parallel: bool = False
    num_steps_float64: int = 10
    num_steps_float32: int = 10
    """A last bit more or less in the weights of a small net with batch norm makes other gradients soon, on one device
    too: measured 5e-6 in the first step of ResNet-18, 3e-3 in the second and 0.2 in the tenth."""

    def plan(self, model: nn.Module, degree: int) -> TensorPlan:
        return find_plan(model, degree, large=self.large, sequence_parallel=self.sequence_parallel)


MODELS = {
    "mlp": Case(
        lambda: build(ModelSpec("mlp", {"in_features": 12, "hidden": 22, "dropout": 0.4})),
        lambda dtype: (torch.randn(5, 12, dtype=dtype), torch.randint(10, (5,))),
    ),
    "lenet": Case(lambda: build(ModelSpec("lenet")), partial(_images, 5, 1, 28)),
    "resnet18": Case(
        lambda: build(ModelSpec("resnet18", {"stem": "cifar", "num_classes": 10})),
        partial(_images, 16, 3, 8),
        num_steps_float64=4,
        num_steps_float32=1,
    ),
    "two columns": Case(
        lambda: build(
            ModelSpec("alexnet", {"stem": "cifar", "image_size": 15, "num_columns": 2, "hidden": 24, "num_classes": 10})
        ),
        partial(_images, 4, 3, 15),
    ),
    "gpt": Case(
        lambda: build(
            ModelSpec(
                "gpt",
                {"vocab_size": 33, "context": 8, "width": 16, "num_heads": 4, "num_layers": 2, "dropout": 0.2},
            )
        ),
        partial(_tokens, 3, 7, 33),
        large=200,
    ),
}


SEQUENCES = {
    "gpt": replace(MODELS["gpt"], sequence_parallel=True),  # 7 positions
    "asks for lengths": Case(
        lambda: Asking(12, 4), partial(_tokens, 2, 3, WORDS), sequence_parallel=True
    ),  # in a forward that decides by values, so each block begins and ends by itself
    "encoder": Case(
        lambda: Language(
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(12, 4, 20, dropout=0.2, activation="gelu", batch_first=True),
                num_layers=2,
                enable_nested_tensor=False,
            )
        ),
        partial(_tokens, 3, 5, WORDS),
        sequence_parallel=True,
    ),
    "one position": replace(MODELS["gpt"], make_batch=partial(_tokens, 3, 1, 33), sequence_parallel=True),
}


def _both_precisions(name: str) -> list[dict[str, Any]]:
    case = MODELS[name]
    return [
        _train(case, torch.float64, case.num_steps_float64),
        _train(case, torch.float32, case.num_steps_float32),
    ]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "degree"),
    [
        ("mlp", 4),
        ("lenet", 2),
        ("lenet", 4),
        ("resnet18", 2),
        ("two columns", 2),
        ("two columns", 4),
        ("gpt", 2),
        ("gpt", 4),
    ],
)
def test_losses_and_gradients_are_those_of_one_worker(name: str, degree: int) -> None:
    results = run_ranks(_both_precisions, degree, name, timeout_s=200)
    for rank, (exact, rounded) in enumerate(results):
        assert max(exact["errors"].values()) < 1e-10, (rank, exact["errors"])
        # Of all gradients together: what cancels in one bias is rounding on one device too.
        assert rounded["errors"]["loss"] < 1e-6, (rank, rounded["errors"])
        assert rounded["errors"]["gradient"] < (1e-5 if name == "resnet18" else 1e-6), (rank, rounded["errors"])
        assert exact["spread"] == rounded["spread"] == 0.0
        assert exact["part"] < 1.2 / degree


def _by_positions() -> list[dict[str, Any]]:
    cases = [(case, torch.float64, 10 if name == "gpt" else 1) for name, case in SEQUENCES.items()]
    return in_turn(_train, cases)


@pytest.mark.slow
def test_parts_of_the_positions_give_the_losses_and_gradients_of_one_worker() -> None:
    found = {name: find_plan(case.make_model(), 2, sequence_parallel=True).styles for name, case in SEQUENCES.items()}
    num_regions = [sum("enter_sequence" in style for style in styles.values()) for styles in found.values()]
    assert num_regions == [1, 2, 1, 1]
    assert found["asks for lengths"]["blocks.0.attention"] == "heads(num_heads, num_kv_heads) + gather_sequence"
    for results in run_ranks(_by_positions, 2, timeout_s=100):
        for name, exact in zip(SEQUENCES, results, strict=True):
            assert max(exact["errors"].values()) < 1e-10, (name, exact["errors"])
            assert exact["spread"] == 0.0, name


def _kept_bytes(model: nn.Module, inputs: Tensor) -> int:
    """What autograd keeps from forward for backward, each tensor's memory once, and no parameter."""
    parameters = {local_shard(parameter).untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(inputs)
    found = sum(tensor.untyped_storage().nbytes() for at, tensor in kept.items() if at not in parameters)
    output.sum().backward()
    return found


def _recomputed_by_positions() -> tuple[float, float, float]:
    """Bytes kept with positions parted, by those without; with activations computed again; and the largest error of
    gradients where two passes of other lengths are under way at once."""
    mesh = _mesh()
    torch.manual_seed(0)
    options = {"vocab_size": 33, "context": 64, "width": 32, "num_heads": 4, "num_layers": 4, "dropout": 0.2}
    whole = build(ModelSpec("gpt", options)).double()
    inputs = torch.randint(33, (2, 63))
    ratios, gradients = [], []
    for recomputes in (False, True):
        num_bytes = []
        for parted in (False, True):
            model = copy.deepcopy(whole)
            tensor_parallel(model, mesh, sequence_parallel=parted)
            if recomputes:
                recompute(model)
            num_bytes.append(_kept_bytes(model, inputs))
            model.zero_grad()
            torch.manual_seed(1)
            losses = [_loss(model, inputs[:, :length], inputs[:, :length]) for length in (7, 4)]
            for loss in losses:
                loss.backward()
            gradients.append([local_shard(p.grad) for p in model.parameters() if p.grad is not None])
        ratios.append(num_bytes[1] / num_bytes[0])
    error = max(
        _error(ours, theirs) for other in gradients[1:] for ours, theirs in zip(other, gradients[0], strict=True)
    )
    return ratios[0], ratios[1], error


@pytest.mark.slow
def test_parts_of_the_positions_are_kept_for_backward() -> None:
    for kept, kept_of_blocks, error in run_ranks(_recomputed_by_positions, 2, timeout_s=60):
        # In units of a position's width a block keeps 13 / 2 of shared layers, 2 of what columns have gathered, and 4
        # that are now parted: 10.5 instead of 12.5.
        assert 10.5 / 12.5 < kept < 0.9
        assert kept_of_blocks < 0.8  # its input in parts; but what lies outside of blocks is kept as it was
        assert error < 1e-12


def _learned(runs: list[tuple[str, bool]]) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Losses and weights of a GPT after three steps, by strategy and whether activations are computed again."""
    num_workers = worker_facts().world_size
    optim = {"name": "sgd", "lr": 0.1, "clip_norm": 0.1}
    job = Job().with_values(global_batch_size=12, virtual_shards=4, epochs=1, precision="float64", optim=optim)
    draw = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(33, (36, 7), generator=draw) for _ in range(2))
    found = []
    for strategy, recomputes in runs:
        plan = Plan(
            world_size=num_workers,
            mesh=parse_mesh(strategy, num_workers),
            algorithm="all_reduce",
            recompute=recomputes,
            sequence_parallel=True,
            pipeline=PipelineSpec(cuts=("blocks.1",) if "pp" in strategy else ()),
            timeout_s=60,
        )
        with paceline.init(job, plan=plan) as run:
            model = MODELS["gpt"].make_model()
            run.prepare(model, build_optimizer(job.optim, model), example=tokens[:2])
            assert num_workers == 1 or any(isinstance(m, SequenceLayerNorm) for m in run.model.modules())
            data = torch.utils.data.TensorDataset(tokens, targets)
            losses = [float(run.step(batch, lambda model, batch: _loss(model, *batch))) for batch in run.batches(data)]
            found.append((losses, {name: value.detach().clone() for name, value in run.whole_state().items()}))
    return found


@pytest.mark.slow
def test_parts_of_the_positions_on_meshes() -> None:
    (losses, weights), *_ = run_ranks(_learned, 1, [("dp", False)])[0]
    for other_losses, other in run_ranks(_learned, 4, [("pp2 x tp2", True), ("fsdp2 x tp2", False)], timeout_s=200)[0]:
        assert len(losses) == 3 and other_losses == pytest.approx(losses, rel=1e-12)
        assert weights.keys() == other.keys()
        assert max(_error(other[name], weight) for name, weight in weights.items()) < 1e-10


def _sharded_and_tensor(name: str) -> list[float]:
    """fsdp2 x tp2, three steps of two micro-batches, each worker's share a half of the batch; gradients are sums."""
    from torch.distributed.fsdp import fully_shard

    mesh = _mesh(2, 2, names=("fsdp", "tp"))
    case = MODELS[name]
    torch.manual_seed(0)
    whole = case.make_model().double().eval()  # no dropout: shares of the batch have masks of their own
    inputs, targets = case.make_batch(torch.float64)
    inputs, targets = inputs.repeat(2, *[1] * (inputs.dim() - 1)), targets.repeat(2, *[1] * (targets.dim() - 1))
    model = copy.deepcopy(whole)
    tensor_parallel(model, mesh["tp"], given=case.plan(model, mesh["tp"].size()))
    for module in (*model.children(), model):
        # The root itself uses its embedding's matrix, as classifier.
        if next(module.parameters(), None) is not None and not isinstance(module, nn.Embedding):
            fully_shard(module, mesh=mesh["fsdp"]).set_gradient_divide_factor(1.0)
    share = torch.arange(len(inputs)).chunk(2)[mesh.get_local_rank("fsdp")]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, foreach=False) for m in (whole, model)]
    errors = []
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        _loss(whole, inputs, targets).backward()
        for rows in share.chunk(2):
            (_loss(model, inputs[rows], targets[rows]) * (len(rows) / len(inputs))).backward()
        for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            assert isinstance(ours.grad, DTensor) and theirs.grad is not None
            errors.append(_error(ours.grad.full_tensor(), theirs.grad))
        for optimizer in optimizers:
            optimizer.step()
        for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            assert isinstance(ours, DTensor)
            errors.append(_error(ours.full_tensor(), theirs.detach()))
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "lenet"])
def test_parameters_may_be_sharded_along_another_axis_too(name: str) -> None:
    assert max(max(errors) for errors in run_ranks(_sharded_and_tensor, 4, name, timeout_s=100)) < 1e-10


class _Counted:
    """Bytes that this worker gives to others, by what each collective is known to cost (see `bytes_per_sample`)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world_size: int, rank: int) -> None:
        self.num_bytes = 0.0
        all_reduce, all_gather, all_to_all = dist.all_reduce, dist.all_gather, dist.all_to_all_single
        reduce_scatter = dist.reduce_scatter

        def count_all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.num_bytes += 2 * (world_size - 1) / world_size * tensor.nbytes
            return all_reduce(tensor, *args, **kwargs)

        def count_all_gather(parts: list[Tensor], own: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.num_bytes += (world_size - 1) * own.nbytes
            return all_gather(parts, own, *args, **kwargs)

        def count_all_to_all(
            to: Tensor, source: Tensor, received: Any, sent: list[int], *args: Any, **kwargs: Any
        ) -> Any:
            self.num_bytes += (sum(sent) - sent[rank]) * source[0].nbytes
            return all_to_all(to, source, received, sent, *args, **kwargs)

        def count_reduce_scatter(own: Tensor, parts: list[Tensor], *args: Any, **kwargs: Any) -> Any:
            self.num_bytes += (world_size - 1) * own.nbytes  # as a ring does; Gloo sums all, which is twice that
            return reduce_scatter(own, parts, *args, **kwargs)

        monkeypatch.setattr(dist, "reduce_scatter", count_reduce_scatter)
        monkeypatch.setattr(dist, "all_reduce", count_all_reduce)
        monkeypatch.setattr(dist, "all_gather", count_all_gather)
        monkeypatch.setattr(dist, "all_to_all_single", count_all_to_all)


def _count(cases: dict[str, Case]) -> dict[str, tuple[float, float]]:
    """By model: bytes counted and bytes with_forecasts, of one forward and backward."""
    mesh = _mesh()
    found = {}
    for name, case in cases.items():
        torch.manual_seed(0)
        model = case.make_model()
        inputs, targets = case.make_batch(torch.float32)
        sizes = layer_sizes(model, partial(_call, inputs), len(inputs))
        plan = tensor_parallel(model, mesh, given=case.plan(model, mesh.size()))
        with pytest.MonkeyPatch.context() as monkeypatch:
            counted = _Counted(monkeypatch, mesh.size(), mesh.get_local_rank())
            _loss(model, inputs, targets).backward()
        with_forecasts = bytes_per_sample(plan, sizes, 4) * len(inputs) + bytes_per_pass(
            plan, model, mesh.get_local_rank(), 4
        )
        found[name] = counted.num_bytes, with_forecasts
    return found


def _counted_models() -> dict[str, tuple[float, float]]:
    names = ("mlp", "lenet", "two columns", "gpt")
    return _count(
        {name: MODELS[name] for name in names} | {f"{name} by positions": SEQUENCES[name] for name in SEQUENCES}
    )


def test_workers_send_the_bytes_of_the_formula() -> None:
    for found in run_ranks(_counted_models, 4, timeout_s=60):
        for name, (counted, with_forecasts) in found.items():
            assert counted > 0 and counted == pytest.approx(with_forecasts, rel=1e-12), name


def _zoo() -> dict[str, tuple[float, str]]:
    """By model: the largest error of its output and gradients, in training and in evaluation; the styles found."""
    mesh = _mesh()
    found = {}
    for name, kept in ZOO.items():
        torch.manual_seed(0)
        whole = kept.make().double()
        inputs = torch.randint(WORDS, (3, 5)) if kept.is_of_words else torch.randn(3, 3, 9, 9).double()
        targets = torch.randint(WORDS, (3, 5) if kept.is_of_words else (3,))
        model = copy.deepcopy(whole)
        plan = tensor_parallel(model, mesh, given=find_plan(model, 3, large=0))
        assert given_plan(whole, json.loads(json.dumps(dict(plan.styles))), 3).styles == plan.styles, name
        errors = []
        for training in (True, False):
            for net in (whole.train(training), model.train(training)):
                net.zero_grad()
                torch.manual_seed(1)
                _loss(net, inputs, targets).backward()
            for (key, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
                assert ours.grad is not None and theirs.grad is not None, (name, key)
                errors.append(_error(ours.grad, theirs.grad))
                assert errors[-1] < 1e-9, (name, key, errors[-1])
        with torch.no_grad():
            errors.append(_error(model(inputs), whole(inputs)))
        styles = [entry.keys() & LAYER_STYLES.keys() for entry in plan.entries.values()]
        found[name] = max(errors), "".join(style[0] for (style,) in filter(None, styles))
    return found


@pytest.mark.slow
def test_unusual_models_on_three_workers() -> None:
    """Uneven parts; heads that cannot be divided, found out by trial; classifiers that are no layers."""
    for found in run_ranks(_zoo, 3, timeout_s=100):
        for name, (error, styles) in found.items():
            assert error < 1e-10, name
            assert styles == ZOO[name].styles, name


GIVEN = {
    "tokens": "embedding_rowwise",
    "blocks.*.attention": "heads(num_heads)",
    "blocks.*.attention.query_key_value": "packed_colwise(3)",
    "blocks.*.attention.output": "rowwise",
    "blocks.0.mlp.input": "colwise_rep",
    "blocks.1.mlp.output": "rowwise_split_input",
}


def _with_given_plan(strategy: str, is_carried: bool) -> tuple[list[float], list[str], list[str]]:
    """Losses of a GPT, which of its parameters are divided along tp, and the run's notes on that."""
    num_workers = worker_facts().world_size
    job = Job().with_values(global_batch_size=8, virtual_shards=2, epochs=1, precision="float64")
    draw = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(33, (24, 7), generator=draw) for _ in range(2))
    mesh = parse_mesh(strategy, num_workers)
    with paceline.init(job, plan=Plan(world_size=num_workers, mesh=mesh, timeout_s=60)) as run:
        model = MODELS["gpt"].make_model()
        if is_carried:
            model._tp_plan = GIVEN  # type: ignore[assignment]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.prepare(model, optimizer, example=tokens[:2], tensor_plan=None if is_carried else GIVEN)
        data = torch.utils.data.TensorDataset(tokens, targets)
        losses = [float(run.step(batch, lambda model, batch: _loss(model, *batch))) for batch in run.batches(data)]
        divided = [name for name, parameter in run.model.named_parameters() if isinstance(parameter, DTensor)]
        return losses, divided, [note for note in run.notes if note.startswith("tensor plan")]


@pytest.mark.slow
def test_a_given_plan_is_applied_as_one_that_was_found() -> None:
    ((losses, none, _),) = run_ranks(_with_given_plan, 1, "dp", False)
    assert len(losses) == 3 and not none
    for is_carried in (False, True):
        other, divided, notes = run_ranks(_with_given_plan, 2, "tp", is_carried)[0]
        assert other == pytest.approx(losses, rel=1e-12)
        assert {name for name in divided if "mlp" in name} == {
            "blocks.0.mlp.input.weight",
            "blocks.0.mlp.input.bias",
            "blocks.1.mlp.output.weight",
        }
        assert len(notes) == 1 and "blocks.*.attention.query_key_value: packed_colwise(3)" in notes[0]
    for other, _, notes in run_ranks(_with_given_plan, 4, "pp2 x tp2", False, timeout_s=100):
        assert other == pytest.approx(losses, rel=1e-12) and len(notes) == 1
