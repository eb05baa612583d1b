"""What a script draws for the samples of a batch before `run.step` is the same on any number of workers, or told.

A script that mixes samples there is refused by several workers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.sharded_batch import ShardedBatch
from paceline.spec import Job, Mesh, Plan, parse_mesh
from paceline.train.records.digest import weights_sha256
from tests.kit.workers import run_ranks

INPUTS = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
OF_NUMPY = np.random.default_rng(0)
OF_PYTHON = random.Random(0)


Change = Callable[[Any], Any]


def _noisy(batch: Any) -> Any:
    """As diffusion models are trained: noise of a strength of its own is added to each sample."""
    noise, times = torch.randn_like(batch[0]), torch.randint(0, 10, (len(batch[0]),))
    return [batch[0] + noise * times[:, None] / 10 + torch.rand(3).sum() * torch.rand(())]


def _for_others_first(batch: Any) -> Any:
    """Numbers for something else, as many as two of three workers or one of one have samples at times."""
    torch.rand(4, 3), torch.randn(8), torch.randperm(5), torch.multinomial(torch.ones(6), 5)
    return _noisy(batch)


def _in_place(batch: Any) -> Any:
    batch[0].add_(torch.randn_like(batch[0]))
    batch[0][:, 1].mul_(torch.empty(len(batch[0])).log_normal_())
    return batch


def _in_its_list(batch: Any) -> Any:
    batch[0] = batch[0] * torch.rand(len(batch[0]), 1)
    return batch


def _for_something_else(batch: Any) -> Any:
    torch.rand(1)
    return batch


def _by_distributions(batch: Any) -> Any:
    normal = torch.distributions.Normal(batch[0], 0.5).sample()
    classes = F.gumbel_softmax(batch[0], hard=True)
    return [torch.normal(normal, 0.1) + classes * torch.distributions.Exponential(torch.ones(len(normal), 1)).sample()]


def _by_a_teacher(batch: Any) -> Any:
    with torch.no_grad(), torch.device("cpu"):
        return [batch[0] + nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3)).to(batch[0].dtype)(batch[0])]


def _row_by_row(batch: Any) -> Any:
    """By operators that fill no tensor."""
    rates = batch[0].exp()
    classes = torch.distributions.Categorical(logits=batch[0]).sample()
    mixed = torch.distributions.Beta(torch.ones(len(rates)) / 2, 0.5).sample()
    return [torch.poisson(rates) + torch.distributions.Gamma(rates, 1.0).sample() * mixed[:, None] + classes[:, None]]


def _with_states_that_come_back(batch: Any) -> Any:
    with torch.random.fork_rng():
        torch.randn(100)
    state = torch.get_rng_state()
    scale = torch.rand(len(batch[0]), 1)
    torch.set_rng_state(state)
    return [batch[0] * scale + torch.normal(0.0, 0.2, size=(len(batch[0]), 1))]


def _in_another_memory_order(batch: Any) -> Any:
    columns = batch[0].t().contiguous().t()
    return [columns + torch.randn_like(columns) + torch.bernoulli(columns.sigmoid())]


def _of_own_generator() -> Change:
    generator = torch.Generator().manual_seed(5)

    def change(batch: Any) -> Any:
        shared = torch.rand(1, 4, generator=generator)
        return [batch[0] + torch.randn(batch[0].shape, generator=generator) * shared]

    return change


@torch.jit.script
def _noisy_in_script(inputs: Tensor) -> Tensor:
    return inputs + torch.randn_like(inputs)


CHANGES: dict[str, Change] = {
    "another tensor": _noisy,
    "after others": _for_others_first,
    "in place": _in_place,
    "in its list": _in_its_list,
    "distributions": _by_distributions,
    "a teacher": _by_a_teacher,
    "row by row": _row_by_row,
    "states that come back": _with_states_that_come_back,
    "another memory order": _in_another_memory_order,
    "its own generator": _of_own_generator(),
    "a seed": lambda batch: [batch[0] + torch.manual_seed(7).initial_seed() / 7 * torch.randn_like(batch[0])],
}


def _of_a_subset(batch: Any) -> Any:
    batch[0][batch[0][:, 0] > 0] += torch.randn(int((batch[0][:, 0] > 0).sum()), 4)
    return batch


def _antithetic(batch: Any) -> Any:
    half = torch.randint(0, 10, (len(batch[0]) // 2 + 1,))
    return [batch[0] * torch.cat([half, 9 - half])[: len(batch[0]), None]]


def _of_each(batch: Any) -> Any:
    return [torch.stack([one + torch.randn(5)[1:] for one in batch[0]])]


def _places(batch: Any) -> Tensor:
    return torch.arange(len(batch[0])) / len(batch[0])


def _decided_for_each(batch: Any) -> Any:
    return [torch.stack([one.flip(0) if torch.rand(1) < 0.5 else one for one in batch[0]])]


DIVIDED: dict[str, tuple[Change, str]] = {
    "samples in columns": (lambda batch: [batch[0] + torch.rand(5, len(batch[0])).t()[:, 1:]], "(rand)"),
    "twice as many rows": (lambda batch: [batch[0] + torch.randn(2 * len(batch[0]), 4).chunk(2)[1]], "(randn)"),
    "apart from the batch": (lambda batch: [*batch, torch.randn(2 * len(batch[0]), 4)[::2]], "(randn)"),
    "each sample": (_of_each, "(randn)"),
}
TOLD: dict[str, Change] = {
    "a scripted function": lambda batch: [_noisy_in_script(batch[0])],
    "antithetic": _antithetic,
    "decided for each": _decided_for_each,
    "by NumPy": lambda batch: [batch[0] + torch.from_numpy(np.random.randn(*batch[0].shape)).float()],
    "by Python": lambda batch: [batch[0] * torch.tensor([[random.random()] for _ in range(2 * len(batch[0]))])[::2]],
    "by a generator of NumPy's": lambda batch: [
        batch[0] + torch.from_numpy(OF_NUMPY.normal(size=batch[0].shape)).float()
    ],
    "by a generator of Python's": lambda batch: [
        batch[0] * torch.tensor([[OF_PYTHON.random()] for _ in range(2 * len(batch[0]))])[::2]
    ],
    "stratified": lambda batch: [batch[0] * ((torch.rand(1) + _places(batch)) % 1)[:, None]],
}
HARMLESS: dict[str, Change] = {
    "classes": lambda batch: [batch[0] * torch.rand(10)[batch[0][:, 0].gt(0).long(), None]],
    "nothing": lambda batch: batch,
    "without draws": lambda batch: [batch[0].double().float() * 2],
    "a mixup's share": lambda batch: [batch[0] * np.random.beta(0.2, 0.2) * random.uniform(0.5, 1)],
    "shares by own generators": lambda batch: [batch[0] * OF_NUMPY.beta(0.2, 0.2) * OF_PYTHON.uniform(0.5, 1)],
    "seeds": lambda batch: [batch[0] * 2, np.random.seed(3), random.seed(3)],
    "one number for all": lambda batch: [batch[0] * np.random.rand() * torch.rand(()) + torch.rand(1, 4)],
    "draws for something else": _for_something_else,
}


def _collate(samples: list[tuple[Tensor]]) -> list[Tensor]:
    return [torch.stack([one for (one,) in samples])]


def _loss(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch[0]).square().mean()
    return loss


def _flipped(batch: Any) -> Any:
    """As timm's Mixup does it."""
    return [batch[0].mul_(0.7).add_(batch[0].flip(0).mul_(0.3))]


