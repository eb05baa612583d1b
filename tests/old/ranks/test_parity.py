"""The law: how many workers a run happens to use does not change what it learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline
from paceline.env import worker_facts
from paceline.errors import ModelError
from paceline.spec import Job, Plan
from tests.kit.workers import run_ranks
from tests.old.ranks.training import Outcome, images, largest_difference, train


def _job(**values: Any) -> Job:
    return Job.from_mapping(
        {
            "global_batch_size": 24,
            "virtual_shards": 6,
            "epochs": 50,
            "optim": {
                "lr": 0.05,
                "momentum": 0.9,
                "schedule": "cosine",
                "warmup_epochs": 1.0,
                "clip_norm": 2.0,
            },
            **values,
        }
    )


def _agree(outcomes: list[Outcome]) -> Outcome:
    """All ranks of one run end alike, whatever the run is compared with."""
    assert {outcome.sha for outcome in outcomes} == {outcomes[0].sha}
    assert all(outcome.losses == outcomes[0].losses for outcome in outcomes)
    assert all(outcome.metrics == outcomes[0].metrics for outcome in outcomes)
    return outcomes[0]


MODELS = {
    "lenet": ({"name": "lenet"}, (1, 28, 28)),
    "resnet18": ({"name": "resnet18", "options": {"stem": "cifar"}}, (3, 8, 8)),
    "resnet20": ({"name": "resnet20"}, (3, 8, 8)),
    "dropout": ({"name": "mlp", "options": {"in_features": 192, "dropout": 0.5}}, (3, 8, 8)),
}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "num_steps"), [("lenet", 21), ("resnet20", 21), ("dropout", 21), ("resnet18", 4)])
def test_bitwise_parity_on_1_2_3_and_4_workers(name: str, num_steps: int) -> None:
    """Four steps are an epoch and the beginning of another."""
    model, shape = MODELS[name]
    job = _job(parity="bitwise", model=model)
    # 61 samples: the third batch of every epoch has 13, which divides by nothing.
    sets = images(61, shape), images(31, shape)
    (alone,) = run_ranks(train, 1, job, *sets, num_steps, timeout_s=300)
    assert len(alone.losses) == num_steps
    assert alone.losses[0] != alone.losses[-1]
    for world_size in (2, 3, 4):
        spread = _agree(run_ranks(train, world_size, job, *sets, num_steps, timeout_s=300))
        assert spread.sha == alone.sha
        assert spread.losses == alone.losses
        assert spread.metrics == alone.metrics


def test_bits_do_not_depend_on_where_in_memory_a_sample_lies() -> None:
    """75 numbers a sample: in a worker's batch every shard begins at another distance from where vectors begin."""
    model = {"name": "mlp", "options": {"in_features": 75, "hidden": 33}}
    job = _job(parity="bitwise", model=model, global_batch_size=7, virtual_shards=7)
    sets = images(29, (3, 5, 5), augment=False), images(13, (3, 5, 5))
    (alone,) = run_ranks(train, 1, job, *sets, 12)
    for world_size in (2, 3):
        spread = _agree(run_ranks(train, world_size, job, *sets, 12))
        assert (spread.sha, spread.losses, spread.metrics) == (alone.sha, alone.losses, alone.metrics)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "norm", "world_sizes"),
    [
        ("lenet", "shard", (2, 3)),
        ("resnet20", "shard", (3,)),
        ("resnet20", "sync", (3,)),
        ("dropout", "shard", (2, 3)),
    ],
)
def test_numeric_parity_in_float64_after_50_steps(name: str, norm: str, world_sizes: tuple[int, ...]) -> None:
    model, shape = MODELS[name]
    # A gentle rate: batch norm over few values is chaotic enough to turn rounding into a difference by itself.
    gentle = {"lr": 0.002, "momentum": 0.0, "warmup_epochs": 0.0}
    job = _job(precision="float64", model=model, norm=norm, optim=gentle)
    sets = images(61, shape), images(31, shape)
    (alone,) = run_ranks(train, 1, job, *sets, 50, timeout_s=300)
    for world_size in world_sizes:
        spread = _agree(run_ranks(train, world_size, job, *sets, 50, timeout_s=300))
        assert largest_difference(alone, spread) < 1e-9
        assert spread.losses == pytest.approx(alone.losses, rel=1e-9)
        assert spread.metrics == pytest.approx(alone.metrics, rel=1e-9)


