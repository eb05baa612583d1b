"""local_sgd and diloco with a fixed number of groups: how many workers compute a group changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.checkpoint import newest_good, open_storage
from paceline.env import worker_facts
from paceline.errors import JobError
from paceline.spec import Job, Plan
from paceline.train.records.digest import weights_sha256
from tests.kit.workers import in_turn, run_ranks

pytestmark = pytest.mark.slow

DRAW = torch.Generator().manual_seed(7)
NUM_SAMPLES = 20
"""Batches of 8, 8 and 4 samples: in the last one some workers have none."""
DATA = TensorDataset(torch.randn(NUM_SAMPLES, 6, generator=DRAW), torch.randint(3, (NUM_SAMPLES,), generator=DRAW))
CASES: dict[str, dict[str, Any]] = {
    "local_sgd": {"method": "local_sgd", "sync_every": 3},
    "diloco": {"method": "diloco", "sync_every": 2},
    "overlap": {"method": "diloco", "sync_every": 4, "overlap_steps": 2},
    "tokens": {"method": "diloco", "sync_every": 2},
}


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _loss_of_tokens(model: nn.Module, batch: Any) -> paceline.Mean:
    """As if the samples of class 0 were padding."""
    counted = (batch[1] > 0).to(batch[0].dtype)
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return paceline.Mean((losses * counted).sum() / counted.sum().clamp(min=1), weight=counted.sum())


def _measure(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"loss": F.cross_entropy(model(batch[0]), batch[1], reduction="none")}


def _train(
    name: str, groups: int, parity: str, num_steps: int, checkpoints: Path | None = None
) -> tuple[list[float], float, str, list[Any]]:
    """The losses of rank 0, the loss of an evaluation, the hash of the common weights, and these."""
    values = {"global_batch_size": 8, "virtual_shards": 8, "epochs": 9, "parity": parity, "eval_batch_size": 4}
    values["checkpoint"] = {"every_steps": 4}
    precision = "float32" if parity == "bitwise" else "float64"
    job = Job.from_mapping(
        values | {"precision": precision, "optim": {"clip_norm": 0.5}, "aggregation": CASES[name] | {"groups": groups}}
    )
    algorithm: Any = "tree_exact" if parity == "bitwise" else "all_reduce"
    plan = Plan(world_size=worker_facts().world_size, algorithm=algorithm, timeout_s=60)
    with paceline.init(job, plan=plan, max_steps=num_steps, checkpoint_dir=checkpoints) as run:
        run.say = lambda _sentence: None
        model = _model()
        run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))
        loss_fn = _loss_of_tokens if name == "tokens" else _loss
        losses = [float(run.step(batch, loss_fn)) for batch in run.batches(DATA)]
        metric = run.evaluate(DATA, _measure)["loss"]
        with run.consensus():
            return losses, metric, run.weights_sha256(), [p.detach().numpy().copy() for p in model.parameters()]


def _train_all(cases: list[tuple[str, int, str, int]]) -> list[tuple[list[float], float, str, list[Any]]]:
    return in_turn(_train, cases)


@pytest.mark.timeout(400)
def test_the_number_of_workers_that_compute_a_group_changes_nothing() -> None:
    names = ["local_sgd", "diloco", "overlap", "tokens"]
    cases = [(name, 2, parity, 10) for name in names for parity in ("bitwise", "numeric")]
    expected, *_ = run_ranks(_train_all, 2, cases, timeout_s=200)
    for world_size in (4, 6):
        for rank, found in enumerate(run_ranks(_train_all, world_size, cases, timeout_s=200)):
            for case, one, other in zip(cases, found, expected, strict=True):
                if case[2] == "bitwise":
                    assert one[1:3] == other[1:3], (world_size, case)
                    assert rank >= world_size // 2 or one[0] == other[0], (world_size, case)
                for value, wanted in zip(one[3], other[3], strict=True):
                    np.testing.assert_allclose(value, wanted, rtol=1e-10, atol=1e-11, err_msg=str(case))


@pytest.mark.timeout(300)
def test_one_group_is_synchronous_training() -> None:
    cases = [("local_sgd", 1, "bitwise", 6)]
    ((alone,),) = run_ranks(_train_all, 1, cases)
    for (found,) in run_ranks(_train_all, 3, cases, timeout_s=100):
        assert found[:3] == alone[:3]


def _resume(stages: list[tuple[int, Path]]) -> list[tuple[list[float], float, str, list[Any]]]:
    return [_train("diloco", 2, "bitwise", steps, folder) for steps, folder in stages]


@pytest.mark.timeout(300)
def test_a_run_resumes_on_any_number_of_workers(tmp_path: Path) -> None:
    ((*_, whole),) = (run_ranks(_resume, 2, [(12, tmp_path / "whole")], timeout_s=100)[0],)
    for number, world_size in enumerate((2, 6, 4), 1):  # four steps each
        found = run_ranks(_resume, world_size, [(4 * number, tmp_path / "parts")], timeout_s=100)
    for ((losses, *rest),) in found:
        assert len(losses) == 4
        assert rest[:2] == list(whole[1:3])


def _saved_model(folder: Path) -> str:
    saved, _ = newest_good(open_storage(str(folder)))
    assert saved is not None
    return weights_sha256(saved.shared["model"])


@pytest.mark.parametrize("name", ["local_sgd", "diloco", "overlap"])
@pytest.mark.timeout(300)
def test_a_run_that_ends_between_outer_steps_goes_on_from_there(tmp_path: Path, name: str) -> None:
    """In the middle of an epoch and at its end, on any number of workers; also while sums are under way."""
    parts = tmp_path / "parts"
    for world_size, stop in ((2, 5), (6, 6), (4, 7), (2, 10)):
        whole = run_ranks(_train, 2, name, 2, "bitwise", stop, tmp_path / f"until {stop}", timeout_s=100)
        for _, metric, sha, _ in run_ranks(_train, world_size, name, 2, "bitwise", stop, parts, timeout_s=100):
            assert (metric, sha) == whole[0][1:3], stop
        # What is saved is what the run gives.
        assert {path.name for path in parts.glob("step-*")} >= {f"step-{stop:08d}"}
        assert name == "overlap" or _saved_model(parts) == _saved_model(tmp_path / f"until {stop}") == sha


def _refused(world_size: int) -> str:
    with pytest.raises(JobError) as refused:
        _train("diloco", 2, "numeric", 1)
    return str(refused.value)


def test_workers_that_cannot_be_divided_are_refused() -> None:
    for sentence in run_ranks(_refused, 3, 3):
        assert sentence.startswith("aggregation.groups = 2 needs a multiple of 2 workers, and there are 3;")