def _mixing(first_step: int, plan: Plan, max_steps: int = 4) -> tuple[list[str], int]:
    """The notes of a script that mixes samples from a step on, and how many steps it made."""
    plan = replace(plan, world_size=worker_facts().world_size, algorithm="all_reduce", timeout_s=60)
    job = Job(global_batch_size=8, virtual_shards=4, epochs=20)
    with paceline.init(job, plan=plan, max_steps=max_steps, progress=False) as run:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), example=INPUTS[:2])
        for batch in run.batches(TensorDataset(INPUTS)):
            run.step(_flipped(batch) if run.steps >= first_step else batch, _loss)
        return [note for note in run.notes if "of several samples" in note], run.steps


def test_samples_that_are_mixed_before_the_step_are_refused_by_several_workers() -> None:
    ((notes, steps),) = run_ranks(_mixing, 1, 0, Plan())
    assert len(notes) == 1 and "batch[0]" in notes[0] and steps == 4
    with pytest.raises(AssertionError, match=r"ModelError: .* makes batch\[0\] of several samples"):
        run_ranks(_mixing, 2, 0, Plan())


def test_so_are_those_of_a_mixup_that_begins_later() -> None:
    with pytest.raises(AssertionError, match=r"ModelError: .* of several samples"):
        run_ranks(_mixing, 2, 10, Plan(), 40)


