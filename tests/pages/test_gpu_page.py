"""The GPU page shows what was found whatever happens to a part: it fails, it does not end, it is cut off."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.markdown import ROOT

gpu = importlib.import_module("benchmarks.gpu.__main__")
Cases = dict[str, Callable[[], None]]
Lines = list[dict[str, Any]]


def no_gpu() -> tuple[str, str]:
    return "cpu", "a machine of <tests>"


def start() -> None:
    """Start a program in a session of its own; it holds the write end of the test's pipe."""
    subprocess.Popen(["sleep", "600"], start_new_session=True, close_fds=False)


def hanging(notes: Any) -> Cases:
    def hang() -> None:
        start()
        time.sleep(600)

    return {"quick": lambda: notes.row("Found", {"value": "kept"}), "slow": hang, "later": lambda: None}


def failing(notes: Any) -> Cases:
    def fail() -> None:
        raise ValueError("this <went> wrong")

    return {"bad": fail, "next": lambda: notes.row("Found", {"value": "all the same"}, good=False)}


def broken(notes: Any) -> Cases:
    start()
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Lines]:
    """The lines of three parts that go wrong, by title."""
    names = {"Hangs": "hanging", "Fails": "failing", "Breaks": "broken"}
    monkeypatch.setattr(gpu, "_PARTS", {title: (__name__, name, 1) for title, name in names.items()})
    monkeypatch.setattr(gpu, "find_device", no_gpu)
    monkeypatch.setattr(gpu, "_RESERVE_S", 0.0)
    monkeypatch.setattr(gpu, "_FAREWELL_S", 0.1)
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    assert not gpu.write_page(tmp_path, None, minutes=0.4)
    os.close(writer)
    os.set_blocking(reader, False)
    assert os.read(reader, 1) == b""  # nobody has the other end any more; else this raises BlockingIOError
    os.close(reader)
    lines = lines_of(tmp_path)
    page = (tmp_path / "page.html").read_text()
    assert "this &lt;went&gt; wrong" in page and "a machine of &lt;tests&gt;" in page
    return {title: [line for line in lines if line["part"] == title] for title in names}


def lines_of(folder: Path) -> Lines:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_a_part_that_hangs_fails_or_dies_does_not_stop_the_others(parts: dict[str, Lines]) -> None:
    hung, failed, died = parts["Hangs"], parts["Fails"], parts["Breaks"]
    assert hung[0]["values"] == {"value": "kept"} and "limit" in hung[-1]["status"]
    assert "ValueError" in failed[0]["failure"] and failed[1]["values"] == {"value": "all the same"}
    assert failed[-1]["status"] == "done"
    assert str(-signal.SIGKILL) in died[-1]["status"]


@pytest.mark.nightly
@pytest.mark.timeout(1100)
@pytest.mark.budget(processor_s=600)
def test_the_page_is_made_without_a_gpu_and_nothing_on_it_has_failed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path), "--minutes", "15"]
    data = os.environ.get("PACELINE_TEST_DATA")
    command += ["--data", data] if data else []
    environ = {**os.environ, "PYTHONPATH": "src"}
    subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, timeout=1000, check=False)
    lines = lines_of(tmp_path)
    problems = [line for line in lines if not gpu.is_good(line)]
    assert [line for line in problems if data or "CIFAR-10" not in line["part"]] == []
    assert (tmp_path / "page.html").stat().st_size < 10**6 and len(list(tmp_path.iterdir())) <= 6
