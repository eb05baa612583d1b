"""What a run reads of a data set, through the public interface, on the workers of this process's world."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

import paceline

Content = TypeVar("Content")


def collate(samples: list[Any]) -> Any:
    """As torch does by default; a batch then comes as its virtual shards, each collated for itself."""
    return default_collate(samples)


def numbers_in(shards: list[Any]) -> list[int]:
    """The samples of a batch of `Numbers`."""
    return [int(number) for shard in shards for number in shard]


class Numbers(Dataset[int]):
    """Its samples are their numbers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def read_batches(
    dataset: Any,
    global_batch_size: int,
    look: Callable[[list[Any]], Content],
    *,
    seed: int = 0,
    epochs: int = 1,
    virtual_shards: int = 1,
    max_steps: int | None = None,
    checkpoint_dir: Path | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = collate,
    **loading: Any,
) -> list[Content]:
    """What `look` makes of this worker's virtual shards of every batch, in the order in which they are trained on."""
    found = []
    with paceline.init(
        global_batch_size=global_batch_size,
        virtual_shards=virtual_shards,
        epochs=epochs,
        seed=seed,
        max_steps=max_steps,
        checkpoint_dir=checkpoint_dir,
        progress=False,
    ) as run:
        model = nn.Linear(1, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        for batch in run.batches(dataset, collate_fn=collate_fn, **loading):
            found.append(look(list(batch)))
            run.step(batch, lambda model, _: model(torch.ones(1, 1)).mean())
    return found
