"""What a worker tells of itself without being asked."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.heartbeat import read_vitals
from paceline.launch.heartbeats import BeganAt, describe


def entry(**changes: Any) -> dict[str, Any]:
    """As the flight recorder of torch 2.13 wrote it for Gloo."""
    return {
        "collective_seq_id": 1,
        "input_dtypes": ["Float"],
        "input_sizes": [[160, 160]],
        "is_p2p": False,
        "op_id": 1,
        "output_dtypes": ["Float"],
        "output_sizes": [[160, 160]],
        "p2p_seq_id": 0,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "profiling_name": "gloo:all_reduce",
        "record_id": 0,
        "retired": True,
        "state": "scheduled",
        "time_created_ns": 1795256903891638483,
        "time_discovered_completed_ns": 0,
        "time_discovered_started_ns": 0,
        "timeout_ms": 10000,
    } | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "all_reduce number 1 of group default_pg (160x160 Float)"),
        (
            {"collective_seq_id": 2, "input_sizes": [[]]},  # a tensor without dimensions
            "all_reduce number 2 of group default_pg (one Float)",
        ),
        (
            {"collective_seq_id": 3, "profiling_name": "gloo:barrier", "input_sizes": [], "input_dtypes": []},
            "barrier number 3 of group default_pg",
        ),
        (
            {"process_group": ["1", "dp"], "profiling_name": "gloo:all_gather", "input_sizes": [[2]]},
            "all_gather number 1 of group dp (2 Float)",
        ),
        (
            {"input_sizes": [[3], [4, 5]], "input_dtypes": ["Long", "Float"]},
            "all_reduce number 1 of group default_pg (3 Long, 4x5 Float)",
        ),
        (
            {"is_p2p": True, "p2p_seq_id": 9, "profiling_name": "nccl:send 0->1"},
            "send 0->1 number 9 of group default_pg (160x160 Float)",
        ),
        ({"process_group": ["7", ""]}, "all_reduce number 1 of group 7 (160x160 Float)"),
        # Where nobody described the group, torch says so with this word.
        ({"process_group": ["2", "undefined"]}, "all_reduce number 1 of group 2 (160x160 Float)"),
    ],
)
def test_a_collective_in_words(changes: dict[str, Any], words: str) -> None:
    assert describe(entry(**changes)) == words


PROGRAM = """
import sys, threading
from pathlib import Path
from paceline.launch.heartbeats import start_heartbeats
start_heartbeats(Path(sys.argv[1]))
sys.stdin.read()
assert "torch" not in sys.modules
"""


def test_a_program_beats_while_its_main_thread_waits_and_ends_well(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(path)], stdin=subprocess.PIPE) as process:
        try:
            deadline = time.monotonic() + 20
            beats: list[float] = []
            while len(beats) < 2 and time.monotonic() < deadline:
                age_s = read_vitals(path).heartbeat_age_s
                beat = None if age_s is None else time.monotonic() - age_s
                if beat is not None and (not beats or beat > beats[-1] + 0.1):  # another one, not the same once more
                    beats.append(beat)
                else:
                    time.sleep(0.01)
            assert len(beats) == 2
            assert process.poll() is None
            process.communicate(timeout=10)  # its standard input ends
            assert process.returncode == 0
        finally:
            process.kill()
    assert read_vitals(path).step is None


@pytest.mark.parametrize("jump_s", [-1e9, 0.0, 1e9])
def test_a_clock_that_jumps_makes_no_collective_old(jump_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"wall": 1e9, "monotonic": 100.0}
    clocks = SimpleNamespace(time=lambda: clock["wall"], monotonic=lambda: clock["monotonic"])
    monkeypatch.setattr(sys.modules[BeganAt.__module__], "time", clocks)
    began_at = BeganAt()
    created_s = clock["wall"] + 0.5
    for second in range(1, 5):
        clock["monotonic"] = 100.0 + second
        clock["wall"] = 1e9 + second + jump_s
        found = began_at.of("all_reduce 1", created_s)
        assert 100.0 <= found <= 101.0
        assert jump_s or found == 100.5
    began_at.nothing()
    clock["monotonic"] += 1
    assert began_at.of("all_reduce 2", created_s) >= 104.0
