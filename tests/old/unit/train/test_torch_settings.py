"""What a run sets in torch, and that torch is afterwards as before."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.env import WorkerFacts
from paceline.errors import JobError
from paceline.spec import Job, Plan
from paceline.train.process import torch_settings
from paceline.train.process.process_group import World
from paceline.train.process.torch_settings import TorchSettings, decide_precision
from tests.old.ranks.training import images

GPU = Plan(world_size=1, device_kind="cuda")
BITWISE = Job(parity="bitwise")


def state() -> dict[str, Any]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return {
        "threads": torch.get_num_threads(),
        "benchmark": cudnn.benchmark,
        "deterministic": cudnn.deterministic,
        "tf32": (matmul.allow_tf32, cudnn.allow_tf32),
        "reduced": (matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction),
        "mode": torch.get_deterministic_debug_mode(),
        "fills": getattr(torch.utils.deterministic, "fill_uninitialized_memory"),  # noqa: B009 - torch does not declare it
        "cublas": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "matmul": torch.get_float32_matmul_precision(),
    }


def test_bitwise_runs_are_deterministic_and_in_full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = state()
    with TorchSettings.of(BITWISE, GPU, has_tf32=True).applied():
        inside = state()
    assert inside | {"threads": 0} == {
        "threads": 0,
        "benchmark": False,
        "deterministic": True,
        "tf32": (False, False),
        "reduced": (False, False),
        "mode": 2,
        "fills": False,
        "cublas": ":4096:8",
        "matmul": "highest",
    }
    assert state() == before


def test_numeric_runs_on_gpus_are_fast_and_say_what_it_costs() -> None:
    before = state()
    settings = TorchSettings.of(Job(), GPU, has_tf32=True)
    with settings.applied():
        inside = state()
    assert inside["benchmark"] and inside["tf32"] == (True, True) and inside["mode"] == before["mode"]
    assert state() == before
    assert settings.notes(Job()) == [
        "float32 products are computed in TF32, to 10 bits of mantissa; tf32 = false computes them in float32"
    ]


@pytest.mark.parametrize(
    ("job", "device_kind", "has_tf32", "expected"),
    [
        (Job(), "cuda", True, True),
        (Job(), "cuda", False, False),
        (Job(), "cpu", True, False),
        (Job(tf32=False), "cuda", True, False),
        (BITWISE, "cuda", True, False),
        (replace(BITWISE, tf32=True), "cuda", True, True),
    ],
)
def test_tf32_is_for_gpus_that_have_it(job: Job, device_kind: Any, has_tf32: bool, expected: bool) -> None:
    assert TorchSettings.of(job, replace(GPU, device_kind=device_kind), has_tf32=has_tf32).tf32 is expected


@pytest.mark.parametrize(
    ("asked", "has_it", "decided"),
    [
        ("auto", True, "bfloat16"),
        ("auto", False, "float32"),
        ("float32", True, "float32"),
        ("float16", False, "float16"),
    ],
)
def test_bfloat16_is_taken_where_gpus_have_it_and_nothing_else_was_asked_for(
    asked: Any, has_it: bool, decided: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_settings, "has_tf32", lambda _device: has_it)
    world = World(WorkerFacts(), torch.device("cpu"), None)
    job, notes = decide_precision(Job(precision=asked), world)
    assert job.precision == decided
    assert [decided in note for note in notes] == ([True] if asked == "auto" else [])


def test_what_a_user_has_set_for_cublas_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with TorchSettings.of(BITWISE, GPU, has_tf32=False).applied():
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


class Unpooled(nn.Module):
    """Has an operation of which torch has no deterministic kernel on any device."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        pooled, places = nn.functional.max_pool2d(inputs, 2, return_indices=True)
        logits: Tensor = self.linear(nn.functional.max_unpool2d(pooled, places, [2, 2])[:, 0].flatten(1))
        return logits


@pytest.mark.parametrize("parity", ["bitwise", "numeric"])
def test_bitwise_parity_ends_at_an_operation_that_cannot_keep_it(parity: Any) -> None:
    before = state()
    with paceline.init(global_batch_size=8, virtual_shards=2, parity=parity) as run:
        torch.manual_seed(0)
        model: nn.Module = Unpooled()
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        batch = next(iter(run.batches(images(8))))

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

        if parity == "numeric":
            run.step(batch, loss_fn)
            return
        with pytest.raises(RuntimeError, match="max_unpooling2d_forward_out"):
            run.step(batch, loss_fn)
    assert state() == before


def test_a_run_does_not_go_on_in_another_precision_that_auto_means_here(tmp_path: Path) -> None:
    def train(precision: str) -> None:
        with paceline.init(
            global_batch_size=4, virtual_shards=2, precision=precision, checkpoint_dir=tmp_path, progress=False
        ) as run:
            model = nn.Linear(2, 1)
            model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for batch in run.batches([(torch.ones(2), 0.0)] * 4):
                run.step(batch, lambda model, batch: model(batch[0]).square().mean())

    train("bfloat16")
    wrong = (
        r"precision was 'bfloat16' and is 'float32' .where 'auto' means 'float32', name precision = 'bfloat16' to go on"
    )
    with pytest.raises(JobError, match=wrong):
        train("auto")
    train("bfloat16")
