"""Checkpoints of several workers on real storages: shards, failures, a release ago, and death at any moment."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import paceline
from paceline import env, models
from paceline.checkpoint import (
    Loaded,
    Saver,
    Snapshot,
    newest_good,
    open_storage,
    read_checkpoint,
    read_together,
    storage,
    verify_checkpoint,
)
from paceline.checkpoint import save as saving
from paceline.checkpoint.load import list_checkpoints
from paceline.checkpoint.storage import Folder, Piece
from paceline.dtensor_type import local_shard, shard_slice
from paceline.env import worker_facts
from paceline.parallel.dtensor import full_tensor
from paceline.regular_files import create
from paceline.spec import Job, Plan
from paceline.spec.job import CheckpointSpec
from paceline.train.optimizers.optim import build_optimizer
from paceline.train.process.process_group import join
from tests.kit import workers as harness
from tests.kit.workers import run_ranks
from tests.old.fixtures import checkpoint as fixture
from tests.old.ranks.training import images, loss_fn

# Sharded state: who writes what, and that any number of workers can take it.


def _full(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


ROWS, COLUMNS, SHORT, EMPTY = _full((5, 6), 1), _full((4, 7), 2), _full((2, 3), 3), torch.zeros(0, 3)
COPIES = {f"copy{number}": _full((8, 8), 10 + number) for number in range(6)}


def _sharded(world_size: int, *, blank: bool) -> dict[str, Any]:
    """The state of a worker of so many, as DTensors; with zeros in them if `blank`."""
    mesh = init_device_mesh("cpu", (world_size,))

    def spread(tensor: Tensor, placement: Any) -> DTensor:
        return distribute_tensor(torch.zeros_like(tensor) if blank else tensor, mesh, [placement])

    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
    fully_shard(model, mesh=mesh)
    if blank:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    return {
        "rows": spread(ROWS, Shard(0)),
        "columns": spread(COLUMNS, Shard(1)),
        "short": spread(SHORT, Shard(0)),
        "empty": spread(EMPTY, Shard(0)),
        "everywhere": spread(_full((3, 3), 4), Replicate()),
        "model": model.state_dict(),
        **{name: torch.zeros_like(copy) if blank else copy for name, copy in COPIES.items()},
    }


def _world() -> dist.ProcessGroup:
    world = join(env.worker_facts(), Plan(world_size=env.worker_facts().world_size, timeout_s=60))
    assert world.group is not None
    return world.group


def _save_sharded(folder: str) -> None:
    group = _world()
    saver = Saver(open_storage(folder), CheckpointSpec(), group, print)
    rank = dist.get_rank(group)
    for step, state in ((3, _sharded(2, blank=False)), (4, COPIES)):
        saver.begin(Snapshot(step, {}, state, {"rank": torch.tensor(rank)}))
        saver.wait()
        dist.barrier(group)
        assert not saver.failed


def _read_sharded(folder: str) -> dict[str, Any]:
    """What a worker reads for shards of as many workers as there are now, made whole again."""
    group = _world()
    state = _sharded(dist.get_world_size(group), blank=True)
    like = {**state.pop("model"), **state}

    def want(shared: dict[str, Any]) -> dict[str, Any]:
        stored = {**shared.pop("model"), **shared}
        spread = {name: shard_slice(tensor) for name, tensor in like.items() if isinstance(tensor, DTensor)}
        return {name: one.slice_at(*spread[name]) if name in spread else one for name, one in stored.items()}

    _, found = read_together(open_storage(folder), "step-00000003", group, want)
    for name, one in found.items():
        if isinstance(one, Loaded):
            local_shard(like[name]).copy_(one.values)
            found[name] = full_tensor(like[name])
    return {name: tensor.tolist() for name, tensor in found.items()}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_sharded_state_at_any_number_of_workers(tmp_path: Path) -> None:
    run_ranks(_save_sharded, 2, str(tmp_path), timeout_s=100)
    parts = [safetensors.torch.load_file(path) for path in sorted(tmp_path.glob("step-*3/worker-*.safetensors"))]
    first, second = parts
    # Each wrote its own shards and nobody else's.
    assert torch.equal(first["rows@0,0"], ROWS[:3]) and torch.equal(second["rows@3,0"], ROWS[3:])
    assert torch.equal(first["columns@0,0"], COLUMNS[:, :4]) and torch.equal(second["columns@0,4"], COLUMNS[:, 4:])
    assert not {"rows@3,0", "columns@0,4"} & first.keys() and not {"rows@0,0", "columns@0,0"} & second.keys()
    # What all have is written once.
    assert not (COPIES.keys() & first.keys()) & second.keys()
    assert ("everywhere" in first) + ("everywhere" in second) == 1

    # Where nothing is sharded, each writes half.
    halves = [safetensors.torch.load_file(path) for path in sorted(tmp_path.glob("step-*4/worker-*.safetensors"))]
    assert [sum(name in half for name in COPIES) for half in halves] == [3, 3]

    found = read_checkpoint(Folder(tmp_path), "step-00000003")
    shared = found.shared
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3)).state_dict()
    whole = {"rows": ROWS, "columns": COLUMNS, "short": SHORT, "empty": EMPTY, "everywhere": _full((3, 3), 4), **COPIES}
    assert all(torch.equal(shared[name], value) for name, value in whole.items())
    assert all(torch.equal(shared["model"][name], value) for name, value in model.items())
    assert [int(found.own(rank)["rank"]) for rank in range(2)] == [0, 1]
    written = sum(tensor.nbytes for part in parts for tensor in part.values())
    assert written == sum(t.nbytes for t in (*whole.values(), *model.values())) + 2 * 8

    expected = {name: value.tolist() for name, value in whole.items()}
    expected |= {name: value.tolist() for name, value in model.items()}
    assert run_ranks(_read_sharded, 3, str(tmp_path), timeout_s=100) == [expected] * 3


# Storages that fail under a real training run.

SAVED, NEXT, LAST = 4, 8, 10
"""Steps that are saved; between the first two something happens to the storage."""

Disaster = Callable[[Path], None]

STANDSTILL = ".standstill"


def _job() -> Job:
    return Job.from_mapping(
        {
            "global_batch_size": 12,
            "virtual_shards": 6,
            "epochs": 2,
            "parity": "bitwise",
            "model": {"name": "mlp", "options": {"hidden": 16}},
            "optim": {"name": "adam", "lr": 0.01},
            "checkpoint": {"every_steps": 4, "every_epoch": False},
        }
    )


def _train(
    folder: str, disaster: Disaster | None = None, patience_s: float = saving._PATIENCE_S
) -> tuple[str, list[str]]:
    """The fingerprint of the weights, and what was said. The disaster happens when one checkpoint is there."""
    job = _job()
    saving._PATIENCE_S = patience_s
    vars(storage)["create"] = _create
    plan = Plan(world_size=worker_facts().world_size, algorithm="tree_exact", timeout_s=60)
    said: list[str] = []
    with paceline.init(job, plan=plan, checkpoint_dir=folder) as run:
        model = models.build(job.model, num_classes=10, in_channels=3, image_size=8)
        model, _ = run.prepare(model, build_optimizer(job.optim, model))
        run.say = said.append
        for batch in run.batches(images(60)):
            run.step(batch, loss_fn)
            if disaster is not None and run.steps == SAVED + 1 and run.rank == 0:
                for writing in (thread for thread in threading.enumerate() if thread.name == "checkpoint"):
                    writing.join()
                disaster(Path(folder))
        sha = run.weights_sha256()
    return sha, said


def _create(path: Path, mode: int) -> BinaryIO:
    """Makes a file, or stands still for ever where another one says so."""
    if path.with_name(path.name + STANDSTILL).exists():
        threading.Event().wait()
    return create(path, mode)


def _fill_up(folder: Path) -> None:
    with contextlib.suppress(OSError), open(folder / "ballast", "wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(4096))


def _read_only(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)


def _vanish(folder: Path) -> None:
    folder.rename(folder.with_name("away"))
    folder.write_text("a file")


def _stand_still(folder: Path, rank: int = 0) -> None:
    """A worker's next part is never made."""
    place = folder / f"step-{NEXT:08d}"
    place.mkdir()
    (place / f"worker-{rank:05d}.safetensors.part{STANDSTILL}").touch()


