"""The law: how many workers a run happens to use does not change what it learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.spec import Job
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
    ("name", "world_sizes"),
    [
        ("lenet", (2, 3)),
        ("resnet20", (3,)),
        ("dropout", (2, 3)),
    ],
)
def test_numeric_parity_in_float64_after_50_steps(name: str, world_sizes: tuple[int, ...]) -> None:
    model, shape = MODELS[name]
    # A gentle rate: batch norm over few values is chaotic enough to turn rounding into a difference by itself.
    gentle = {"lr": 0.002, "momentum": 0.0, "warmup_epochs": 0.0}
    job = _job(precision="float64", model=model, optim=gentle)
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
@pytest.mark.parametrize("parity", ["bitwise", "numeric"])
def test_ragged_ends(model: str, num_samples: int, batch: int, shards: int, world_size: int, parity: str) -> None:
    job = _job(
        parity=parity,
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


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_low_precision_is_bitwise_too(precision: str) -> None:
    job = _job(parity="bitwise", precision=precision, epochs=2, model=MODELS["lenet"][0])
    sets = images(30, (1, 28, 28)), images(9, (1, 28, 28))
    (alone,) = run_ranks(train, 1, job, *sets)
    spread = _agree(run_ranks(train, 2, job, *sets))
    assert (spread.sha, spread.metrics) == (alone.sha, alone.metrics)
