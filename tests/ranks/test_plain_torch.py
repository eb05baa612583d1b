"""Programs that know nothing of Paceline run under its launcher as they do under torchrun."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.launch import run_workers
from paceline.launch.remote_team import NodeAccess, open_nodes
from paceline.spec import NodePlacement, Plan
from tests.ranks.command_line import clean_environ
from tests.ranks.launching import GENERATION, Stage, open_stage

pytestmark = pytest.mark.timeout(150)

FIVE_STEPS = """\
import hashlib, os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
assert dist.is_torchelastic_launched()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
samples, targets = torch.randn(40, 6), torch.arange(40) % 3
for step in range(5):
    mine = slice(8 * step + rank, 8 * (step + 1), world_size)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(samples[mine]), targets[mine]).backward()
    optimizer.step()
dist.barrier()
if rank == 0:
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(hashlib.sha256(weights).hexdigest(), [os.environ[name] for name in ("GROUP_RANK", "ROLE_RANK", "LOCAL_RANK")])
dist.destroy_process_group()
"""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with open_stage(tmp_path) as stage:
        yield stage


@pytest.mark.slow
def test_an_unchanged_program_trains_as_under_torchrun(stage: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    script = stage.folder / "train.py"
    script.write_text(FIVE_STEPS)

    def output_of(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *command, str(script)], env=clean_environ(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    expected = output_of("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert output_of("paceline", "launch", "-n", "2", "--out", str(stage.run_dir)) == expected
    with open_nodes([NodeAccess(hostname, lambda program: program) for hostname in "ab"]) as (teams, _):
        plan = Plan(world_size=2, nodes=(NodePlacement("a", 1), NodePlacement("b", 1)))
        run_workers(plan, [str(script)], run_dir=stage.run_dir, nodes=teams)
    assert capfd.readouterr().out == expected


FINDS_ITS_STORE = (
    GENERATION
    + """
import socket
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
assert os.environ["TORCHELASTIC_RESTART_COUNT"] == str(GENERATION)
if RANK == 0:
    assert socket.socket(fileno=int(os.environ["PACELINE_TORCH_STORE_FD"])).getsockname() == address
else:
    assert "PACELINE_TORCH_STORE_FD" not in os.environ
tell(f"{GENERATION}-{RANK}.address", str(address))
for rank in range(WORLD_SIZE):
    await_mark(f"{GENERATION}-{rank}.address")
if GENERATION == 0:
    os.kill(os.getpid(), signal.SIGKILL)
"""
)


def test_the_store_listens_on_loopback_alone_and_every_start_has_its_own(stage: Stage) -> None:
    launcher = stage.paceline(
        *("launch", "-n", "2", "--min-workers", "1", "--no-standby", "--out", str(stage.run_dir)),
        stage.script(FINDS_ITS_STORE),
    )
    out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, out + err
    first, second = (
        {(stage.folder / f"{generation}-{rank}.address").read_text() for rank in range(2)} for generation in range(2)
    )
    assert len(first) == len(second) == 1 and first != second
    assert all("127.0.0.1" in address for address in first | second)
