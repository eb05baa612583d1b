"""Decoded once for all: one copy, shared, rebuilt when its sources change or it is damaged."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.data import cache
from paceline.data.cache import decoded


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "cache"
    monkeypatch.setenv("PACELINE_DATA", str(directory))
    return directory


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "user" / "file.bin"
    path.parent.mkdir()
    path.write_bytes(b"abc")
    return path


class Decoder:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, NDArray[Any]]:
        self.calls += 1
        return {"inputs": np.arange(6).reshape(2, 3), "targets": np.array([1, 2])}


def test_decodes_once_and_maps_read_only(source: Path) -> None:
    decode = Decoder()
    for _ in range(3):
        arrays = decoded("set", [source], decode)
        assert isinstance(arrays["inputs"], np.memmap) and not arrays["inputs"].flags.writeable
        assert arrays["inputs"].tolist() == [[0, 1, 2], [3, 4, 5]] and arrays["targets"].tolist() == [1, 2]
    assert decode.calls == 1
    assert [path.name for path in source.parent.iterdir()] == ["file.bin"]


def test_a_changed_source_a_moved_source_and_another_format_are_decoded_anew(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = Decoder()
    decoded("set", [source], decode)
    os.utime(source, ns=(1, 1))
    decoded("set", [source], decode)
    assert decode.calls == 2
    decoded("set", [source.rename(tmp_path / "file.bin")], decode)
    assert decode.calls == 3
    monkeypatch.setattr(cache, "FORMAT_VERSION", cache.FORMAT_VERSION + 1)
    decoded("set", [tmp_path / "file.bin"], decode)
    assert decode.calls == 4


@pytest.mark.parametrize("length", [0, 40, -8])
def test_a_damaged_entry_is_rebuilt(source: Path, data_dir: Path, length: int) -> None:
    decode = Decoder()
    decoded("set", [source], decode)
    (file,) = data_dir.rglob("inputs.npy")
    file.write_bytes(file.read_bytes()[:length])
    assert decoded("set", [source], decode)["inputs"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert decode.calls == 2


@pytest.mark.parametrize("place", ["array", "lock"])
def test_a_named_pipe_in_the_cache_keeps_nobody_waiting(source: Path, data_dir: Path, place: str) -> None:
    decoded("set", [source], lambda: {"numbers": np.arange(3)})
    (entry,) = (data_dir / "decoded").glob("set-*")
    pipe = entry / "numbers.npy" if place == "array" else entry.with_name(f".{entry.name}.lock")
    pipe.unlink()
    os.mkfifo(pipe)
    if place == "lock":
        (entry / "numbers.npy").unlink()
    assert decoded("set", [source], lambda: {"numbers": np.arange(3)})["numbers"].tolist() == [0, 1, 2]


def test_an_unwritable_cache_decodes_in_memory(source: Path, data_dir: Path) -> None:
    data_dir.write_text("a file where the directory would be")
    decode = Decoder()
    for _ in range(2):
        assert decoded("set", [source], decode)["targets"].tolist() == [1, 2]
    assert decode.calls == 2


def test_a_full_disk_decodes_in_memory_and_leaves_nothing(
    source: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    decode = Decoder()
    assert decoded("set", [source], decode)["targets"].tolist() == [1, 2]
    assert decode.calls == 1
    assert [path for path in data_dir.rglob("*") if path.suffix != ".lock"] == [data_dir / "decoded"]


def _work(source: Path, log: Path, barrier: Any) -> None:
    def decode() -> dict[str, NDArray[Any]]:
        with open(log, "a") as file:
            file.write("decoded\n")
        return {"inputs": np.zeros(100_000)}

    barrier.wait(20)
    assert decoded("set", [source], decode)["inputs"].shape == (100_000,)


def test_workers_that_start_at_once_decode_once(source: Path, tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    barrier, log = fork.Barrier(4), tmp_path / "log"
    workers = [fork.Process(target=_work, args=(source, log, barrier)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    assert log.read_text() == "decoded\n"
