"""Models whose buffers every forward pass moves: checkpoints, evaluations, idle workers, and several strategies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from paceline.env import worker_facts
from paceline.errors import PacelineError
from paceline.spec import Job, Plan, parse_mesh
from tests.kit.workers import run_ranks
from tests.zoo.of_torch import MovingAverages
from tests.zoo.samples import images


class Memory(nn.Module):
    """A moving average as a state_dict keeps it, one that it leaves out, one written past autograd, and a counter."""

    average: Tensor
    left_out: Tensor
    past_autograd: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = MovingAverages()
        self.head = nn.Linear(5, 5)
        for name in ("average", "left_out", "past_autograd"):
            self.register_buffer(name, torch.zeros(5), persistent=name == "average")
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Changes them in evaluation mode too."""
        hidden = self.body(pixel_values)
        with torch.no_grad():
            mean = hidden.mean(0)
            self.average.lerp_(mean, 0.3)
            self.left_out = self.left_out * 0.5 + mean * 0.5
            self.past_autograd.data.lerp_(mean.data, 0.1)
            self.count += 1
        logits: Tensor = self.head((hidden - self.average + self.left_out - self.past_autograd).tanh())
        return logits * (1 + self.count % 3)


@dataclass(frozen=True)
class Outcome:
    sha: str
    losses: list[float]
    metrics: dict[str, float]
    notes: list[str]
    weights: dict[str, Tensor]


def _train(parity: str, strategy: str = "dp", max_steps: int | None = None, folder: Path | None = None) -> Outcome:
    """Nine steps, every third of them of two samples, fewer than workers; an evaluation in the middle."""
    torch.set_num_threads(1)
    facts = worker_facts()
    job = Job.from_mapping(
        {
            "global_batch_size": 9,
            "virtual_shards": 4,
            "epochs": 3,
            "eval_batch_size": 3,
            "parity": parity,
            "precision": "float32" if parity == "bitwise" else "float64",
        }
    )
    devices = 2 if strategy == "dp_one_process" else 1
    mesh = None if facts.world_size == 1 else parse_mesh(strategy, facts.world_size, 1)
    algorithm: Any = "tree_exact" if parity == "bitwise" else "all_reduce"
    plan = Plan(world_size=facts.world_size, algorithm=algorithm, mesh=mesh, devices_in_process=devices, timeout_s=60)
    data = images()
    with paceline.init(job, plan=plan, max_steps=max_steps, checkpoint_dir=folder) as run:
        run.say = lambda _sentence: None
        model = Memory()
        run.prepare(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        losses: list[float] = []
        metrics: dict[str, float] = {}
        for batch in run.batches(data):
            losses.append(float(run.step(batch, _loss)))
            if run.steps == 4:
                metrics = run.evaluate(data, lambda model, batch: {"loss": _losses(model, batch)})
        weights = {name: value.detach().clone() for name, value in run.whole_state().items()}
        return Outcome(run.weights_sha256(), losses, metrics, run.notes, weights)


def _losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["pixel_values"]), batch["labels"], reduction="none")


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return _losses(model, batch).mean()


def _columns(folder: str) -> dict[str, Outcome]:
    found = {
        "bitwise": _train("bitwise"),
        "numeric": _train("numeric"),
        "stopped": _train("bitwise", max_steps=5, folder=Path(folder)),
    }
    if worker_facts().world_size == 1:
        return found | {"one process": _train("numeric", "dp_one_process")}
    if worker_facts().world_size == 2:
        found |= {strategy: _train("numeric", strategy) for strategy in ("fsdp",)}
    return found


def _resumed(folder: str) -> Outcome:
    return _train("bitwise", folder=Path(folder))


@pytest.mark.slow
def test_moved_buffers_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    found = {world_size: run_ranks(_columns, world_size, str(tmp_path / str(world_size))) for world_size in (1, 2, 3)}
    alone = found[1][0]
    assert len(alone["bitwise"].losses) == 9
    assert any("past_autograd" in note or "more" in note for note in alone["bitwise"].notes)
    for of_ranks in found.values():
        for columns in of_ranks:
            bitwise = columns["bitwise"]
            assert (bitwise.sha, bitwise.losses, bitwise.metrics) == (
                alone["bitwise"].sha,
                alone["bitwise"].losses,
                alone["bitwise"].metrics,
            )
            for name in columns.keys() - {"bitwise", "stopped"}:
                assert columns[name].losses == pytest.approx(alone["numeric"].losses, rel=1e-12), name
                assert columns[name].metrics == pytest.approx(alone["numeric"].metrics, rel=1e-12), name
                for key, value in columns[name].weights.items():
                    torch.testing.assert_close(value, alone["numeric"].weights[key], rtol=1e-12, atol=1e-12)
    for before, after in ((1, 3), (3, 2)):
        (resumed, *_) = run_ranks(_resumed, after, str(tmp_path / str(before)))
        assert resumed.losses == alone["bitwise"].losses[5:]
        assert resumed.sha == alone["bitwise"].sha


def _refusal(module: type[nn.Module]) -> str:
    torch.set_num_threads(1)
    job = Job.from_mapping({"global_batch_size": 8, "virtual_shards": 4})
    plan = Plan(world_size=2, algorithm="all_reduce", mesh=parse_mesh("pp", 2, 1), timeout_s=60)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), module(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5))
    try:
        with paceline.init(job, plan=plan) as run:
            run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), example=torch.randn(4, 3, 8, 8))
            for batch in run.batches(images()):
                run.step(batch, _loss)
    except PacelineError as refused:
        return str(refused)
    return ""


class _Averaged(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


class _Counted(nn.Module):
    """Tracing it counts, and cuts the counter off."""

    num_calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x.tanh()


class _PastAutograd(_Averaged):
    def forward(self, x: Tensor) -> Tensor:
        self.mean.data.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


@pytest.mark.slow
@pytest.mark.parametrize("module", [_Averaged, _Counted, _PastAutograd])
def test_a_pipeline_refuses_them_on_all_workers(module: type[nn.Module]) -> None:
    for sentence in run_ranks(_refusal, 2, module):
        assert "Forward passes change buffers" in sentence
        assert "use dp, fsdp or tp" in sentence
