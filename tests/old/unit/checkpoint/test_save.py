"""One worker saves: whatever its storage does, the training thread goes on, and what was good stays good."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import Saver, Snapshot, newest_good, open_storage, read_checkpoint
from paceline.checkpoint import save as saving
from paceline.checkpoint.data_file import data_file_name
from paceline.checkpoint.load import list_checkpoints, list_folders
from paceline.checkpoint.storage import Folder, Piece, Storage
from paceline.errors import CheckpointError
from paceline.spec.job import CheckpointSpec
from tests.old.unit.checkpoint.memory import Memory


def _snapshot(step: int) -> Snapshot:
    shared = {"model": {"weight": torch.full((10,), float(step))}, "metrics": {"accuracy": step / 100}}
    return Snapshot(step, {"name": "test"}, shared, {"sums": torch.ones(2)})


class Faulty(Memory):
    """Does what `fault(act, name)` says before it does what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.fault: Callable[[str, str], None] = lambda _act, _name: None

    def write(self, name: str, pieces: Iterable[Piece]) -> None:
        self.fault("write", name)
        super().write(name, pieces)

    def remove(self, name: str) -> None:
        self.fault("remove", name)
        super().remove(name)


class Said(list[str]):
    def __call__(self, sentence: str) -> None:
        self.append(sentence)


def _saver(storage: Storage, said: Said, **spec: Any) -> Saver:
    return Saver(storage, CheckpointSpec(**spec), None, said)


def _save(saver: Saver, *steps: int) -> None:
    for step in steps:
        saver.begin(_snapshot(step))
        saver.wait()


def _full(at: str, act: str = "write") -> Callable[[str, str], None]:
    def fault(what: str, name: str) -> None:
        if what == act and at in name:
            raise OSError(28, "No space left on device")

    return fault


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.mark.parametrize("address", ["{}/new/checkpoints", "file://{}/new", "memory://{}/new"])
def test_saves_and_prunes(tmp_path: Path, said: Said, address: str) -> None:
    storage = open_storage(address.format(tmp_path))
    _save(_saver(storage, said, keep_last=2, keep_best="accuracy"), 1, 2, 3)
    assert storage.names() == ["best", "latest", "step-00000002", "step-00000003"]
    assert storage.read("latest") == storage.read("best") == b"step-00000003\n"
    assert storage.names("step-00000003") == ["manifest.json", "worker-00000.safetensors"]
    found, _ = newest_good(storage)
    assert found is not None and found.manifest.job == {"name": "test"} and found.manifest.metrics == {"accuracy": 0.03}
    assert found.shared["model"]["weight"].tolist() == [3.0] * 10
    assert found.own(0)["sums"].tolist() == [1.0, 1.0]
    assert said == []


@pytest.mark.parametrize("at", ["worker-00000.safetensors", "manifest.json"])
def test_a_full_disk_is_told_once(at: str, said: Said) -> None:
    storage = Faulty()
    saver = _saver(storage, said)
    _save(saver, 1)
    storage.fault = _full(at)
    _save(saver, 2, 3)
    assert saver.failed and not saver.busy
    assert saver.written_step == 1
    (line,) = said
    assert "The checkpoint of step 2 could not be written to memory: No space left on device." in line
    assert list_folders(storage) == ["step-00000001"]
    storage.fault = lambda *_: None
    _save(saver, 4)
    assert list_checkpoints(storage) == ["step-00000001", "step-00000004"]
    storage.fault = _full(at)
    _save(saver, 5)
    assert len(said) == 2  # it had been well in between


