"""`paceline bench checkpoint` and the benchmark beside others: that they measure what they say, and clear up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.spec.checkpoint_timing import CheckpointTimings
from tests.old.ranks.command_line import TRACEBACK, clean_environ, paceline, python, succeeded

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


def test_the_command_times_saves_and_leaves_only_its_figures(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    options = ["--parameters", "3e6", "--rounds", "2", "--dir", "place", "--out", "out"]
    result = succeeded(paceline("bench", "checkpoint", "-n", "2", *options, "--json", cwd=tmp_path))
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["world_size"] == 2
    assert figures["num_rounds"] == 2
    assert 36e6 <= figures["num_bytes"] <= 36.1e6
    assert 0 < figures["stall_s"] < figures["complete_s"]
    assert figures["read_s"] > 0
    assert list((tmp_path / "place").iterdir()) == []
    timings = CheckpointTimings.from_mapping(json.loads((tmp_path / "out" / "timings.json").read_text()))
    assert len(timings.completes_s) == len(timings.reads_s) == 2
    assert timings.environment["started by"] == "paceline"

    again = paceline("bench", "checkpoint", "-n", "2", *options, cwd=tmp_path)
    assert again.returncode == 2
    assert "already holds a benchmark" in again.stderr


def test_the_program_runs_under_torchrun_and_reaches_any_address(tmp_path: Path) -> None:
    place = tmp_path / "place"
    request = {"address": f"file://{place}/bench", "num_parameters": 1000, "num_rounds": 1, "timeout_s": 30}
    (tmp_path / "request.json").write_text(json.dumps(request))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = ["-m", "paceline.measure.checkpoint_bench", "request.json", "out"]
    environ = clean_environ(TP_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    done = subprocess.run(
        [*torchrun, *program], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "timings.json").read_text())["world_size"] == 2
    assert list(place.iterdir()) == []


def test_a_storage_that_cannot_take_it_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "place").write_text("a file where a folder should be")
    result = paceline("bench", "checkpoint", "-n", "1", "--parameters", "1000", "--dir", "place", cwd=tmp_path)
    assert result.returncode == 2
    assert TRACEBACK not in result.stderr
    assert "could not be written" in result.stderr
    assert str(tmp_path / "place") in result.stderr


@pytest.mark.timeout(330)
def test_the_benchmark_tells_ways_apart(tmp_path: Path) -> None:
    """Small, and without the libraries that only the benchmark needs."""
    sizes = ["--parameters", "1e5", "--rounds", "1", "--flips", "4", "--kills", "3"]
    which = ["--only", "cost,stall,flips,kills,resume", "--ways", "Paceline,torch.save"]
    folders = ["--out", str(tmp_path / "out"), "--scratch", str(tmp_path)]
    succeeded(python("-m", "benchmarks.checkpoint", *sizes, *which, *folders, cwd=ROOT, timeout_s=300.0))
    found = json.loads((tmp_path / "out" / "checkpoint.json").read_text())
    assert found["cost"]["Paceline"]["num_bytes"] == pytest.approx(found["cost"]["torch.save"]["num_bytes"], rel=0.5)
    assert found["stall"]["over_copy_processor"] > 0
    assert found["flips"]["Paceline"] == {"noticed": 4}
    assert found["flips"]["torch.save"].get("noticed", 0) < 4
    assert {"refused", "taken for a good one"}.isdisjoint(found["kills"]["Paceline"])
    assert set(found["resume"]["Paceline"].values()) == {"exact"}
    assert found["resume"]["torch.save"]["same_workers"].startswith("off by")
    assert found["resume"]["torch.save, batches skipped by hand"]["same_workers"] == "exact"
    assert "| Paceline | exact | exact | exact |" in (tmp_path / "out" / "checkpoint.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
