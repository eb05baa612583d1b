"""Two GPUs on one node, simulated where there are none: the README's script takes one each, sums over NCCL, and prints
the weights that it prints on one. A worker whose peer has ended, for which NCCL would wait for ever, saves and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, and not in its list

from tests.kit.commands import paceline, succeeded
from tests.kit.markdown import README, ROOT, files_of
from tests.kit.packages import missing, need
from tests.kit.sim_gpu import build

pytestmark = [pytest.mark.timeout(1500), pytest.mark.budget(processor_s=240)]  # 100 of them to compile it, once

BEFORE = """\
from pathlib import Path
from tests.kit.sim_gpu.torch_cuda import simulate
simulate(Path({library!r}), 2)
"""
AFTER = """
import torch.distributed as dist
backend = dist.get_backend() if dist.is_initialized() else "none"
Path(f"rank{run.rank}").write_text(f"{run.device} {backend}")
"""


@pytest.fixture(scope="module")
def library() -> Path:
    need("g++")
    if obstacle := build.obstacle():
        missing(obstacle)
    return build.build()


def launch(folder: Path, library: Path, workers: int) -> str:
    folder.mkdir()
    script = BEFORE.format(library=str(library)) + files_of(README)["train.py"] + AFTER
    (folder / "train.py").write_text(script)
    environ = {"PACELINE_DEVICE": "cuda", "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "src")))}
    command = ("launch", "-n", str(workers), "--threads", "1", "train.py")
    return succeeded(paceline(*command, cwd=folder, timeout_s=900, **environ)).stdout


def test_two_simulated_gpus_give_the_weights_of_one(library: Path, tmp_path: Path) -> None:
    one, two = (launch(tmp_path / str(workers), library, workers) for workers in (1, 2))
    (line,) = [line for line in one.splitlines() if line.startswith("world size 1:")]
    assert line.replace("size 1:", "size 2:") in two.splitlines()
    places = [(tmp_path / "2" / f"rank{rank}").read_text() for rank in range(2)]
    assert places == ["cuda:0 nccl", "cuda:1 nccl"]


KILLED = """
import os, signal
import torch
import paceline

with paceline.init(global_batch_size=8, virtual_shards=4, epochs=9, checkpoint_dir="saved", progress=False) as run:
    net = torch.nn.Linear(5, 1)
    run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for batch in run.batches(torch.utils.data.TensorDataset(torch.rand(32, 5))):
        if run.steps == 10 and run.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        run.step(batch, lambda model, shard: model(shard[0]).square().mean())
"""


@pytest.mark.nightly
def test_a_worker_whose_peer_was_killed_saves_and_says_so(library: Path, tmp_path: Path) -> None:
    """Without a launcher, which would end it."""
    (tmp_path / "train.py").write_text(BEFORE.format(library=str(library)) + KILLED)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a free port, kept
    environ = {**os.environ, "PACELINE_DEVICE": "cuda", "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "src")))}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    workers = [
        subprocess.Popen(
            [sys.executable, "train.py"],
            cwd=tmp_path,
            env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    (_, said), _ = [worker.communicate(timeout=600) for worker in workers]
    assert [worker.returncode for worker in workers] == [1, -signal.SIGKILL], said
    assert "PeerLost: Rank 1" in said and "Rank 1 of 2" in said, said
    assert (tmp_path / "saved" / "step-00000010" / "manifest.json").exists()


BAD_STEPS = """
import torch
import paceline

with paceline.init(global_batch_size=4, virtual_shards=2, epochs=2, progress=False) as run:
    run.say = print
    net = torch.nn.Linear(3, 1)
    net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    samples = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
    for batch in run.batches(torch.utils.data.TensorDataset(samples)):
        factor = float("nan") if run.steps + 1 in (4, 5, 8) else 1.0
        run.step(batch, lambda model, shard: model(shard[0]).square().mean() * factor)
    print("fused:", optimizer.param_groups[0]["fused"])
    print("weights:", [round(value, 5) for value in net.weight.detach().cpu().flatten().tolist()])
"""


@pytest.mark.nightly
def test_a_gpu_leaves_out_the_updates_that_a_cpu_leaves_out(library: Path, tmp_path: Path) -> None:
    """A step that is not finite, alone and after another one."""
    said = {}
    for kind, begin in (("cpu", ""), ("cuda", BEFORE.format(library=str(library)))):
        (tmp_path / f"{kind}.py").write_text(begin + BAD_STEPS)
        environ = os.environ | {"PACELINE_DEVICE": kind, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "src")))}
        command = [sys.executable, str(tmp_path / f"{kind}.py")]
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900)
        assert ended.returncode == 0, ended.stderr
        said[kind] = ended.stdout.splitlines()
    assert said["cuda"][-1] == said["cpu"][-1] and "fused: True" in said["cuda"]
    left_out = [[line.split(":")[0] for line in lines if line.startswith("Step")] for lines in said.values()]
    assert left_out == [["Step 4", "Step 5", "Step 8"]] * 2
