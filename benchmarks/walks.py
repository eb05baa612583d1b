"""Which files of a checkout a batch, a job, a failing worker and a checkpoint pass through, found by running them.

    python benchmarks/walks.py [CHECKOUT]

Two workers train LeNet, and two run a script in which one raises. A file counts if one of its functions runs: for a
job, in the launcher (job_command), and in workers until the first step (job_worker); for a batch, from one step to the
next; for a checkpoint, while it is taken and written; for a failure, in the failing worker and, from its end on, in the
launcher. For `job_value` it counts if one of its functions is handed a `Job`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 240

LENET = """
global_batch_size = 24
virtual_shards = 8
epochs = 9
model = "lenet"
data = { name = "digits", train_limit = 61, test_limit = 31 }
optim = { lr = 0.05, momentum = 0.9, schedule = "cosine", warmup_epochs = 1.0, clip_norm = 2.0 }
"""

POINTS = """
import torch
import paceline

def fail(rank):
    if rank == 1:
        raise ValueError("no such label: 11")

def loss_fn(model, shard):
    return model(shard[0]).square().mean()

samples = torch.utils.data.TensorDataset(torch.arange(160.0).view(32, 5))
with paceline.init(global_batch_size=8, virtual_shards=4, epochs=2, parity="bitwise") as run:
    net = torch.nn.Linear(5, 1)
    run.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-6))
    for batch in run.batches(samples):
        if run.steps == 3:
            fail(run.rank)
        run.step(batch, loss_fn)
"""

TRACER = """
import os, sys, threading
SOURCE, LOG, IS_FAILURE = os.environ["WALK_SOURCE"], os.environ["WALK_LOG"], os.environ["WALK_FAILURE"] == "1"
steps, saves, is_failing, seen, own = 0, 0, False, set(), threading.local()

def walk(file, function, event):
    global steps, saves, is_failing
    if (file, function) == ("train/session.py", "_save_now"):
        saves += 1 if event == "call" else -1
    if event != "call":
        return None
    if not hasattr(own, "is_writer"):
        own.is_writer = file.startswith("checkpoint/")
    steps += (file, function) == ("train/run.py", "step")
    is_failing |= IS_FAILURE and (file, function) in (("launch/worker.py", "_kill_orphans"), ("launch/run.py", "close"))
    if IS_FAILURE:
        return "failure" if is_failing else None
    is_main = threading.current_thread() is threading.main_thread()
    if saves if is_main else own.is_writer:  # another thread passes its own files meanwhile
        return "checkpoint"
    if threading.current_thread().name == "paceline-watch":  # once a second, whatever the others do
        return None
    job = "job_worker" if "LOCAL_RANK" in os.environ else "job_command"
    return {0: job, 8: "batch"}.get(steps)  # the ninth step is in the same epoch as the eighth

def is_handed_job(frame):
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return any(type(frame.f_locals[name]).__name__ == "Job" for name in names)

def is_import(frame):
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None

def trace(frame, event, _argument):
    global is_failing
    code = frame.f_code
    if code.co_name == "fail" and code.co_filename.endswith("points.py"):
        is_failing |= frame.f_locals["rank"] == 1
    is_function = code.co_flags & 1  # else the body of a class or a module
    if event in ("call", "return") and is_function and code.co_filename.startswith(SOURCE):
        file = code.co_filename[len(SOURCE):]
        passed = {walk(file, code.co_name, event), "job_value" if event == "call" and is_handed_job(frame) else None}
        for name in passed - {None}:
            if (name, file) not in seen and not is_import(frame):
                seen.add((name, file))
                with open(LOG, "a") as log:
                    print(name, file, file=log)

threading.setprofile(trace)
sys.setprofile(trace)
"""


def walks(source: Path) -> dict[str, list[str]]:
    """The files of each walk, by their paths below src/paceline."""
    found: dict[str, set[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("sitecustomize.py", TRACER), ("lenet.toml", LENET), ("points.py", POINTS)):
            (Path(folder) / name).write_text(text)
        package = source.absolute() / "src"
        paths = {"PYTHONPATH": f"{folder}:{package}", "WALK_SOURCE": f"{package}/paceline/"}
        environ = {**os.environ, **paths, "WALK_LOG": f"{folder}/log", "CUDA_VISIBLE_DEVICES": ""}
        lenet = ["train", "lenet.toml", "-n", "2", "--set", "plan.algorithm=all_reduce", "--out", "run"]
        fails = ["launch", "-n", "2", "points.py"]
        for arguments, is_failure in ((lenet, "0"), (fails, "1")):
            command, own = [sys.executable, "-m", "paceline", *arguments], {"WALK_FAILURE": is_failure}
            subprocess.run(command, cwd=folder, env=environ | own, timeout=TIMEOUT_S, stdout=sys.stderr)
        for line in Path(folder, "log").read_text().splitlines():
            name, file = line.split(" ", 1)
            found.setdefault(name, set()).add(file)
    found["job"] = found["job_command"] | found["job_worker"]
    return {name: sorted(files) for name, files in sorted(found.items())}


if __name__ == "__main__":
    print(json.dumps(walks(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT), indent=1))
