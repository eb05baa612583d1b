"""Two GPUs on one node, simulated where there are none: the README's script takes one each, sums over NCCL, and prints
the weights that it prints on one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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
