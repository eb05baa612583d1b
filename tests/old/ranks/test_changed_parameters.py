"""Parameters that a forward pass changes, gradients that a loss function leaves, and embeddings whose updates depend on
which samples a worker has: each is refused in a sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.errors import ModelError
from paceline.parallel.engines.one_process import OneProcessDataParallel
from paceline.spec import Job, Plan, parse_mesh
from tests.kit.workers import run_ranks

DRAW = torch.Generator().manual_seed(5)
DATA = TensorDataset(
    torch.randn(24, 6, generator=DRAW, dtype=torch.float64),
    torch.randint(3, (24,), generator=DRAW),
    torch.randint(12, (24, 5), generator=DRAW),
)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class Words(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(12, 6, **options), nn.Linear(6, 3)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(self.words(words).mean(1))
        return out


class Momentum(nn.Module):
    """A second encoder that begins as a copy of the first and follows it, moved in the forward pass."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.second = copy.deepcopy(self.first).requires_grad_(False)

    @torch.no_grad()
    def _follow(self) -> None:
        for one, other in zip(self.first.parameters(), self.second.parameters(), strict=True):
            if self.how in ("new", "not at all"):
                continue
            if self.how == "elsewhere":
                other.data = torch.cat([other.data.flatten(), torch.zeros(2)])[:-2].view_as(other)
            elif self.how == "replaced":
                other.data = other.data * 0.9 + one.data * 0.1
            elif self.how == "hidden":
                other.data.mul_(0.9).add_(one.data, alpha=0.1)
            else:
                other.mul_(0.9).add_(one, alpha=0.1)

        if self.how == "new":
            weight = self.second.weight * 0.9 + self.first.weight * 0.1
            self.second.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        self._follow()
        out: Tensor = self.head(self.first(inputs).tanh() * self.second(inputs))
        return out


def plain(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def of_words(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[2]), batch[1])


def with_backward(model: nn.Module, batch: Any) -> Tensor:
    """The same by a backward pass, which also leaves gradients of the parameters."""
    inputs = batch[0].clone().requires_grad_()
    F.cross_entropy(model(inputs), batch[1], reduction="sum").backward()
    assert inputs.grad is not None
    return F.cross_entropy(model((inputs + 0.1 * inputs.grad.sign()).detach()), batch[1])


def _train(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    parity: str,
    *,
    by: Any = torch.optim.SGD,
    strategy: str = "dp",
    **values: Any,
) -> list[float]:
    job = Job().with_values(
        **{"global_batch_size": 8, "virtual_shards": 4, "precision": "float64", "parity": parity} | values
    )
    algorithm: Any = "tree_exact" if parity == "bitwise" else "all_reduce"
    num_workers = worker_facts().world_size
    mesh = parse_mesh(strategy, num_workers) if num_workers > 1 else None
    plan = Plan(world_size=num_workers, algorithm=algorithm, timeout_s=60, mesh=mesh)
    with paceline.init(job, plan=plan, max_steps=3) as run:
        run.prepare(model, by(list(model.parameters()), lr=0.1))
        return [float(run.step(batch, loss)) for batch in run.batches(DATA)]


REFUSED: list[tuple[str, Callable[[], nn.Module], Callable[[nn.Module, Any], Tensor], str]] = [
    ("backward", layers, with_backward, "changed the gradient of the parameter '0.weight' itself"),
    ("in place", lambda: Momentum("in place"), plain, "changed the parameter 'second.weight'"),
    ("replaced", lambda: Momentum("replaced"), plain, "changed the parameter 'second.weight'"),
    ("hidden", lambda: Momentum("hidden"), plain, "changed the parameter 'second.weight'"),
    ("new", lambda: Momentum("new"), plain, "changed the parameter 'second.weight'"),
    ("max_norm", lambda: Words(max_norm=0.5), of_words, "The layer 'words' has max_norm"),
]


def _refusals() -> list[str]:
    found = []
    for _, model, loss, _ in REFUSED:
        for parity in ("numeric", "bitwise"):
            with pytest.raises(ModelError) as refusal:
                _train(model(), loss, parity)
            found.append(str(refusal.value))
    return found


def test_what_changes_parameters_or_their_gradients_is_refused() -> None:
    (found,) = run_ranks(_refusals, 1)
    for sentence, expected in zip(found, [words for *_, words in REFUSED for _ in range(2)], strict=True):
        assert expected in sentence


def _moved() -> list[list[float]]:
    found = []
    for how in ("elsewhere", "not at all"):
        torch.manual_seed(0)
        found.append(_train(Momentum(how), plain, "numeric"))
    return found


def test_parameters_may_be_put_elsewhere_with_their_values() -> None:
    """As a recurrent layer's `flatten_parameters()` does, which people call in forward passes."""
    ((moved, left),) = run_ranks(_moved, 1)
    assert len(moved) == 3 and moved == left


def _sparse() -> list[float]:
    return _train(Words(sparse=True), of_words, "numeric", by=torch.optim.SparseAdam)


def _frequent(**values: Any) -> list[float]:
    return _train(Words(scale_grad_by_freq=True), of_words, "numeric", **values)