@pytest.mark.parametrize(
    ("model", "num_samples", "batch", "shards", "world_size"),
    [
        ("resnet20", 5, 4, 4, 3),  # a last batch of one: two workers idle
        (f"{__name__}:norms", 2, 8, 6, 4),  # fewer samples than workers
        (f"{__name__}:norms", 13, 6, 6, 4),  # more shards than fit evenly, then a batch of one
        (f"{__name__}:norms", 1, 1, 1, 1),
    ],
)
@pytest.mark.parametrize(("parity", "norm"), [("bitwise", "shard"), ("numeric", "shard"), ("numeric", "sync")])
def test_ragged_ends(
    model: str, num_samples: int, batch: int, shards: int, world_size: int, parity: str, norm: str
) -> None:
    job = _job(
        parity=parity,
        norm=norm,
        precision="float64",
        global_batch_size=batch,
        virtual_shards=shards,
        epochs=3,
        eval_batch_size=2,
        model=model,
    )
    sets = images(num_samples), images(3)
    (alone,) = run_ranks(train, 1, job, *sets)
    spread = _agree(run_ranks(train, world_size, job, *sets))
    assert len(alone.losses) == 3 * -(-num_samples // batch)
    if parity == "bitwise":
        assert (spread.sha, spread.losses, spread.metrics) == (alone.sha, alone.losses, alone.metrics)
    else:
        assert largest_difference(alone, spread) < 1e-9
        assert spread.metrics == pytest.approx(alone.metrics, rel=1e-9)


def norms(in_channels: int, num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.Flatten(),
        nn.Linear(32, num_classes),
    )


def test_the_gradient_is_the_mean_over_the_samples_of_the_global_batch() -> None:
    """Against plain torch on the whole batch in one process: no shards, no workers, nothing of ours."""
    data = images(10, (1, 28, 28), augment=False)
    job = Job.from_mapping(
        {
            "global_batch_size": 10,
            "virtual_shards": 4,
            "epochs": 4,
            "precision": "float64",
            "model": "lenet",
            "optim": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3},
        }
    )
    spread = _agree(run_ranks(train, 3, job, data))

    from paceline import models

    torch.manual_seed(job.seed)
    model = models.build(job.model, num_classes=10, in_channels=1, image_size=28).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    inputs = torch.stack([data[i][0] for i in range(10)]).double()
    targets = torch.tensor([data[i][1] for i in range(10)])
    for expected in spread.losses:
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        assert loss.item() == pytest.approx(expected, rel=1e-6)  # images were normalised in float32 here
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(torch.from_numpy(spread.weights[name]), value, rtol=1e-5, atol=1e-8)


class _RandomlyTransformed(Dataset[tuple[Tensor, int]]):
    """A user's data set with random transforms of its own, from torch's global generator."""

    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(3, 8, 8) + index, index % 10


def test_a_users_random_data_set_looks_the_same_to_any_number_of_workers() -> None:
    job = _job(global_batch_size=4, virtual_shards=4, epochs=2, parity="bitwise", model=MODELS["dropout"][0])
    (alone,) = run_ranks(train, 1, job, _RandomlyTransformed())
    spread = _agree(run_ranks(train, 3, job, _RandomlyTransformed()))
    assert spread.sha == alone.sha


@pytest.mark.slow
def test_accumulation_changes_nothing() -> None:
    job = _job(precision="float64", epochs=2, model=MODELS["resnet18"][0])
    (alone,) = run_ranks(train, 1, job, images(30))
    for outcomes in zip(*run_ranks(_train_accumulating, 2, job, (4, 9), timeout_s=100), strict=True):
        assert largest_difference(alone, _agree(list(outcomes))) < 1e-9


def _train_accumulating(job: Job, micro_batch_sizes: tuple[int, ...]) -> list[Outcome]:
    return [train(job, images(30), micro_batch_size=size) for size in micro_batch_sizes]


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_low_precision_is_bitwise_too(precision: str) -> None:
    job = _job(parity="bitwise", precision=precision, epochs=2, model=MODELS["lenet"][0])
    sets = images(30, (1, 28, 28)), images(9, (1, 28, 28))
    (alone,) = run_ranks(train, 1, job, *sets)
    spread = _agree(run_ranks(train, 2, job, *sets))
    assert (spread.sha, spread.metrics) == (alone.sha, alone.metrics)


def test_sync_norm_refuses_a_model_whose_masks_would_depend_on_the_workers() -> None:
    job = _job(norm="sync", model=f"{__name__}:norm_and_dropout")
    with pytest.raises(AssertionError, match="use norm = 'shard'"):
        run_ranks(train, 2, job, images(24))


def norm_and_dropout(in_channels: int, num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.BatchNorm2d(in_channels), nn.Flatten(), nn.Dropout(0.5), nn.Linear(64 * in_channels, num_classes)
    )


@pytest.mark.parametrize(("begins", "num_steps"), [(0, 0), (4, 5)])
def test_sync_norm_refuses_a_loss_whose_negatives_would_depend_on_the_workers(begins: int, num_steps: int) -> None:
    """In the first step, or in the step after that in which the term begins."""
    for world_size in (1, 2):
        assert run_ranks(_contrast, world_size, begins) == [num_steps] * world_size


def _contrast(begins: int) -> int:
    """The number of steps that were made until a sentence came."""
    job = Job().with_values(global_batch_size=12, virtual_shards=6, norm="sync", precision="float64")
    plan = Plan(world_size=worker_facts().world_size, algorithm="all_reduce", timeout_s=30)
    with paceline.init(job, plan=plan, max_steps=7) as run:
        model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(192, 4), nn.BatchNorm1d(4))
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step, batch in enumerate(run.batches(images(96))):

            def loss(model: nn.Module, batch: Any, step: int = step) -> Tensor:
                features = model(batch[0])
                similar = F.normalize(features) @ F.normalize(features).T
                squares: Tensor = features.square().mean()
                return squares if step < begins else squares + similar.logsumexp(1).mean()

            try:
                run.step(batch, loss)
            except ModelError as problem:
                assert "is not the mean of their own losses" in str(problem)
                assert "use norm = 'shard'" in str(problem)
                return step
    return -1
