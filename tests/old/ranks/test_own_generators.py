"""Generators of random numbers that a model or a loss function has of its own: what they draw belongs to the virtual
shard, as what the global ones do."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.own_generators import OwnGenerators
from paceline.spec import Job, Plan
from tests.kit.workers import run_ranks

DRAW = torch.Generator().manual_seed(5)
DATA = TensorDataset(torch.randn(40, 6, generator=DRAW, dtype=torch.float64), torch.randint(3, (40,), generator=DRAW))
OF_THE_MODULE = np.random.default_rng(7)

Draws = Callable[[], float]


class Noisy(nn.Module):
    """Draws by a generator of its own."""

    def __init__(self, generator: Any, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.generator, self.draw = generator, draw

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layers(inputs * (1 + 0.1 * self.draw(self.generator)))
        return out


def plain(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def scaled(model: nn.Module, batch: Any, draw: Draws | None = None) -> Tensor:
    factor = OF_THE_MODULE.random() if draw is None else draw()
    return F.cross_entropy(model(batch[0] * factor), batch[1])


class NoisyByVariable(Noisy):
    """Draws by a generator in a variable of its module."""

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layers(inputs * OF_THE_MODULE.random())
        return out


class Scaled:
    """A loss function that is an object with a generator."""

    def __init__(self) -> None:
        self.random = random.Random(3)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return scaled(model, batch, self.random.random)


def _torch(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator))


def _mixed(model: nn.Module, batch: Any, generator: np.random.Generator) -> Tensor:
    order = torch.from_numpy(generator.permutation(len(batch[0])))
    return F.cross_entropy(model(0.7 * batch[0] + 0.3 * batch[0][order]), batch[1])


def _late(model: nn.Module, batch: Any, generator: random.Random, run: paceline.Run) -> Tensor:
    """Begins to draw in the third step."""
    return scaled(model, batch, generator.random if run.steps >= 2 else lambda: 1.0)


class Shaken:
    """A transform with a generator."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def __call__(self, inputs: Tensor) -> Tensor:
        return inputs * self.rng.random()


class Moving(Dataset[Any]):
    """A data set that draws by generators of its own: one in an attribute, one of a transform in a list."""

    def __init__(self) -> None:
        self.random = random.Random(3)
        self.transforms = [Shaken(np.random.default_rng(4))]

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        inputs, target = DATA[number]
        for transform in self.transforms:
            inputs = transform(inputs)
        return inputs + self.random.random(), target


MODELS: dict[str, Callable[[], nn.Module]] = {
    "torch": lambda: Noisy(torch.Generator().manual_seed(3), _torch),
    "numpy": lambda: Noisy(np.random.default_rng(3), lambda own: float(own.random())),
    "old numpy": lambda: Noisy(np.random.RandomState(3), lambda own: float(own.rand())),
    "model's variable": lambda: NoisyByVariable(None, lambda _own: 0.0),
    "none": lambda: Noisy(None, lambda _own: 0.0),
}


def _train(case: str, parity: str) -> tuple[list[float], str, float]:
    own = np.random.default_rng(9)
    late = random.Random(4)
    job = Job().with_values(global_batch_size=8, virtual_shards=4, precision="float64", parity=parity)
    algorithm: Any = "tree_exact" if parity == "bitwise" else "all_reduce"
    plan = Plan(world_size=worker_facts().world_size, algorithm=algorithm, timeout_s=60)
    with paceline.init(job, plan=plan, max_steps=5) as run:
        run.say = lambda _sentence: None
        losses: dict[str, Any] = {
            "variable": scaled,
            "object": Scaled(),
            "partial": partial(_mixed, generator=own),
            "closure": lambda model, batch: _mixed(model, batch, own),
            "late": lambda model, batch: _late(model, batch, late, run),
        }
        model = MODELS.get(case, MODELS["none"])()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loss = losses.get(case, plain)
        data: Any = {"data": Moving(), "part of data": Subset(Moving(), range(8, 40))}.get(case, DATA)
        found = [float(run.step(batch, loss)) for batch in run.batches(data)]
        return found, run.weights_sha256(), float(own.random())


CASES = [
    (case, parity)
    for parity in ("numeric", "bitwise")
    for case in (
        "torch",
        "numpy",
        "old numpy",
        "model's variable",
        "variable",
        "object",
        "partial",
        "closure",
        "late",
        "none",
    )
]


def _train_all() -> list[tuple[list[float], str, float]]:
    return [_train(*case) for case in CASES]


@pytest.mark.timeout(300)
def test_generators_of_ones_own_draw_the_same_on_any_number_of_workers() -> None:
    (alone,) = run_ranks(_train_all, 1, timeout_s=100)
    without = dict(zip(CASES, alone, strict=True))["none", "numeric"]
    for of_worker in run_ranks(_train_all, 3, timeout_s=200):
        for (case, parity), found, expected in zip(CASES, of_worker, alone, strict=True):
            np.testing.assert_allclose(found[0], expected[0], rtol=1e-12, err_msg=case)
            assert case == "none" or found[0] != without[0]
            assert found[2] == expected[2]  # what the script draws by it outside of the loss function
            if parity == "bitwise":
                assert found[:2] == expected[:2], case


def test_generators_are_seeded_apart_and_left_as_they_were() -> None:
    one, other, third = np.random.default_rng(1), random.Random(1), torch.Generator().manual_seed(1)
    own = OwnGenerators(lambda: (one, other, third, random, np.random))
    assert len(own.states()) == 3
    before = own.states()
    with own.kept():
        own.seed(5)
        first = own.states()
        draws = [one.random(), other.random(), float(torch.rand((), dtype=torch.float64, generator=third))]
        assert len(set(draws)) == 3 and own.states() != first
        own.seed(5)
        assert own.states() == first
    assert own.states() == before


def test_global_generators_are_not_found() -> None:
    numpys = np.random.mtrand._rand
    assert not OwnGenerators(lambda: (numpys, torch.default_generator, random.SystemRandom())).states()