def test_workers_that_all_have_the_whole_batch_mix_the_same() -> None:
    for notes, steps in run_ranks(_mixing, 2, 0, Plan(mesh=Mesh(pp=2))):
        assert len(notes) == 1 and steps == 4


def _taught(folder: str, max_steps: int) -> str:
    """The fingerprint of a model that learns from a teacher in inference mode, whose bits differ under a mode."""
    plan = Plan(world_size=1, algorithm="all_reduce")
    job = Job(global_batch_size=8, virtual_shards=4, epochs=2)
    teacher = nn.Parameter(torch.randn(12, 4, generator=torch.Generator().manual_seed(1)))
    with paceline.init(job, plan=plan, max_steps=max_steps, checkpoint_dir=folder, progress=False) as run:
        model = nn.Linear(4, 1).double()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for (batch,) in run.batches(TensorDataset(INPUTS)):
            with torch.inference_mode():
                sequences = (batch[:, None] * torch.arange(1.0, 7)[:, None]).transpose(0, 1)
                targets = nn.functional.linear(sequences, teacher).transpose(0, 1)
            given = (batch.double(), targets.flatten(1).double())
            run.step(given, lambda model, one: (model(one[0]) * one[1]).mean())
        return weights_sha256(model.state_dict())


def test_an_interrupted_run_computes_the_same_bits_with_its_batches(tmp_path: Path) -> None:
    run_ranks(_taught, 1, str(tmp_path / "interrupted"), 4)
    assert run_ranks(_taught, 1, str(tmp_path / "interrupted"), 6) == run_ranks(_taught, 1, str(tmp_path / "whole"), 6)


def _left_by_an_iterator_that_is_kept() -> bool:
    plan = Plan(world_size=1, algorithm="all_reduce")
    with paceline.init(Job(global_batch_size=8, virtual_shards=4), plan=plan, progress=False) as run:
        model = nn.Linear(4, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batches = iter(run.batches(TensorDataset(INPUTS)))
        next(batches)
    return _get_current_dispatch_mode() is not None


def test_nothing_is_recorded_after_a_run_that_ends_before_its_iterator() -> None:
    assert run_ranks(_left_by_an_iterator_that_is_kept, 1) == [False]


def _trained(kind: str, strategy: str, stop: int | None = None, folder: str | None = None) -> list[float]:
    """The losses of a run of which the last batch has three samples."""
    num_workers = worker_facts().world_size
    mesh = parse_mesh(strategy, num_workers) if num_workers > 1 else None
    plan = Plan(world_size=num_workers, algorithm="all_reduce", timeout_s=60, mesh=mesh)
    job = Job(global_batch_size=8, virtual_shards=4, epochs=2, precision="float64")
    with paceline.init(job, plan=plan, progress=False, max_steps=stop, checkpoint_dir=folder) as run:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), example=INPUTS[:2].double())
        losses = []
        for batch in run.batches(TensorDataset(INPUTS[:19]), sampler=lambda _seed, _epoch: range(19)):
            losses.append(float(run.step(CHANGES[kind](batch), _loss)))
            run.evaluate(TensorDataset(INPUTS[:8]), lambda model, batch: {"loss": model(batch[0])[:, 0]})
        assert not [note for note in run.notes if "run.step" in note], run.notes
        return losses


