"""A checkpoint is complete or absent: a file has its name once its content is on the disk, the manifest comes last, and
whatever a storage does, what was good stays good and training goes on. The same holds behind an address of fsspec."""

from __future__ import annotations

import json
import os
import threading
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
from safetensors.torch import load_file

import paceline
from paceline.checkpoint.format import Piece, Slice, Storage
from paceline.checkpoint.load import read_state
from paceline.checkpoint.save import Saver, Snapshot
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
    assert named == files[::-1] and files[0] == "manifest.json"


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
    assert [one.step for one in paceline.checkpoint.ls(tmp_path)] == [2, 6]


def test_the_last_checkpoint_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, names = Storage.write, []

    def fail_once(storage: Storage, name: str, pieces: Iterable[Piece]) -> None:
        names.append(name)
        if len(names) == 1:
            raise OSError(5, "Input/output error")
        write(storage, name, pieces)

    monkeypatch.setattr(Storage, "write", fail_once)
    train(tmp_path, 2)
    assert [(one.step, one.state) for one in paceline.checkpoint.verify(tmp_path)] == [(2, "good")]


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
    assert [one.step for one in paceline.checkpoint.ls(address)] == [4]
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
        assert [one.step for one in paceline.checkpoint.ls(place)] == [2, 3], place
    one = "run/checkpoints/step-00000003"
    for place in (one, f"{one}/", f"file://{tmp_path}/{one}"):
        assert [state.step for state in paceline.checkpoint.ls(place)] == [3], place
    monkeypatch.chdir(one)
    assert [state.step for state in paceline.checkpoint.ls(".")] == [3]


def _save_a_step_again(path: Path) -> None:
    group = join_world(60)
    rank = torch.distributed.get_rank()
    said: list[str] = []
    saver = Saver(Storage(path), CheckpointSpec(), group, said.append)
    for value in (1.0, 2.0):
        shared = {"model": {"a": torch.full((10,), value), "b": torch.full((10,), value)}}
        saver.begin(Snapshot(5, {}, shared, {"own": value + rank}))
        saver.wait()
        assert saver.written_step == 5 and not said  # on all workers


def test_a_step_that_is_saved_again_replaces_the_checkpoint_by_files_of_other_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ranks(_save_a_step_again, 2, tmp_path)
    manifest, (shared, owns) = read_state(Storage(tmp_path), "step-00000005", None, lambda *both: both)
    assert shared["model"]["a"].tolist() == shared["model"]["b"].tolist() == [2.0] * 10
    assert [own["own"] for own in owns] == [2.0, 3.0]
    files = {path.name for path in (tmp_path / "step-00000005").iterdir()}
    assert files == {"manifest.json", *(file.name for file in manifest.files)}


def _save_where_rank_1_cannot(path: Path) -> None:
    group = join_world(60)
    rank = torch.distributed.get_rank()
    said: list[str] = []
    storage = Storage(path)
    if rank == 1:
        storage.write = _no_space  # type: ignore[method-assign, assignment]
    saver = Saver(storage, CheckpointSpec(), group, said.append)
    for step in (1, 2):
        saver.begin(Snapshot(step, {}, {"a": torch.zeros(3), "b": torch.zeros(3)}, {}))
        saver.wait()
    assert saver.failed and saver.written_step is None
    assert len(said) == 1 and "worker 1 says: No space left on device" in said[0]


def _save_beside_a_writer_that_hangs(path: Path) -> None:
    group, goes_on = join_world(60), threading.Event()
    hanging = Storage(path / "hanging")
    hanging.write = lambda *_: goes_on.wait()  # type: ignore[method-assign, assignment]
    storages = [hanging if torch.distributed.get_rank() else Storage(path / "hanging"), Storage(path / "next")]
    savers = [Saver(storage, CheckpointSpec(), group, print) for storage in storages[:1]]
    savers[0].begin(Snapshot(1, {}, {"a": torch.zeros(3)}, {}))
    savers[0].give_up()
    savers.append(Saver(storages[1], CheckpointSpec(), group, print))
    savers[1].begin(Snapshot(2, {}, {"a": torch.ones(3)}, {}))
    savers[1].wait()
    assert savers[1].written_step == 2
    goes_on.set()


def test_a_writer_of_an_earlier_run_that_hangs_is_no_matter_to_the_next_run(tmp_path: Path) -> None:
    run_ranks(_save_beside_a_writer_that_hangs, 2, tmp_path)
    assert [one.state for one in paceline.checkpoint.verify(tmp_path / "next")] == ["good"]


def _no_space(_name: str, _pieces: Iterable[Piece]) -> None:
    raise OSError(28, "No space left on device")


def test_all_workers_learn_that_one_could_not_write(tmp_path: Path) -> None:
    run_ranks(_save_where_rank_1_cannot, 2, tmp_path)
    assert not list(tmp_path.glob("step-*"))


def test_large_tensors_are_written_in_slices_of_rows_that_safetensors_reads(tmp_path: Path) -> None:
    weight = torch.arange(9 << 20, dtype=torch.float32).view(9, -1)  # 36 MiB
    saver = Saver(Storage(tmp_path), CheckpointSpec(), None, print)
    saver.begin(Snapshot(1, {}, {"weight": weight, "count": torch.tensor(3)}, {}))
    saver.wait()
    (file,) = (tmp_path / "step-00000001").glob("*.safetensors")
    found = load_file(file)
    rows = [found[f"weight@{start},0"] for start in range(0, 9, 4)]
    assert torch.equal(torch.cat(rows), weight) and found["count"] == 3
    _, read = read_state(Storage(tmp_path), "step-00000001", None, lambda shared, _: shared["weight"])
    assert torch.equal(read, weight)


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
    assert (body["step"], body["world_size"], body["format"]) == (2, 1, 2)
    (file,) = body["files"]
    content = (tmp_path / "step-00000002" / file["name"]).read_bytes()
    assert file["num_bytes"] == len(content)
    weight = body["tensors"]["models/model/model/0.weight"]
    assert (weight["dtype"], weight["shape"]) == ("F32", [4, 3])
