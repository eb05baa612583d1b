"""The page about GPUs ends what takes too long, with all that it has started."""

from __future__ import annotations

import importlib
import os
import subprocess

import pytest

gpu = importlib.import_module("benchmarks.gpu")


def test_a_command_whose_time_is_over_leaves_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_FAREWELL_S", 0.1)
    reader, writer = os.pipe()
    with pytest.raises(subprocess.TimeoutExpired):
        gpu.run_within(["sh", "-c", "sleep 300 & wait"], 0.2, pass_fds=(writer,))
    os.close(writer)
    assert os.read(reader, 1) == b""  # nobody holds the other end any more
    os.close(reader)