def penalised(model: nn.Module, batch: Any) -> Tensor:
    squares: Tensor = 0.01 * torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()
    return plain(model, batch) + squares


def _penalised(strategy: str) -> list[float]:
    return _train(layers(), penalised, "numeric", strategy=strategy)


@pytest.mark.parametrize("strategy", ["fsdp", "tp"])
def test_a_penalty_on_weights_that_are_sharded_is_refused(strategy: str) -> None:
    with pytest.raises(AssertionError, match="ModelError: The loss function, the script or a layer uses a parameter"):
        run_ranks(_penalised, 2, strategy)


def _frequent_by_shards() -> list[float]:
    return _frequent(shard_by_shard=True)


def test_embeddings_that_depend_on_which_samples_a_worker_has() -> None:
    with pytest.raises(AssertionError, match="'words' makes sparse gradients, which cannot be added up on several"):
        run_ranks(_sparse, 2)
    with pytest.raises(AssertionError, match="'words' has scale_grad_by_freq"):
        run_ranks(_frequent, 1)
    (alone,) = run_ranks(_frequent_by_shards, 1)
    for losses in run_ranks(_frequent_by_shards, 2):
        assert losses == pytest.approx(alone, rel=1e-12)


def _moved_teacher() -> None:
    job = Job().with_values(global_batch_size=8, virtual_shards=4, precision="float64")
    with paceline.init(job, plan=Plan(), max_steps=3) as run:
        student, teacher = layers(), layers()
        run.prepare(student, torch.optim.SGD(student.parameters(), lr=0.1))
        teacher = run.prepare(teacher)

        def distilled(model: nn.Module, batch: Any) -> Tensor:
            with torch.no_grad():
                for one, other in zip(teacher.parameters(), model.parameters(), strict=True):
                    one.mul_(0.9).add_(other, alpha=0.1)
            apart: Tensor = model(batch[0]) - teacher(batch[0])
            return apart.square().mean()

        for batch in run.batches(DATA):
            run.step(batch, distilled)


def test_a_loss_function_must_not_move_another_model() -> None:
    with pytest.raises(AssertionError, match=r"ModelError: A forward pass changed the parameter '0.weight'"):
        run_ranks(_moved_teacher, 1)


def _pruned_later() -> None:
    job = Job().with_values(global_batch_size=8, virtual_shards=4, precision="float64")
    with paceline.init(job, plan=Plan(), max_steps=3) as run:
        model = layers()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.batches(DATA):
            run.step(batch, plain)
            prune.l1_unstructured(model.get_submodule("0"), "weight", 0.3)


def test_what_replaces_parameters_after_prepare_gets_a_sentence() -> None:
    with pytest.raises(
        AssertionError, match=r"ModelError: The script has replaced or removed the parameter '0.weight'"
    ):
        run_ranks(_pruned_later, 1)


def _assigned(strategy: str, in_place: bool) -> list[float]:
    """The losses of a run whose script shrinks the weights after every step."""
    plan = Plan(world_size=2, algorithm="all_reduce", timeout_s=60, mesh=parse_mesh(strategy, 2))
    job = Job().with_values(global_batch_size=8, virtual_shards=4, precision="float64")
    with paceline.init(job, plan=plan, max_steps=3, progress=False) as run:
        model, losses = layers(), []
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.batches(DATA):
            losses.append(float(run.step(batch, plain)))
            for parameter in model.parameters():
                if in_place:
                    parameter.data.mul_(0.5)
                else:
                    parameter.data = parameter.data * 0.5
        return losses


def test_data_of_sharded_parameters_is_not_assigned_to_in_vain() -> None:
    whole, _ = run_ranks(_assigned, 2, "dp", False)
    assert run_ranks(_assigned, 2, "fsdp", True)[0] == pytest.approx(whole, rel=1e-12)
    with pytest.raises(AssertionError, match=r"ModelError: The script has assigned to '.data' of the parameter '0.w"):
        run_ranks(_assigned, 2, "fsdp", False)


class Mixed(nn.Module):
    """One block with parameters of two types, or one of them without elements."""

    def __init__(self, dtype: torch.dtype, *, has_empty: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8, dtype=dtype), nn.Linear(8, 3)
        self.nothing = nn.Parameter(torch.zeros(0 if has_empty else 1, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs.to(self.first.weight.dtype)).to(self.second.weight.dtype)
        out: Tensor = self.second(hidden) + self.nothing.sum()
        return out


def _mixed() -> list[float]:
    return _train(Mixed(torch.bfloat16), plain, "numeric", strategy="fsdp", precision="float32")


def _empty() -> list[float]:
    return _train(Mixed(torch.float64, has_empty=True), plain, "numeric", strategy="fsdp")


def test_parameters_that_cannot_be_sharded_get_a_sentence() -> None:
    with pytest.raises(AssertionError, match=r"ModelError: A block of the model trains parameters of several types"):
        run_ranks(_mixed, 2)
    with pytest.raises(AssertionError, match="ModelError: The model has a parameter without elements"):
        run_ranks(_empty, 2)


def hooked(how: str = "clamp") -> nn.Module:
    return add_hook(layers(), how)


def add_hook(model: nn.Module, how: str) -> nn.Module:
    weight = next(model.parameters())
    if how == "clamp":
        weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    elif how == "mask":
        weight.register_hook(lambda gradient: gradient * (torch.arange(6) < 3))
    else:
        weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(0.5) and None)
    return model