def _stand_still_for_the_other(folder: Path) -> None:
    _stand_still(folder, 1)


def _spoil_the_others_part(folder: Path) -> None:
    """Worker 1 finds a folder where its file should be."""
    (folder / f"step-{NEXT:08d}" / "worker-00001.safetensors").mkdir(parents=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    ((sha, said),) = run_ranks(_train, 1, str(tmp_path_factory.mktemp("undisturbed")))
    assert said == []
    return str(sha)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """One megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder]).returncode:
        pytest.skip("needs to mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def _assert_survived(folder: Path, said: list[str], why: str, newest: int) -> None:
    assert [why in sentence for sentence in said] == [True], said
    found, problems = newest_good(Folder(folder))
    assert found is not None and problems == []
    assert found.manifest.step == newest


@pytest.mark.parametrize(("disaster", "why"), [(_fill_up, "No space left"), (_read_only, "Read-only file system")])
def test_a_disk_that_is_full_or_read_only(small_disk: Path, undisturbed: str, disaster: Disaster, why: str) -> None:
    ((sha, said),) = run_ranks(_train, 1, str(small_disk), disaster)
    assert sha == undisturbed
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    _assert_survived(small_disk, said, why, SAVED)
    (small_disk / "ballast").unlink(missing_ok=True)
    assert run_ranks(_train, 1, str(small_disk)) == [(undisturbed, [])]


@pytest.mark.slow
def test_a_folder_that_vanishes(tmp_path: Path, undisturbed: str) -> None:
    folder = tmp_path / "checkpoints"
    ((sha, said),) = run_ranks(_train, 1, str(folder), _vanish)
    assert sha == undisturbed
    assert folder.read_text() == "a file"
    _assert_survived(tmp_path / "away", said, "Not a directory", SAVED)
    assert run_ranks(_train, 1, str(tmp_path / "away")) == [(undisturbed, [])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "disaster", "why", "patience_s"),
    [
        (1, _stand_still, "nothing has moved", 12.0),
        (2, _stand_still, "nothing has moved", 12.0),
        (2, _stand_still_for_the_other, "nothing was heard from worker 1", 12.0),
        (2, _spoil_the_others_part, "worker 1 says: Is a directory", 60.0),  # it is told, and need not be waited for
    ],
)
def test_one_checkpoint_cannot_be_written(
    tmp_path: Path, undisturbed: str, world_size: int, disaster: Disaster, why: str, patience_s: float
) -> None:
    results = run_ranks(_train, world_size, str(tmp_path), disaster, patience_s)
    assert {sha for sha, _ in results} == {undisturbed}
    _assert_survived(tmp_path, results[0][1], why, LAST)
    assert list_checkpoints(Folder(tmp_path)) == [f"step-{SAVED:08d}", f"step-{LAST:08d}"]


# A step that is saved again, where worker 1's receipt of the first time is still there.


class _SavedAgain(Folder):
    """Keeps worker 1's receipt; once there is one, worker 1 writes nothing before rank 0 has read it."""

    def __init__(self, path: Path, *, again: bool) -> None:
        super().__init__(path)
        self._again = again
        self._seen = path.with_name("receipt-was-read")

    def read(self, name: str) -> bytes:
        content = super().read(name)
        if self._again and name.endswith("worker-00001.json"):
            self._seen.touch()
        return content

    def write(self, name: str, pieces: Iterable[Piece]) -> None:
        while self._again and "worker-00001" in name and not self._seen.exists():
            time.sleep(0.01)
        super().write(name, pieces)

    def remove(self, name: str) -> None:
        if not name.endswith("worker-00001.json"):
            super().remove(name)


def _save_twice(folder: Path) -> None:
    group = _world()
    for again in (False, True):
        saver = Saver(_SavedAgain(folder, again=again), CheckpointSpec(), group, print)
        saver.begin(Snapshot(1, {}, {}, {"number": torch.tensor(float(again))}))
        saver.wait()
        dist.barrier(group)
        assert not saver.failed


def test_a_receipt_of_an_earlier_attempt_does_not_count(tmp_path: Path) -> None:
    run_ranks(_save_twice, 2, tmp_path / "checkpoints")
    verify_checkpoint(Folder(tmp_path / "checkpoints"), "step-00000001")


# A checkpoint of the first release.


@pytest.mark.parametrize("world_size", [1, 2])
def test_goes_on_with_a_checkpoint_of_the_first_release(tmp_path: Path, world_size: int) -> None:
    shutil.copytree(fixture.FOLDER, tmp_path / "run")
    # It is from the middle of an epoch, and that release had samples in another order.
    with pytest.raises(Exception, match="of an earlier version of Paceline, whose order of samples was another one"):
        run_ranks(fixture.train, world_size, str(tmp_path / "run"))
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(fixture.FOLDER, tmp_path / "run")
    for steps, weights, notes in run_ranks(
        functools.partial(fixture.train, force=True), world_size, str(tmp_path / "run")
    ):
        assert steps == fixture.STEPS and all(map(math.isfinite, weights))
        assert notes["pair"] == (1, "two") and notes["by number"] == {3: None, -1: math.inf}
        assert notes["steps"] == list(range(fixture.STEPS))


# Death at any moment.


def _save_forever(folder: str, told: Connection) -> None:
    """Save one step after the other, from the newest good one on, and tell of each that is written."""
    storage = Folder(Path(folder))
    found, _ = newest_good(storage)
    saver = Saver(storage, CheckpointSpec(keep_last=2), None, print)
    for step in itertools.count(1 if found is None else found.manifest.step + 1):
        saver.begin(Snapshot(step, {}, {"model": {"weight": torch.full((200_000,), float(step))}}, {}))
        saver.wait()
        told.send(step)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_killed_at_any_moment(tmp_path: Path) -> None:
    draw = random.Random(5)
    storage = Folder(tmp_path / "checkpoints")
    written = 0
    met: set[tuple[str, ...]] = set()
    num_kills = 0
    while num_kills < 20 or (len(met) == 1 and num_kills < 100):
        num_kills += 1
        receiver, sender = harness._CONTEXT.Pipe(duplex=False)
        victim = harness._CONTEXT.Process(target=_save_forever, args=(str(tmp_path / "checkpoints"), sender))
        victim.start()
        sender.close()
        for _ in range(draw.randint(2, 4)):
            began_s = time.monotonic()
            assert receiver.poll(60)
            written = receiver.recv()
            save_s = time.monotonic() - began_s
        time.sleep(draw.uniform(0, save_s))  # chance, not waiting: it may be in any phase of the next one
        victim.kill()
        victim.join()
        with contextlib.suppress(EOFError):
            while receiver.poll():
                written = receiver.recv()
        found, problems = newest_good(storage)
        assert found is not None and problems == []
        assert found.manifest.step >= written
        assert torch.equal(found.shared["model"]["weight"], torch.full((200_000,), float(found.manifest.step)))
        for name in list_checkpoints(storage):
            verify_checkpoint(storage, name)
        met.add(tuple(storage.names(f"step-{found.manifest.step + 1:08d}")))
    assert len(met) > 1  # at times in the middle of writing
