"""A checkpoint is complete or absent: a file has its name once its content is on the disk, the manifest comes last, and
whatever a storage does, what was good stays good and training goes on. The same holds behind an address of fsspec."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline.checkpoint import Saver, Snapshot, open_storage, read_checkpoint
from paceline.checkpoint.slice import Slice
from paceline.checkpoint.storage import Folder, Piece
from paceline.errors import CheckpointError
from paceline.spec.job import CheckpointSpec
from tests.kit.workers import join_world, run_ranks
from tests.unit.checkpoint.saving import train


def test_each_file_is_on_the_disk_before_it_has_its_name_and_the_manifest_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: dict[int, bytes] = {}
    """The content of files when they were last flushed, by inode."""
    named: list[str] = []
    fsync = os.fsync

    def note_sync(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_file():
            synced[path.stat().st_ino] = path.read_bytes()

    def noting(move: Any) -> Any:
        def note_move(source: Any, target: Any, **options: Any) -> None:
            path = Path(source)
            if Path(target).parent.name.startswith("step-"):
                assert synced.get(path.stat().st_ino) == path.read_bytes(), f"{target} was not flushed"
                assert path != Path(target), "what is not complete yet has its name"
                named.append(Path(target).name)
            move(source, target, **options)

        return note_move

    monkeypatch.setattr(os, "fsync", note_sync)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, noting(getattr(os, name)))
    train(tmp_path, 1)
    files = sorted(path.name for path in tmp_path.glob("step-*/*"))
    assert files == ["manifest.json", "worker-00000.safetensors"]
    assert [name for name in named if name in files] == ["worker-00000.safetensors", "manifest.json"]


def fail_to_rename(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    """From now on, files whose name has this word cannot get it."""

    def failing(move: Any) -> Any:
        def fail(source: Any, target: Any, **options: Any) -> None:
            if word in str(target):
                raise OSError(28, "No space left on device")
            move(source, target, **options)

        return fail

    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))


@pytest.mark.parametrize("file", ["worker-00000", "manifest.json"])
def test_a_full_disk_costs_a_checkpoint_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    train(tmp_path, 2)
    with monkeypatch.context() as patch:
        fail_to_rename(patch, file)
        train(tmp_path, 4, saves=range(9))  # it ends as if nothing had been
    assert [one.state for one in paceline.checkpoint.verify(tmp_path)] == ["good"]
    assert train(tmp_path, 6).first_step == 2
    assert [one.step for one in paceline.checkpoint.ls(tmp_path).states] == [2, 6]


def test_a_failure_after_the_manifest_leaves_the_checkpoint_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_rename(monkeypatch, "latest")
    train(tmp_path, 2)
    assert train(tmp_path, 2).first_step == 2


def test_what_an_earlier_run_left_unfinished_is_removed_and_a_foreign_file_is_not(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir(parents=True)
    (tmp_path / "step-00000001" / "worker-00000.safetensors").write_bytes(b"unfinished")
    (tmp_path / "step-00000003").write_text("mine")
    train(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000002", "step-00000003"]
    assert (tmp_path / "step-00000003").read_text() == "mine"


@pytest.mark.parametrize("address", ["{}/new/checkpoints", "file://{}/new", "memory://{}/new"])
def test_every_kind_of_address_is_written_read_and_pruned(tmp_path: Path, address: str) -> None:
    address = address.format(f"{tmp_path}" if "memory" not in address else uuid.uuid4().hex)
    train(address, 3, saves=range(9), keep_last=2)
    assert [(one.step, one.state) for one in paceline.checkpoint.verify(address)] == [(2, "good"), (3, "good")]
    assert train(address, 4).first_step == 3
    paceline.checkpoint.prune(address, keep_last=1)
    assert [one.step for one in paceline.checkpoint.ls(address).states] == [4]
    target = f"{address}/model.safetensors"
    assert paceline.checkpoint.export(address, target).step == 4
    with fsspec.open(target) as file:
        assert len(file.read()) > 100


@pytest.mark.parametrize("address", ["nothing-of-this-kind://bucket/run", "s4://bucket"])
def test_an_address_that_nobody_can_reach_is_refused(address: str) -> None:
    with pytest.raises(CheckpointError, match=address):
        train(address, 1)


def test_a_run_a_folder_and_a_checkpoint_are_all_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train("run/checkpoints", 3, saves=range(9), keep_last=2)
    for place in ("run", "run/", "run/checkpoints", str(tmp_path / "run"), f"file://{tmp_path}/run", "run/../run"):
        assert [one.step for one in paceline.checkpoint.ls(place).states] == [2, 3], place
    one = "run/checkpoints/step-00000003"
    for place in (one, f"{one}/", f"file://{tmp_path}/{one}"):
        assert [state.step for state in paceline.checkpoint.ls(place).states] == [3], place
    monkeypatch.chdir(one)
    assert [state.step for state in paceline.checkpoint.ls(".").states] == [3]


class StaleFirst(Folder):
    """The storage of rank 1, which finishes its part once rank 0 has looked for it."""

    def write(self, name: str, pieces: Iterable[Piece]) -> None:
        if "worker-00001" in name and not name.endswith(".safetensors"):
            while not (self.path / "looked").exists():
                os.sched_yield()
        super().write(name, pieces)


class Looking(Folder):
    """The storage of rank 0, which says that it has looked for what rank 1 reports."""

    def read(self, name: str) -> bytes:
        try:
            return super().read(name)
        finally:
            if "worker-00001" in name:
                (self.path / "looked").touch()


def _save_again_beside_a_stale_report(path: Path) -> None:
    group = join_world(60)
    rank = torch.distributed.get_rank()
    said: list[str] = []
    storage = StaleFirst(path) if rank else Looking(path)
    saver = Saver(storage, CheckpointSpec(), group, said.append)

    def save(value: float) -> None:
        (path / "looked").unlink(missing_ok=True)
        torch.distributed.barrier()
        shared = {"model": {"a": torch.full((10,), value), "b": torch.full((10,), value)}}
        saver.begin(Snapshot(5, {}, shared, {"own": value + rank}))
        saver.wait()
        torch.distributed.barrier()

    reports: dict[str, bytes] = {}
    if rank == 1:
        plain = storage.write

        def keep_report(name: str, pieces: Iterable[Piece]) -> None:
            content = b"".join(bytes(piece) for piece in pieces)
            if not name.endswith(".safetensors"):
                reports[name] = content
            plain(name, [content])

        storage.write = keep_report  # type: ignore[method-assign]
    save(1.0)
    for name, content in reports.items():  # as an attempt leaves it that was cut off
        (path / name).write_bytes(content)
    save(2.0)
    assert not said


def test_a_step_that_is_saved_again_does_not_take_an_earlier_attempts_report(tmp_path: Path) -> None:
    run_ranks(_save_again_beside_a_stale_report, 2, tmp_path)
    found = read_checkpoint(open_storage(tmp_path), "step-00000005")
    assert found.shared["model"]["a"].tolist() == found.shared["model"]["b"].tolist() == [2.0] * 10
    assert [found.own(rank)["own"] for rank in range(2)] == [2.0, 3.0]


SLICES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=2).map(
    lambda sides: Slice(tuple(start for start, _ in sides), tuple(size for _, size in sides))
)


@given(SLICES, SLICES)
def test_slices_overlap_where_both_are(one: Slice, other: Slice) -> None:
    whole = Slice.whole((8, 8))
    masks = np.zeros((2, 8, 8), bool)
    for mask, part in zip(masks, (one, other), strict=True):
        mask[part.slices_in(whole)] = True
    both = np.zeros((8, 8), bool)
    overlap = one.overlap(other)
    if overlap is not None:
        both[overlap.slices_in(whole)] = True
        inside = np.zeros(one.sizes)
        inside[overlap.slices_in(one)] = 1
        assert inside.sum() == both.sum() > 0
    assert np.array_equal(both, masks[0] & masks[1])


def test_the_manifest_lists_what_the_docs_say(tmp_path: Path) -> None:
    train(tmp_path, 2)
    body = json.loads((tmp_path / "step-00000002" / "manifest.json").read_bytes())
    assert (body["step"], body["world_size"], body["format"]) == (2, 1, 1)
    (file,) = body["files"]
    content = (tmp_path / "step-00000002" / file["name"]).read_bytes()
    assert file["num_bytes"] == len(content)
    weight = body["tensors"]["model/0.weight"]
    assert (weight["dtype"], weight["shape"]) == ("F32", [4, 3])