def _hooked(how: str, strategy: str = "dp", **values: Any) -> list[float]:
    return _train(hooked(how), plain, "numeric", strategy=strategy, **values)


def _clamped_by_shards() -> list[float]:
    return _hooked("clamp", shard_by_shard=True)


@pytest.mark.timeout(200)
def test_hooks_on_gradients() -> None:
    for how in ("clamp", "later"):
        with pytest.raises(AssertionError, match=r"ModelError: The parameter '0.weight' has a hook that changes parts"):
            run_ranks(_hooked, 1, how)
    for strategy in ("fsdp", "tp"):
        with pytest.raises(AssertionError, match=r"ModelError: The parameter '0.weight' has a hook on its gradient"):
            run_ranks(_hooked, 2, "mask", strategy)
    (masked,), (clamped,) = run_ranks(_hooked, 1, "mask"), run_ranks(_clamped_by_shards, 1)
    assert run_ranks(_hooked, 2, "mask")[1] == pytest.approx(masked, rel=1e-12)
    assert run_ranks(_clamped_by_shards, 2)[1] == pytest.approx(clamped, rel=1e-12)


def _hooked_later(how: str) -> None:
    job = Job().with_values(global_batch_size=8, virtual_shards=4, precision="float64")
    with paceline.init(job, plan=Plan(), max_steps=3) as run:
        model = layers()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        add_hook(model, how)
        for batch in run.batches(DATA):
            run.step(batch, plain)


def test_hooks_on_gradients_after_prepare() -> None:
    with pytest.raises(AssertionError, match=r"ModelError: The parameter '0.weight' has a hook that changes parts"):
        run_ranks(_hooked_later, 1, "clamp")
    run_ranks(_hooked_later, 1, "mask")


class Noisy(torch.optim.SGD):
    """Adds noise to each update, as Langevin dynamics do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.01)


def _noisy(strategy: str = "dp") -> list[float]:
    return _train(layers(), plain, "numeric", by=Noisy, strategy=strategy)


def _factored(strategy: str) -> list[float]:
    return _train(layers(), plain, "numeric", by=torch.optim.Adafactor, strategy=strategy)


@pytest.mark.timeout(200)
def test_optimizers_that_draw_or_cannot_be_sharded() -> None:
    (alone,) = run_ranks(_noisy, 1)
    for losses in run_ranks(_noisy, 2):
        assert losses == pytest.approx(alone, rel=1e-12)
    with pytest.raises(AssertionError, match="ModelError: Noisy draws random numbers for the update"):
        run_ranks(_noisy, 2, "fsdp")
    with pytest.raises(AssertionError, match=r"ModelError: Adafactor cannot update .* fsdp2: .*aten.pow_.Scalar"):
        run_ranks(_factored, 2, "fsdp")


def pruned() -> nn.Module:
    model = layers()
    prune.l1_unstructured(model.get_submodule("0"), "weight", 0.3)
    return model


def test_models_whose_copies_would_be_others_get_a_sentence() -> None:
    for model, sentence in ((hooked(), "'0.weight' has a hook on its gradient"), (pruned(), "cannot be copied")):
        with pytest.raises(ModelError, match=sentence):
            OneProcessDataParallel(model, Job(), Plan(devices_in_process=2), (torch.device("cpu"),) * 2)


def _without_weights() -> str:
    with pytest.raises(ModelError) as refusal:
        _train(nn.Sequential(nn.Tanh(), nn.LazyLinear(3)), plain, "numeric")
    return str(refusal.value)


def test_a_layer_without_weights_gets_a_sentence() -> None:
    (said,) = run_ranks(_without_weights, 1)
    assert "'1.weight' has no shape yet" in said


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.waves = nn.Parameter(torch.randn(6, 3, dtype=torch.complex128))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs.to(torch.complex128) @ self.waves).abs()


def _complex(parity: str = "numeric", **values: Any) -> list[float]:
    return _train(Waves(), plain, parity, optim={"clip_norm": 0.1}, **values)


def _complex_refusals() -> list[str]:
    found = []
    for values in ({"parity": "bitwise"}, {"aggregation": {"method": "local_sgd"}}, {"strategy": "fsdp"}):
        with pytest.raises(ModelError) as refusal:
            _complex(**values)
        found.append(str(refusal.value))
    return found


def test_complex_numbers_train_where_their_gradients_are_added_whole() -> None:
    (alone,) = run_ranks(_complex, 1)
    for losses in run_ranks(_complex, 2):
        assert losses == pytest.approx(alone, rel=1e-7)
    for found in run_ranks(_complex_refusals, 2):
        assert all("'waves' has complex numbers" in sentence for sentence in found)
