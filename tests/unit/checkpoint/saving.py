"""Small runs that save checkpoints, through the public interface."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline


@dataclass(frozen=True)
class Trained:
    """Where a run began and what it came to."""

    first_step: int
    weights: dict[str, Tensor]
    kept: Any
    """What the run was left with of what it kept."""


def small_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def train(
    folder: Path | str,
    steps: int,
    *,
    model: nn.Module | None = None,
    kept: Any = None,
    losses: Mapping[int, float] | None = None,
    saves: Collection[int] = (),
    strategy: str | None = None,
    **checkpoint: Any,
) -> Trained:
    """Train to `steps` steps in all, from the newest good checkpoint in `folder`.

    Args:
        losses: what an evaluation after these steps says.
        saves: after these steps the run is saved; it is at its end.
        checkpoint: keys of the job's table of that name.
    """
    spec = {"every_minutes": None, "every_epoch": False, **checkpoint}
    with paceline.init(
        global_batch_size=4,
        virtual_shards=4,
        epochs=100,
        max_steps=steps,
        strategy=strategy,
        checkpoint_dir=folder,
        checkpoint=spec,
        progress=False,
    ) as run:
        model = small_model() if model is None else model
        thing = {"tree": kept}
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        run.keep("thing", thing)
        first_step = run.steps
        dataset = TensorDataset(torch.linspace(-1, 1, 24).view(8, 3))
        for batch in run.batches(dataset):
            run.step(batch, lambda model, shard: model(shard[0]).square().mean())
            if losses and (value := losses.get(run.steps)) is not None:
                told = torch.full((8,), value)
                run.evaluate(dataset, lambda _, batch: {"loss": told[: len(batch[0])]})  # noqa: B023 - called at once
            if run.steps in saves:
                run.save()
        return Trained(
            first_step, {name: one.detach().clone() for name, one in run.whole_state().items()}, thing["tree"]
        )


def sealed(body: Mapping[str, Any]) -> bytes:
    """The content of a manifest that says this, with the right checksum of itself."""

    def canonical(value: Mapping[str, Any]) -> bytes:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"

    rest = {name: value for name, value in body.items() if name != "sha256"}
    return canonical({"sha256": hashlib.sha256(canonical(rest)).hexdigest(), **rest})
