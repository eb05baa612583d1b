"""Trains a small character model on a corpus that is read as a stream: files of lines, none of them held in memory.

python examples/tasks/streaming_text.py
paceline launch -n 2 examples/tasks/streaming_text.py

The corpus is dealt out to the virtual shards of the job, file by file, so that each worker reads its own files alone.
Which lines form a batch does not depend on the number of workers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import IterableDataset

import paceline

NUM_FILES, LINES_PER_FILE, LENGTH = 8, 40, 24
ALPHABET = "abcdefghijklmnopqrstuvwxyz ,."


def write_corpus(folder: Path) -> list[Path]:
    """Files of sentences made of a few words."""
    words = ("a", "paceline", "is", "the", "single", "file", "that", "teams", "ride", "in")
    draws = torch.Generator().manual_seed(1)
    paths = [folder / f"part{number}.txt" for number in range(NUM_FILES)]
    for path in paths:
        chosen = torch.randint(len(words), (LINES_PER_FILE, 8), generator=draws).tolist()
        path.write_text("".join(" ".join(words[number] for number in line) + ".\n" for line in chosen))
    return paths


class Corpus(IterableDataset[torch.Tensor]):
    """The lines of some files, as the numbers of their first characters."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    @property
    def num_shards(self) -> int:
        return len(self.paths)

    def shard(self, num_shards: int, index: int) -> Corpus:
        """Every `num_shards`-th file, as the streams of `datasets` offer it."""
        return Corpus(self.paths[index::num_shards])

    def __iter__(self) -> Iterator[torch.Tensor]:
        for path in self.paths:
            with open(path) as lines:
                for line in lines:
                    yield torch.tensor([ALPHABET.index(letter) for letter in line.strip()[:LENGTH].ljust(LENGTH)])


class CharacterModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(len(ALPHABET), 16)
        self.memory = torch.nn.GRU(16, 48, batch_first=True)
        self.next = torch.nn.Linear(48, len(ALPHABET))

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        return self.next(self.memory(self.embedding(letters))[0])  # type: ignore[no-any-return]


def loss_fn(model, letters):  # type: ignore[no-untyped-def]
    return F.cross_entropy(model(letters[:, :-1]).flatten(0, 1), letters[:, 1:].flatten())


with tempfile.TemporaryDirectory() as folder, paceline.init(global_batch_size=16, epochs=4, seed=0) as run:
    corpus = Corpus(write_corpus(Path(folder)))  # files of your own: the same on every worker
    model = CharacterModel()
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=2e-2))
    for letters in run.batches(corpus, samples_per_epoch=NUM_FILES * LINES_PER_FILE):
        loss = run.step(letters, loss_fn)
    if run.rank == 0:
        print(f"loss {float(loss):.4f} after {run.steps} steps on {run.world_size} workers")
