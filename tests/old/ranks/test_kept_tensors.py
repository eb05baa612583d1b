"""Tensors that models and loss functions keep from call to call outside of buffers: refused if the loss follows from
them, since it would depend on the number of workers; anything else that is kept is left alone."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.errors import ModelError
from paceline.spec import Job, Plan, parse_mesh
from tests.kit.workers import in_turn, run_ranks

DRAW = torch.Generator().manual_seed(5)
DATA = TensorDataset(torch.randn(32, 6, generator=DRAW, dtype=torch.float64), torch.randint(3, (32,), generator=DRAW))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.average = torch.zeros(8, dtype=torch.float64)
        self.kept: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.last(self.centre(self.first(inputs).tanh()))
        return out

    def centre(self, hidden: Tensor) -> Tensor:
        return hidden


# Kept, and computed with.


class Replaced(Classifier):
    def centre(self, hidden: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * hidden.detach().mean(0)
        return hidden - self.average


class InPlace(Classifier):
    def centre(self, hidden: Tensor) -> Tensor:
        self.average.mul_(0.9).add_(0.1 * hidden.detach().mean(0))
        return hidden - self.average


class MadeInFirstPass(Classifier):
    def centre(self, hidden: Tensor) -> Tensor:
        mean = hidden.detach().mean(0)
        self.kept = mean if self.kept is None else 0.9 * self.kept + 0.1 * mean
        return hidden - self.kept


class Bank(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.bank: deque[Tensor] = deque(maxlen=4)

    def centre(self, hidden: Tensor) -> Tensor:
        centred = hidden - torch.cat(list(self.bank)).mean(0) if self.bank else hidden
        self.bank.append(hidden.detach())
        return centred


class PerSample(Classifier):
    """What is kept fits the samples of one pass, and not of another."""

    def centre(self, hidden: Tensor) -> Tensor:
        self.kept = hidden.detach() if self.kept is None else self.kept + hidden.detach()
        return hidden - self.kept


class Recurrent(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(8, 8, batch_first=True)

    def centre(self, hidden: Tensor) -> Tensor:
        out, kept = self.cell(hidden[:, None], self.kept)
        self.kept = kept.detach()
        return cast(Tensor, out[:, 0])


class OfClass(Classifier):
    state: Tensor | None = None

    def centre(self, hidden: Tensor) -> Tensor:
        average = self.average if self.state is None else self.state
        self.state = 0.9 * average + 0.1 * hidden.detach().mean(0)
        return hidden - average


class _Carried:
    state: Tensor | None = None


class Entry(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Tensor] = {}

    def centre(self, hidden: Tensor) -> Tensor:
        average = self.state.get("average", self.average)
        self.state["average"] = 0.9 * average + 0.1 * hidden.detach().mean(0)
        return hidden - average


class _Memory:
    def __init__(self) -> None:
        self.average = torch.zeros(8, dtype=torch.float64)

    def move(self, hidden: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * hidden.detach().mean(0)
        return self.average


class InObject(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.memory = _Memory()

    def centre(self, hidden: Tensor) -> Tensor:
        return hidden - self.memory.move(hidden)


# Kept, and harmless.


class LastActivations(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.all_kept: list[Tensor] = []

    def centre(self, hidden: Tensor) -> Tensor:
        self.all_kept = [hidden.detach(), hidden]
        return hidden


class ConstantMask(Classifier):
    def centre(self, hidden: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.ones(8, 8, dtype=hidden.dtype).tril()
        return hidden @ self.kept


class Overwritten(Classifier):
    def centre(self, hidden: Tensor) -> Tensor:
        self.average.copy_(hidden.detach().mean(0))
        return hidden + 0 * self.average


class ListsParameters(Classifier):
    """As recurrent layers of torch do, in which sharding exchanges them in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(8, 8, batch_first=True)

    def centre(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.layer(hidden[:, None])[0][:, 0]
        return out


class SumForLog(Classifier):
    def centre(self, hidden: Tensor) -> Tensor:
        self.average += hidden.detach().sum(0)
        return hidden


class _Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3, dtype=torch.float64))

    def forward(self, outputs: Tensor, classes: Tensor) -> Tensor:
        centre: Any = self.centre
        loss = F.cross_entropy(outputs - centre, classes)
        centre.mul_(0.9).add_(0.1 * outputs.detach().mean(0))
        return loss


