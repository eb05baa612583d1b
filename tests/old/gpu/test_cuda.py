"""What only a GPU can show; skipped elsewhere."""

from __future__ import annotations

import pytest
import torch

import paceline
from paceline import models
from paceline.spec import Job
from paceline.train.optimizers.optim import build_optimizer
from tests.old.ranks.training import images, loss_fn, measure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_bitwise_run_repeats_itself_on_a_gpu(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_DEVICE", raising=False)
    job = Job.from_mapping(
        {
            "global_batch_size": 24,
            "virtual_shards": 6,
            "epochs": 4,
            "parity": "bitwise",
            "precision": precision,
            "channels_last": True,
            "model": {"name": "resnet18", "options": {"stem": "cifar"}},
            "optim": {"lr": 0.01, "clip_norm": 1.0},
        }
    )
    hashes = []
    for _ in range(2):
        with paceline.init(job) as run:
            assert run.device.type == "cuda"
            model = models.build(job.model, num_classes=10, in_channels=3)
            model, _ = run.prepare(model, build_optimizer(job.optim, model))
            losses = [float(run.step(batch, loss_fn)) for batch in run.batches(images(61))]
            assert all(loss > 0 for loss in losses)
            assert 0 <= run.evaluate(images(31), measure)["accuracy"] <= 1
            hashes.append(run.weights_sha256())
    assert hashes[0] == hashes[1]
