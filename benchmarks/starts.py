"""Starts, restarts and faults of two workers under `paceline launch` beside torchrun alone, as a table.

    PYTHONPATH=src python -m benchmarks.starts [--rounds 3] [--what start,restart,faults]

Seconds to the first step, and from the death of a worker to the next step, are medians; of a fault: what failure.json
says, the exit code, seconds from the fault to the end of the launcher, and how many processes are left then.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import ctypes, os, signal, sys, time
from pathlib import Path
import torch, paceline

rank, fault, here = int(os.environ["RANK"]), sys.argv[1], Path.cwd()
(here / f"{os.getpid()}.pid").touch()

def mark(name):
    if not (here / name).exists():
        (here / name).write_text(repr(time.time()))

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        if fault == "hang in the loader" and index == 99:
            mark("fault")
            time.sleep(1000)
        return torch.ones(8)

def strike():
    mark("fault")
    match fault:
        case "raise": raise ValueError("sample 17 is damaged")
        case "exit": os._exit(3)
        case "SIGKILL": os.kill(os.getpid(), signal.SIGKILL)
        case "SIGSEGV": ctypes.string_at(0)
        case "hang in a collective": time.sleep(1000)

save = {"dir": "checkpoints", "every_steps": 2, "every_minutes": None}
with paceline.init(global_batch_size=8, virtual_shards=4, epochs=9, checkpoint=save, progress=False) as run:
    model = torch.nn.Linear(8, 1)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    loaders = 1 if fault == "hang in the loader" else 0
    for batch in run.batches(Samples(), num_workers=loaders):
        run.step(batch, lambda model, shard: model(shard).square().mean())
        mark("again" if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) else "first")
        if run.steps == 8 and rank == 1 and not (here / "fault").exists():
            strike()
        if fault == "none" or (fault == "SIGKILL" and (here / "again").exists()):
            break
        time.sleep(0.05)
"""
LAUNCHERS = {
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    "paceline launch": ("-m", "paceline", "launch", "-n", "2", "--out", "run"),
}
FAULTS = ("raise", "exit", "SIGKILL", "SIGSEGV", "hang in a collective", "hang in the loader", "SIGTERM", "Ctrl-C")
HANG_TIMEOUT_S = 6.0


def run(launcher: str, fault: str, *options: str) -> dict[str, object]:
    """One run; times of its marks, its exit code and report."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        command = [sys.executable, *LAUNCHERS[launcher], *options, "script.py", fault]
        environ = os.environ | {"OMP_NUM_THREADS": "1", "PACELINE_DEVICE": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
        environ |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PACELINE_HANG_TIMEOUT": str(HANG_TIMEOUT_S)}
        began = time.time()
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=quiet, stderr=quiet, start_new_session=True)
        if fault in ("SIGTERM", "Ctrl-C"):
            while not (folder / "first").exists():
                time.sleep(0.01)
            (folder / "fault").write_text(repr(time.time()))
            process.send_signal(signal.SIGTERM if fault == "SIGTERM" else signal.SIGINT)
        exit_code, ended = process.wait(120), time.time()
        marks = {
            mark: float((folder / mark).read_text()) for mark in ("first", "fault", "again") if (folder / mark).exists()
        }
        report: dict[str, object] = {}
        for place in ("run", "checkpoints"):
            with contextlib.suppress(OSError):
                report = json.loads((folder / place / "failure.json").read_text())
        left = [mark for mark in folder.glob("*.pid") if Path(f"/proc/{mark.stem}").exists()]
        return {**marks, "began": began, "ended": ended, "exit_code": exit_code, "report": report, "left": len(left)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--what", default="start,restart,faults")
    options = parser.parse_args()
    for what, fault, first, last in (("start", "none", "began", "first"), ("restart", "SIGKILL", "fault", "again")):
        if what in options.what.split(","):
            words = ("--max-restarts", "1") if what == "restart" else ()
            found: dict[str, list[float]] = {launcher: [] for launcher in LAUNCHERS}
            for _ in range(options.rounds):
                for launcher, seconds in found.items():
                    one = run(launcher, fault, *words)
                    seconds.append(one[last] - one[first])  # type: ignore[operator]
            for launcher, seconds in found.items():
                print(
                    f"{what} | {launcher} | {statistics.median(seconds):.2f} s | {[round(s, 2) for s in seconds]}",
                    flush=True,
                )
    for fault in FAULTS if "faults" in options.what.split(",") else ():
        for launcher in LAUNCHERS:
            one = run(launcher, fault)
            told = one["report"]
            assert isinstance(told, dict)
            named = f"{told['cause']}, ranks {told['ranks']}" if told else "no report"
            seconds_to_end = one["ended"] - one["fault"]  # type: ignore[operator]
            print(
                f"| {fault} | {launcher} | {named} | {one['exit_code']} | {seconds_to_end:.1f} | {one['left']} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