@pytest.mark.parametrize("kind", CHANGES)
def test_draws_for_samples_are_the_same_on_any_number_of_workers(kind: str) -> None:
    (alone,) = run_ranks(_trained, 1, kind, "dp")
    assert len(set(alone)) == 6
    for num_workers, strategy in (2, "dp"), (3, "dp"), (2, "fsdp"), (2, "pp"):
        for losses in run_ranks(_trained, num_workers, kind, strategy):
            np.testing.assert_allclose(losses, alone, rtol=1e-9, err_msg=f"{num_workers} {strategy}")


def test_a_resumed_run_draws_the_same(tmp_path: Path) -> None:
    (whole,) = run_ranks(_trained, 1, "another tensor", "dp")
    run_ranks(_trained, 2, "another tensor", "dp", 4, str(tmp_path))
    (rest,) = run_ranks(_trained, 1, "another tensor", "dp", None, str(tmp_path))
    np.testing.assert_allclose(rest, whole[4:], rtol=1e-9)


def _adversaries() -> list[float]:
    """Two models, each with a step on every batch, for which the script draws before each step."""
    plan = Plan(world_size=worker_facts().world_size, algorithm="all_reduce", timeout_s=60)
    with paceline.init(Job(global_batch_size=8, virtual_shards=4, precision="float64"), plan=plan) as run:
        models = [nn.Linear(4, 1), nn.Linear(4, 4)]
        critic, maker = (run.prepare(one, torch.optim.SGD(one.parameters(), lr=0.1))[0] for one in models)
        losses = []
        for batch in run.batches(TensorDataset(INPUTS), sampler=lambda _seed, _epoch: range(24)):
            noise = torch.randn(len(batch[0]), 4).double()
            losses += [float(run.step([*batch, maker(noise).detach()], _of_critic, model=critic))]
            losses += [
                float(
                    run.step(
                        torch.randn(len(batch[0]), 4).double(),
                        lambda maker, noise: critic(maker(noise)).mean(),
                        model=maker,
                    )
                )
            ]
        return losses


