"""Seconds to the first step of two workers, and from the death of a worker to the next step: `paceline launch` beside
torchrun alone, in turns.

    PYTHONPATH=src python -m benchmarks.starts [ROUNDS]
"""

from __future__ import annotations

import compileall
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import paceline

SCRIPT = """
import os, signal, time
from pathlib import Path
import torch, paceline

def mark(name):
    if not Path(name).exists():
        Path(name).write_text(repr(time.time()))

is_restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
data = torch.utils.data.TensorDataset(torch.ones(4096, 8))
save = {"dir": "checkpoints", "every_steps": 2, "every_minutes": None}
with paceline.init(global_batch_size=8, virtual_shards=4, epochs=9, checkpoint=save, progress=False) as run:
    model = torch.nn.Linear(8, 1)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for batch in run.batches(data):
        run.step(batch, lambda model, shard: model(shard[0]).square().mean())
        mark("again" if is_restarted else "first")
        if is_restarted or "DIES" not in os.environ:
            break
        if run.steps == 8 and run.rank == 1:
            mark("death")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
"""
LAUNCHERS = {
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    "paceline launch": ("-m", "paceline", "launch", "-n", "2", "--out", "run"),
}
SPANS = {"start to first step": ("began", "first"), "death to next step": ("death", "again")}
DIES = {"DIES": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else torchrun's new workers wait for dead ones


def seconds(launcher: str, span: str) -> float:
    """The length of a span in a run of its own."""
    begin, end = SPANS[span]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        command = [sys.executable, *LAUNCHERS[launcher], "--max-restarts", "1", "script.py"]
        environ = os.environ | {"OMP_NUM_THREADS": "1", "PACELINE_DEVICE": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
        environ, began = environ | (DIES if begin == "death" else {}), time.time()
        subprocess.run(command, cwd=folder, env=environ, capture_output=True, timeout=120, check=True)
        marks = {mark.name: float(mark.read_text()) for mark in (folder / begin, folder / end) if mark.exists()}
        return marks[end] - marks.get(begin, began)


def main(num_rounds: int) -> None:
    # As pip does it for what is installed: an environment may keep Python from writing what it compiles.
    compileall.compile_dir(Path(paceline.__file__).parent, quiet=1)
    for span in SPANS:
        found: dict[str, list[float]] = {launcher: [] for launcher in LAUNCHERS}
        for number in range(num_rounds):
            for launcher in sorted(LAUNCHERS, reverse=number % 2 == 1):  # who comes first changes
                found[launcher].append(seconds(launcher, span))
        ratios = [ours / theirs for theirs, ours in zip(*found.values(), strict=True)]
        for launcher, all_s in found.items():
            print(f"{span} | {launcher} | median {statistics.median(all_s):.2f} s")
        deviation = statistics.stdev(ratios) / num_rounds**0.5 if num_rounds > 1 else float("nan")
        middle = f"median {statistics.median(ratios):.3f}, mean {statistics.mean(ratios):.3f} ± {deviation:.3f}"
        print(f"{span} | paceline / torchrun, pair by pair | {middle}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
