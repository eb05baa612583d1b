"""Seconds to the first step of two workers, and from the death of a worker to the next step: `paceline launch` beside
torchrun alone, in turns; medians.

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

data = torch.utils.data.TensorDataset(torch.ones(4096, 8))
save = {"dir": "checkpoints", "every_steps": 2, "every_minutes": None}
with paceline.init(global_batch_size=8, virtual_shards=4, epochs=9, checkpoint=save, progress=False) as run:
    model = torch.nn.Linear(8, 1)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for batch in run.batches(data):
        run.step(batch, lambda model, shard: model(shard[0]).square().mean())
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
            mark("again")
            break
        mark("first")
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


def times(launcher: str) -> dict[str, float]:
    """Seconds since the epoch of each mark of a run whose second worker is killed once."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        command = [sys.executable, *LAUNCHERS[launcher], "--max-restarts", "1", "script.py"]
        environ = os.environ | {"OMP_NUM_THREADS": "1", "PACELINE_DEVICE": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
        environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        began = time.time()
        subprocess.run(command, cwd=folder, env=environ, capture_output=True, timeout=120, check=True)
        return {"began": began} | {mark: float((folder / mark).read_text()) for mark in ("first", "death", "again")}


def main(num_rounds: int) -> None:
    # As pip does it for what is installed: an environment may keep Python from writing what it compiles.
    compileall.compile_dir(Path(paceline.__file__).parent, quiet=1)
    found: dict[str, list[dict[str, float]]] = {launcher: [] for launcher in LAUNCHERS}
    for _ in range(num_rounds):
        for launcher, runs in found.items():
            runs.append(times(launcher))
            for span, (begin, end) in SPANS.items():
                seconds = [run[end] - run[begin] for run in runs]
                print(
                    f"{launcher} | {span} | {seconds[-1]:.2f} s, median {statistics.median(seconds):.2f} s", flush=True
                )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