def _of_critic(critic: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = (critic(batch[0]) - critic(batch[1])).square().mean()
    return loss


def test_so_they_are_before_each_step_on_a_batch() -> None:
    (alone,) = run_ranks(_adversaries, 1)
    for losses in run_ranks(_adversaries, 2):
        np.testing.assert_allclose(losses, alone, rtol=1e-9)


def _compiled_sum(inputs: Tensor) -> Tensor:
    return inputs * 2 + torch.ones_like(inputs)


def _of_one_for_all(num_samples: int) -> list[str]:
    """The notes of a script that draws one tensor for all samples with as many numbers as these are."""
    plan = Plan(world_size=worker_facts().world_size, algorithm="all_reduce", timeout_s=60)
    job = Job(global_batch_size=num_samples, virtual_shards=4)
    with paceline.init(job, plan=plan, max_steps=2, progress=False) as run:
        model = nn.Linear(4, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.batches(TensorDataset(INPUTS)):
            run.step([batch[0] * torch.rand(4)], _loss)
        return run.notes


def test_as_many_numbers_for_all_samples_as_there_are_samples_are_refused_by_several_workers() -> None:
    assert run_ranks(_of_one_for_all, 2, 4) == [[], []]
    ((note,),) = run_ranks(_of_one_for_all, 1, 4)
    assert "draws random numbers of 4 rows" in note and "batch[0]" in note
    with pytest.raises(AssertionError, match=r"ModelError: .* draws random numbers of 4 rows"):
        run_ranks(_of_one_for_all, 2, 8)


def _of_single_numbers(shape: tuple[int, ...]) -> list[str]:
    plan = Plan(world_size=worker_facts().world_size, algorithm="all_reduce", timeout_s=60)
    with paceline.init(Job(global_batch_size=2, virtual_shards=2), plan=plan, max_steps=2, progress=False) as run:
        model = nn.Linear(4, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.batches(TensorDataset(INPUTS)):
            run.step([batch[0] * torch.rand(shape)], _loss)
        return run.notes


def test_a_single_number_for_a_single_sample_is_told() -> None:
    assert run_ranks(_of_single_numbers, 2, ()) == [[], []]
    for (note,) in run_ranks(_of_single_numbers, 2, (1,)):
        assert "a tensor of a single number" in note


def _notes(kind: str, collated: bool = False) -> list[str]:
    plan = Plan(world_size=worker_facts().world_size, algorithm="all_reduce", timeout_s=60)
    with paceline.init(Job(global_batch_size=8, virtual_shards=4), plan=plan, max_steps=2, progress=False) as run:
        model = nn.Linear(4, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.batches(TensorDataset(INPUTS), collate_fn=_collate if collated else None):
            change = (CHANGES | TOLD | HARMLESS | {name: one for name, (one, _) in DIVIDED.items()})[kind]
            changed = ShardedBatch(tuple(map(change, batch.shards)), batch.sizes) if collated else change(batch)
            run.step(changed, _loss)
        return [note for note in run.notes if "Between run.batches and run.step" in note]


@pytest.mark.parametrize("kind", DIVIDED)
def test_numbers_of_another_shape_that_samples_divide_are_refused_by_several_workers(kind: str) -> None:
    (notes,) = run_ranks(_notes, 1, kind)
    assert any(DIVIDED[kind][1] in note for note in notes)
    with pytest.raises(AssertionError, match=r"ModelError: .* has not one row for each sample"):
        run_ranks(_notes, 2, kind)


@pytest.mark.parametrize("kind", TOLD)
def test_draws_that_cannot_be_divided_are_told_once(kind: str) -> None:
    for notes in (*run_ranks(_notes, 1, kind), *run_ranks(_notes, 2, kind)):
        assert len(notes) == 1


def test_so_are_those_for_shards_that_the_script_takes_out_of_their_batch() -> None:
    for notes in run_ranks(_notes, 2, "another tensor", True):
        assert len(notes) == 1


def _mapped() -> list[float]:
    """The losses of a run whose shards are collated one by one, and changed by random numbers of all kinds."""
    plan = Plan(world_size=worker_facts().world_size, algorithm="all_reduce", timeout_s=60)
    job = Job(global_batch_size=8, virtual_shards=4, epochs=2, precision="float64")
    with paceline.init(job, plan=plan, progress=False) as run:
        model = nn.Linear(4, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses = []
        own, of_torch = np.random.default_rng(3), torch.Generator().manual_seed(3)

        def change(shard: list[Tensor]) -> list[Tensor]:
            noise = torch.from_numpy(np.random.rand(*shard[0].shape)) + own.random() + torch.rand(1, generator=of_torch)
            return [shard[0] + noise + torch.multinomial(shard[0].sigmoid(), 1)]

        batches = run.batches(TensorDataset(INPUTS[:19]), collate_fn=_collate, sampler=lambda _seed, _epoch: range(19))
        for batch in batches:
            batch = batch.map(change)
            scale = torch.rand(())
            losses.append(float(run.step(batch.map(lambda shard, scale=scale: [shard[0] * scale]), _loss)))
        assert not run.notes
        return losses


def test_what_is_drawn_for_each_shard_of_a_batch_is_its_own() -> None:
    (alone,) = run_ranks(_mapped, 1)
    for losses in (*run_ranks(_mapped, 2), *run_ranks(_mapped, 3)):
        np.testing.assert_allclose(losses, alone, rtol=1e-9)


@pytest.mark.parametrize("kind", HARMLESS)
def test_nothing_else_is(kind: str) -> None:
    assert run_ranks(_notes, 2, kind) == [[], []]


def _with_compiled_teacher() -> tuple[int, list[str]]:
    """How often a function is compiled that a script calls for its batches, and the notes."""
    compiled: list[int] = []

    def backend(module: Any, _inputs: Any) -> Any:
        compiled.append(1)
        return module.forward

    teacher = torch.compile(_compiled_sum, backend=backend, dynamic=False)
    plan = Plan(world_size=1, algorithm="all_reduce")
    with paceline.init(Job(global_batch_size=8, virtual_shards=4, epochs=3), plan=plan, progress=False) as run:
        model = nn.Linear(4, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.batches(TensorDataset(INPUTS)):
            run.step([teacher(batch[0]) + torch.rand_like(batch[0])], _loss)
        return len(compiled), run.notes


def test_a_compiled_function_is_compiled_once() -> None:
    assert run_ranks(_with_compiled_teacher, 1) == [(1, [])]


def _logged(place: str, draws_first: bool) -> list[float]:
    """The losses of a run of which one worker draws for a log."""
    plan = Plan(world_size=worker_facts().world_size, algorithm="all_reduce", timeout_s=60)
    with paceline.init(Job(global_batch_size=8, virtual_shards=4, precision="float64"), plan=plan) as run:
        model = nn.Linear(4, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses = []
        for (inputs,) in run.batches(TensorDataset(INPUTS)):
            noise = torch.randn_like(inputs) if draws_first else None
            if place == "before" and run.rank == 0:
                torch.randn(16, 4)
            noise = torch.randn_like(inputs) if noise is None else noise
            losses.append(float(run.step([inputs + noise], _loss)))
            if place == "after" and run.rank == 0:
                torch.randn(16, 4), np.random.rand(3), random.random()
        return losses


@pytest.mark.parametrize(("place", "draws_first"), [("after", False), ("before", True)])
def test_what_one_worker_draws_for_a_log_changes_nothing(place: str, draws_first: bool) -> None:
    (alone,) = run_ranks(_logged, 1, place, draws_first)
    for losses in run_ranks(_logged, 2, place, draws_first):
        np.testing.assert_allclose(losses, alone, rtol=1e-9)


def test_it_is_refused_where_it_changes_what_samples_get() -> None:
    with pytest.raises(AssertionError, match=r"DivergenceError: .* some workers have drawn more than others"):
        run_ranks(_logged, 2, "before", False)


_OWN: dict[str, tuple[Callable[[], Any], Callable[[Any, torch.Size], Tensor]]] = {
    "torch": (
        lambda: torch.Generator().manual_seed(3),
        lambda generator, shape: torch.randn(shape, generator=generator),
    ),
    "NumPy": (
        lambda: np.random.default_rng(3),
        lambda generator, shape: torch.from_numpy(generator.random(shape[1:])),
    ),
    "NumPy's older one": (
        lambda: np.random.RandomState(3),
        lambda generator, shape: torch.from_numpy(generator.rand(*shape[1:])),
    ),
    "Python": (lambda: random.Random(3), lambda generator, _: torch.tensor(generator.gauss(0.0, 1.0))),
}


def _by_own_generator(kind: str, folder: str, stop: int | None, is_kept: bool) -> tuple[list[float], list[str]]:
    plan = Plan(world_size=worker_facts().world_size, algorithm="all_reduce", timeout_s=60)
    job = Job(global_batch_size=8, virtual_shards=4, precision="float64", epochs=2)
    make, draw = _OWN[kind]
    generator = make()
    with paceline.init(job, plan=plan, checkpoint_dir=folder, max_steps=stop) as run:
        model = nn.Linear(4, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if is_kept:
            run.keep("noise", generator)
        losses = []
        for (inputs,) in run.batches(TensorDataset(INPUTS)):
            losses.append(float(run.step([inputs + draw(generator, inputs.shape)], _loss)))
        return losses, [note for note in run.notes if "run.keep" in note]


@pytest.mark.parametrize("kind", _OWN)
def test_a_generator_of_the_scripts_goes_on_in_a_resumed_run(kind: str, tmp_path: Path) -> None:
    ((whole, notes),) = run_ranks(_by_own_generator, 1, kind, str(tmp_path / "whole"), None, False)
    assert len(notes) == 1
    run_ranks(_by_own_generator, 1, kind, str(tmp_path / "resumed"), 3, True)
    for rest, notes in run_ranks(_by_own_generator, 2, kind, str(tmp_path / "resumed"), None, True):
        np.testing.assert_allclose(rest, whole[3:], rtol=1e-9)
        assert not notes