@pytest.mark.parametrize("fault", [_full("latest"), _full("step-00000001", "remove")])
def test_what_fails_after_the_manifest_does_not_undo_it(fault: Callable[[str, str], None], said: Said) -> None:
    storage = Faulty()
    saver = _saver(storage, said, keep_last=1)
    _save(saver, 1)
    storage.fault = fault
    _save(saver, 2)
    found, _ = newest_good(storage)
    assert found is not None and found.name == "step-00000002"
    assert not saver.failed
    assert len(said) == 1 and "The checkpoint of step 2 is complete" in said[0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_is_told_too(said: Said) -> None:
    def bug(_act: str, name: str) -> None:
        raise ZeroDivisionError("a bug")

    storage = Faulty()
    saver = _saver(storage, said)
    storage.fault = bug
    _save(saver, 1)
    assert saver.failed and "a bug" in said[0]


def test_what_an_earlier_run_left_is_removed(said: Said) -> None:
    storage = Memory({"step-00000001/worker-00000.safetensors": b"", "step-00000002": b"mine", "step-00000003/x": b""})
    saver = _saver(storage, said)
    assert storage.names() == ["step-00000002"]
    storage.files["step-00000004/worker-00001.safetensors"] = b"came later"
    _save(saver, 5)
    assert storage.names() == ["latest", "step-00000002", "step-00000005"]


def test_a_damaged_one_is_replaced(said: Said) -> None:
    storage = Memory()
    _save(_saver(storage, said), 1, 2)
    storage.files["step-00000002/worker-00000.safetensors"] = b""
    _save(_saver(storage, said), 2)
    assert read_checkpoint(storage, "step-00000002").manifest.step == 2
    storage.files["step-00000002/worker-00000.safetensors"] = b""
    _save(_saver(storage, said, keep_last=1), 3)
    assert list_checkpoints(storage) == ["step-00000003"]


def test_a_file_where_a_folder_should_be(tmp_path: Path, said: Said) -> None:
    (tmp_path / "step-00000002").write_text("mine")
    storage = Folder(tmp_path)
    _save(_saver(storage, said), 1, 2, 3)
    assert (tmp_path / "step-00000002").read_text() == "mine"
    assert list_checkpoints(storage) == ["step-00000001", "step-00000003"]
    assert len(said) == 1 and "step 2 could not be written" in said[0]


def test_a_storage_that_stands_still(monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    monkeypatch.setattr(saving, "_PATIENCE_S", 0.05)
    storage, goes_on = Faulty(), threading.Event()
    saver = _saver(storage, said)

    def stand_still(act: str, name: str) -> None:
        if (act, name) == ("write", "step-00000001/worker-00000.safetensors"):
            assert goes_on.wait(60)

    storage.fault = stand_still
    saver.begin(_snapshot(1))
    assert saver.busy
    first = saver._writing
    saver.wait()
    assert len(said) == 1 and "step 1 could not be written to memory: nothing has moved" in said[0]
    assert (saver.failed, saver.written_step) == (True, None)
    saver.begin(_snapshot(2))  # into memory of its own: the first may still be written, and is
    saver.wait()
    goes_on.set()
    assert first is not None and first.thread is not None
    first.thread.join(60)
    assert (saver.failed, saver.written_step) == (False, 2)
    for step in (1, 2):
        weight = read_checkpoint(storage, f"step-{step:08d}").shared["model"]["weight"]
        assert weight.tolist() == [float(step)] * 10


def test_a_slow_storage_is_told_once(monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    monkeypatch.setattr(saving, "_SLOW_S", 0.01)
    heard = threading.Event()

    def say(sentence: str) -> None:
        said.append(sentence)
        heard.set()

    def wait_until_told(_act: str, name: str) -> None:
        if "worker" in name:
            assert heard.wait(60)

    storage = Faulty()
    saver = Saver(storage, CheckpointSpec(), None, say)
    storage.fault = wait_until_told
    _save(saver, 1, 2)
    assert len(said) == 1 and "The checkpoint of step 1 is still being written to memory" in said[0]
    assert list_checkpoints(storage) == ["step-00000001", "step-00000002"]


def test_alone_one_does_it_for_all(tmp_path: Path, said: Said) -> None:
    storage = Folder(tmp_path / "not" / "there" / "yet")
    first, second = _saver(storage, said), _saver(storage, said)
    first.save_alone(_snapshot(5))
    before = storage.read("step-00000005/manifest.json")
    second.save_alone(_snapshot(5))
    second.save_alone(_snapshot(4))
    assert list_checkpoints(storage) == ["step-00000004", "step-00000005"]
    assert storage.read("step-00000005/manifest.json") == before


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_RANK_0_S", 0.1)


@pytest.mark.usefixtures("impatient")
def test_one_takes_over_what_all_had_begun_and_some_did_not_finish(tmp_path: Path, said: Said) -> None:
    storage = Folder(tmp_path)
    some = [_saver(storage, said) for _ in range(3)]
    storage.write("step-00000005/worker-00001.json", [b"{}"])
    for saver in some:
        saver.last_step = 5
        saver.save_alone(_snapshot(5))
    assert list_checkpoints(storage) == ["step-00000005"] and not said
    assert storage.names("step-00000005") == ["alone", "manifest.json", data_file_name(0)]
    read_checkpoint(storage, "step-00000005")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fails", [False, True])
def test_what_all_had_begun_is_saved_alone_where_it_failed(tmp_path: Path, said: Said, fails: bool) -> None:
    storage = Folder(tmp_path)
    saver = _saver(storage, said)
    with pytest.MonkeyPatch.context() as patch:
        if fails:
            patch.setattr(Saver, "_commit", _raise_not_heard)
        _save(saver, 5)
    assert (list_checkpoints(storage) == []) == fails
    saver.save_alone(_snapshot(5))
    assert list_checkpoints(storage) == ["step-00000005"]
    assert len(said) == fails


def _raise_not_heard(*_: object) -> None:
    raise OSError("nothing was heard from worker 1")


@pytest.mark.parametrize("alien", [torch.zeros(2, dtype=torch.complex64), object()])
def test_what_a_checkpoint_cannot_hold_is_refused_at_once(alien: object, said: Said) -> None:
    with pytest.raises(CheckpointError, match="a checkpoint cannot hold"):
        _saver(Memory(), said).begin(Snapshot(1, {}, {"kept": {"mine": alien}}, {}))
