"""Streams on real workers: every sample once under kill and resume at other world sizes, and the same bits."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import paceline
from paceline.data import Loading
from paceline.env import worker_facts
from paceline.errors import DataError
from paceline.object_collectives import broadcast_object
from paceline.spec import Job, Plan
from paceline.train.batches.data_progress import DataProgress
from paceline.train.batches.reading import DatasetReader
from paceline.train.batches.stream_batches import StreamBatches
from paceline.train.process.process_group import World, join
from tests.kit.workers import run_ranks


class Files(IterableDataset[Any]):
    """A stream of files of several lengths; `has_shards`: it can be split by them."""

    def __init__(self, files: list[range], *, has_shards: bool = True) -> None:
        self.files = files
        if has_shards:
            self.num_shards = len(files)

    def shard(self, num_shards: int, index: int) -> Files:
        return Files(self.files[index::num_shards])

    def __iter__(self) -> Any:
        return self._from(0)

    def _from(self, start: int) -> Any:
        for number in itertools.islice(itertools.chain(*self.files), start, None):
            generator = torch.Generator().manual_seed(number)
            length = 3 + number % 5
            tokens = torch.randint(1, 20, (length,), generator=generator)
            yield {"number": number, "tokens": tokens, "noise": torch.rand(())}


class Remembering(Files):
    """Goes on by its own state."""

    start = done = 0

    def shard(self, num_shards: int, index: int) -> Files:
        return Remembering(self.files[index::num_shards])

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["done"]

    def __iter__(self) -> Any:
        self.done, self.start = self.start, 0
        for sample in self._from(self.done):
            self.done += 1
            yield sample


def files(lengths: list[int]) -> list[range]:
    return [range(start, stop) for start, stop in itertools.pairwise([0, *itertools.accumulate(lengths)])]


# --- kill and resume ---


def _trials(num_trials: int) -> list[tuple[int, int, list[int]]]:
    """For each trial: its number of epochs, the size of its stream, and the samples that this worker trained on.

    A stream is trained on by 1 to 3 workers, which are killed at any batch, up to four times.
    """
    facts = worker_facts()
    world = join(facts, Plan(world_size=3, timeout_s=60))
    groups = {size: dist.new_group(list(range(size)), backend="gloo") for size in (2, 3)}
    draw = random.Random(8)
    answers = []
    for trial in range(num_trials):
        lengths = [draw.choice([0, 1, draw.randint(0, 40)]) for _ in range(draw.randint(1, 9))]
        epochs, size = draw.randint(1, 2), draw.randint(6, 12)
        job = Job(global_batch_size=size, virtual_shards=draw.randint(3, 6), epochs=epochs, seed=trial)
        kinds: list[Callable[[list[range]], Files]] = [Files, Remembering, _without_shards]
        kind = draw.choice(kinds)
        keeps_states = draw.random() < 0.7
        legs = [(draw.randint(1, 3), draw.randint(0, 12)) for _ in range(draw.randint(1, 4))]
        seen: list[int] = []
        state: Any = None
        for num_workers, stop in [*legs, (draw.randint(1, 3), 9999)]:
            if facts.rank < num_workers:
                of_leg = World(facts, world.device, groups.get(num_workers))
                more, state = _leg(job, kind(files(lengths)), of_leg, num_workers, stop, state, keeps_states)
                seen += more
            state = broadcast_object(state, world.group)
        answers.append((epochs, sum(lengths), seen))
    return answers


def _without_shards(some: list[range]) -> Files:
    return Files(some, has_shards=False)


def _leg(
    job: Job, stream: Any, world: World, num_workers: int, num_batches: int, state: Any, keeps_states: bool
) -> tuple[list[int], Any]:
    """The samples of this worker until it is killed, and what a checkpoint keeps at that moment."""
    rank = world.facts.rank
    progress = DataProgress(job, rank, num_workers)
    if state is not None:
        progress.load_state_dict(state)
    reader = DatasetReader(job, world.device)
    streams = StreamBatches(job, progress, reader, world, 60)
    streams.group = world.group
    seen: list[int] = []
    done = 0
    for epoch in progress.epochs():
        if progress.is_over(epoch):
            continue
        for batch, content in streams.batches(Loading(stream, list), epoch, None):
            numbers = [sample["number"] for shard in content.shards for sample in shard]
            if done == num_batches:
                return seen, progress.state_dict(collective=keeps_states)
            done += 1
            if batch.assignment.sizes:
                assert tuple(map(len, content.shards)) == batch.assignment.sizes
                seen += numbers
            progress.trained_on(batch)
        progress.leave_epoch()
    return seen, progress.state_dict(collective=True)


def test_every_sample_once_in_50_trials() -> None:
    for trial, of_ranks in enumerate(zip(*run_ranks(_trials, 3, 50, timeout_s=300), strict=True)):
        epochs, size, _ = of_ranks[0]
        counts = Counter(number for _, _, seen in of_ranks for number in seen)
        assert counts == dict.fromkeys(range(size), epochs), trial


# --- training ---


def padded(samples: list[dict[str, Any]]) -> dict[str, Any]:
    tokens = nn.utils.rnn.pad_sequence([sample["tokens"] for sample in samples], batch_first=True)
    return {
        "tokens": torch.where(torch.rand(tokens.shape) < 0.1, torch.tensor(20), tokens),
        "noise": torch.stack([sample["noise"] for sample in samples]),
        "numbers": torch.tensor([sample["number"] for sample in samples]),
    }


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(21, 8)
        self.out = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, tokens: Tensor) -> Any:
        return self.out(self.embedding(tokens).mean(1))[:, 0]


def _loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    loss: Tensor = ((model(batch["tokens"]) - batch["noise"]) ** 2).mean()
    return loss


UNEVEN = [9, 2, 0, 14, 5, 5, 5, 5]


def _stream(name: str) -> tuple[Any, dict[str, Any]]:
    if name == "loader over files":
        workers: dict[str, Any] = {"num_workers": 2, "worker_init_fn": _init}
        return DataLoader(Files(files(UNEVEN)), 10, collate_fn=padded, **workers), {}
    if name == "states":
        return Remembering(files(UNEVEN)), {"collate_fn": padded}
    return Files(files(UNEVEN), has_shards=False), {"collate_fn": padded, "samples_per_epoch": 45}


def _init(worker: int) -> None:
    torch.rand(worker + 1)


def _train(
    name: str, parity: Any, strategy: str, folder: str | None = None, max_steps: int | None = None, fail_at: int = -1
) -> tuple[str, list[float], list[int], int]:
    """Weights, losses, the samples that this worker saw, and the number of steps."""
    optim = {"schedule": "cosine"} if name == "as it comes" else {}
    job = Job(global_batch_size=10, virtual_shards=4, epochs=2, parity=parity).with_values(
        optim=optim, checkpoint={"every_steps": 2}
    )
    losses: list[float] = []
    seen: list[int] = []
    precision = "float64" if parity == "numeric" else "float32"
    try:
        with paceline.init(
            job, strategy=strategy, checkpoint_dir=folder, max_steps=max_steps, precision=precision
        ) as run:
            torch.manual_seed(3)
            run.prepare(model := _Model(), torch.optim.SGD(model.parameters(), 0.3))
            stream, keys = _stream(name)
            for epoch in run.epochs():
                for batch in run.batches(stream, epoch, **keys):
                    if run.steps == fail_at and folder is not None and folder.endswith("killed"):
                        os.kill(os.getpid(), signal.SIGKILL)
                    if run.steps == fail_at:
                        raise InterruptedError
                    losses.append(float(run.step(batch, _loss)))
                    if run.world_size == 1:
                        seen += [number for shard in batch.shards for number in shard["numbers"].tolist()]
            return run.weights_sha256(), losses, seen, run.steps
    except InterruptedError:
        return "", losses, seen, fail_at


def _train_all(parity: str, strategy: str, names: tuple[str, ...]) -> list[Any]:
    return [_train(name, parity, strategy)[:2] for name in names]


NAMES = ("loader over files", "states", "as it comes")


def test_the_same_bits_on_any_number_of_workers() -> None:
    (alone,) = run_ranks(_train_all, 1, "bitwise", "dp", NAMES, timeout_s=120)
    assert [len(losses) for _, losses in alone] == [16, 16, 10]  # of substreams of 14, 7, 5 and 19 samples
    for world_size in (2, 3, 4):
        for one in run_ranks(_train_all, world_size, "bitwise", "dp", NAMES, timeout_s=120):
            assert one == alone


def test_numeric_parity_in_sharded_engines_too() -> None:
    (wanted,) = run_ranks(_train_all, 1, "numeric", "dp", NAMES[1:])
    for world_size, strategy in ((3, "dp"), (2, "fsdp"), (3, "fsdp")):
        for one in run_ranks(_train_all, world_size, "numeric", strategy, NAMES[1:], timeout_s=120):
            for (_, losses), (_, expected) in zip(one, wanted, strict=True):
                np.testing.assert_allclose(losses, expected, rtol=1e-12, err_msg=strategy)


def _train_in_layers(strategy: str) -> list[float]:
    """The losses of a model that can be cut into stages and sharded over tp."""
    job = Job(global_batch_size=10, virtual_shards=4, precision="float64")
    with paceline.init(job, strategy=strategy) as run:
        torch.manual_seed(3)
        layers = [nn.Embedding(21, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)]
        model = nn.Sequential(*layers)
        example = torch.zeros(2, 6, dtype=torch.int64)
        run.prepare(model, torch.optim.SGD(model.parameters(), 0.3), example=example)

        def loss_fn(model: nn.Module, batch: dict[str, Any]) -> Tensor:
            loss: Tensor = ((model(batch["tokens"]).mean(1)[:, 0] - batch["noise"]) ** 2).mean()
            return loss

        stream = Files(files([20, 9, 6, 10]))
        return [float(run.step(batch, loss_fn)) for batch in run.batches(stream, collate_fn=padded)]


def test_shards_of_several_lengths_in_pipelines() -> None:
    (wanted,) = run_ranks(_train_in_layers, 1, "dp")
    assert len(wanted) == 8
    for world_size, strategy in ((2, "pp"),):
        for losses in run_ranks(_train_in_layers, world_size, strategy, timeout_s=120):
            np.testing.assert_allclose(losses, wanted, rtol=1e-12, err_msg=strategy)


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_run_that_was_killed_ends_as_one_that_was_not(tmp_path: Path, name: str) -> None:
    ((sha, losses, seen, steps),) = run_ranks(_train, 1, name, "bitwise", "dp")
    assert Counter(seen) == dict.fromkeys(range(45), 2)
    folder = str(tmp_path)
    legs: list[tuple[int, int | None, int]] = [(2, 3, -1), (3, None, 6), (4, steps - 1, -1), (1, None, -1)]
    for num_workers, max_steps, fail_at in legs:
        last = run_ranks(_train, num_workers, name, "bitwise", "dp", folder, max_steps, fail_at)[0]
        # After an error workers may not manage to save; then the run goes on from the checkpoint before.
        stop = last[3]
        assert last[1] == losses[stop - len(last[1]) : stop], (num_workers, stop)
    assert last[0] == sha and last[3] == steps


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_hard_kill(tmp_path: Path, name: str) -> None:
    """Nobody saves anything: the run goes on from the checkpoint before, written while the next batch was read."""
    ((sha, losses, _, steps),) = run_ranks(_train, 1, name, "bitwise", "dp")
    folder = tmp_path / "killed"
    with pytest.raises(AssertionError, match=r"died without a word|Connection|peer"):
        run_ranks(_train, 3, name, "bitwise", "dp", str(folder), None, 5)
    assert list(folder.glob("step-*"))
    last = run_ranks(_train, 2, name, "bitwise", "dp", str(folder))[0]
    assert last[0] == sha and last[3] == steps
    assert len(last[1]) >= steps - 5 and last[1] == losses[steps - len(last[1]) :]


def _refusals() -> list[str]:
    rank = worker_facts().rank
    wrong = [Files([range(rank, 20)], has_shards=False), Files(files([5] * (4 + 4 * rank)))]
    sentences = []
    with paceline.init(Job(global_batch_size=10, virtual_shards=4)) as run:
        run.prepare(model := _Model(), torch.optim.SGD(model.parameters(), 0.3))
        for stream in wrong:
            with pytest.raises(DataError) as caught:
                next(iter(run.batches(stream, collate_fn=padded)))
            sentences.append(str(caught.value))
    with paceline.init(Job(global_batch_size=10, virtual_shards=4), optim={"warmup_epochs": 1}) as run:
        run.prepare(model := _Model(), torch.optim.SGD(model.parameters(), 0.3))
        with pytest.raises(DataError) as caught:
            next(iter(run.batches(Files(files([20])), collate_fn=padded)))
        sentences.append(str(caught.value))
    with paceline.init(Job(global_batch_size=10, virtual_shards=4)) as run:
        run.prepare(model := _Model(), torch.optim.SGD(model.parameters(), 0.3))
        with pytest.raises(DataError) as caught:
            next(iter(run.batches(Files([range(0)], has_shards=False), collate_fn=padded)))
        sentences.append(str(caught.value))
    return sentences


def test_what_cannot_be_is_refused() -> None:
    for others, counts, schedule, empty in run_ranks(_refusals, 2):
        assert empty.startswith("The training stream gives no sample in epoch 0")
        for sentence in (others, counts):
            assert sentence.startswith("In epoch 0 rank 1 would read other samples than rank 0, or in another order")
        assert "give run.batches samples_per_epoch=…, or leave the schedule out" in schedule