def _loss_functions() -> dict[str, Any]:
    criterion, centre, sums = _Criterion(), torch.zeros(3, dtype=torch.float64), {"loss": torch.zeros(())}

    def variable(model: nn.Module, batch: Any) -> Tensor:
        nonlocal centre
        outputs = model(batch[0])
        loss = F.cross_entropy(outputs - centre, batch[1])
        centre = 0.9 * centre + 0.1 * outputs.detach().mean(0)
        return loss

    carried = _Carried()

    def attribute(model: nn.Module, batch: Any) -> Tensor:
        outputs = model(batch[0])
        loss = F.cross_entropy(outputs - (0 if carried.state is None else carried.state), batch[1])
        carried.state = outputs.detach().clone()
        return loss

    def plain(model: nn.Module, batch: Any) -> Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        sums["loss"] = sums["loss"] + loss.detach()
        return loss

    return {
        "plain": plain,
        "variable": variable,
        "attribute": attribute,
        "criterion": lambda model, batch: criterion(model(batch[0]), batch[1]),
    }


def _train(kind: type[Classifier], loss_name: str, strategy: str, parity: str) -> list[float] | str:
    num_workers = worker_facts().world_size
    job = Job().with_values(global_batch_size=8, virtual_shards=4, precision="float64", parity=parity)
    algorithm: Any = "tree_exact" if parity == "bitwise" else "all_reduce"
    mesh = parse_mesh(strategy, num_workers) if num_workers > 1 else None
    plan = Plan(world_size=num_workers, algorithm=algorithm, timeout_s=60, mesh=mesh)
    loss_fn = _loss_functions()[loss_name]
    with paceline.init(job, plan=plan, max_steps=4, progress=False) as run:
        model = kind()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        try:
            return [float(run.step(batch, loss_fn)) for batch in run.batches(DATA)]
        except ModelError as problem:
            return str(problem)


def _train_all(cases: list[tuple[type[Classifier], str, str, str]]) -> list[list[float] | str]:
    return in_turn(_train, cases)


MODELS = {Replaced: "average", InPlace: "average", MadeInFirstPass: "kept", Bank: "bank", Entry: "state"}
OF_SHAPES = {OfClass: "state", PerSample: "kept", Recurrent: "kept"}
REFUSED = [
    *((kind, "plain", f"The forward pass computes with a tensor that an earlier pass left in '{name}'")
      for kind, name in {**MODELS, **OF_SHAPES, InObject: "memory.average"}.items()),
    *((Classifier, name, "The loss function computes with a tensor that an earlier pass left in 'centre'")
      for name in ("variable", "criterion")),
    (Classifier, "attribute", "The loss function computes with a tensor that an earlier pass left in 'state'"),
]  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("num_workers", "ways"), [(1, ["dp"]), (2, ["dp", "fsdp", "tp2"])])
def test_a_loss_that_follows_from_them_is_refused(num_workers: int, ways: list[str]) -> None:
    cases = [(kind, loss, way, "numeric") for kind, loss, _ in REFUSED for way in ways]
    cases += [(Replaced, "plain", ways[0], "bitwise"), (Classifier, "variable", ways[0], "bitwise")]
    sentences = [sentence for _, _, sentence in REFUSED for _ in ways] + [REFUSED[0][2], REFUSED[-3][2]]
    for found in run_ranks(_train_all, num_workers, cases, timeout_s=200):
        for case, sentence, outcome in zip(cases, sentences, found, strict=True):
            assert isinstance(outcome, str), case
            assert outcome.startswith(sentence), case


@pytest.mark.timeout(200)
def test_whatever_else_is_kept_changes_nothing() -> None:
    kinds = [LastActivations, ConstantMask, Overwritten, SumForLog]
    cases = [(kind, "plain", way, "numeric") for kind in kinds for way in ("dp", "tp2")]
    cases += [(ListsParameters, "plain", way, "numeric") for way in ("fsdp", "zero1", "zero2")]
    (alone,) = run_ranks(_train_all, 1, cases, timeout_s=150)
    for found in run_ranks(_train_all, 2, cases, timeout_s=150):
        for case, outcome, expected in zip(cases, found, alone, strict=True):
            assert not isinstance(outcome, str), (case, outcome)
            np.testing.assert_allclose(outcome, expected, rtol=1e-12, err_msg=str(case))
