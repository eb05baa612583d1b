"""Programs that know nothing of Paceline run under its launcher as they do under torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from paceline.launch.remote_team import NodeAccess, open_nodes
from paceline.launch.run_workers import run_workers
from paceline.launch.team import LaunchOptions
from paceline.spec import NodePlacement, Plan
from tests.old.ranks.command_line import clean_environ, paceline, succeeded
from tests.old.ranks.forked_commands import run_forked
from tests.old.ranks.launching import GENERATION, Stage, is_alive, open_stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SCRIPTS = Path(__file__).parents[1] / "plain_scripts"
"""As their authors would write them; the first argument of most says what happens to rank 1 in its fourth step."""
LIBRARIES = ("with_accelerate.py", "with_fabric.py", "with_lightning.py", "with_trainer.py")
TIMEOUT_S = 300.0
VARIABLES: dict[str, Any] = {"HF_HUB_OFFLINE": "1"}


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with open_stage(tmp_path) as stage:
        yield stage


def under_torchrun(script: str, cwd: Path) -> str:
    """What the script writes to standard output in two workers."""
    environ = clean_environ(OMP_NUM_THREADS="1", **VARIABLES)
    return succeeded(run_forked(["torchrun", script], cwd=cwd, environ=environ, timeout_s=TIMEOUT_S)).stdout


def launched(script: str, cwd: Path) -> str:
    return succeeded(paceline("launch", "-n", "2", script, cwd=cwd, **VARIABLES)).stdout


def weights_in(output: str) -> str:
    """The digest that a script's rank 0 prints in the end."""
    (line,) = [line for line in output.splitlines() if line.startswith("weights ")]
    return line


@pytest.mark.parametrize("script", ["ddp.py", "sharded.py", *LIBRARIES])
def test_an_unchanged_program_trains_as_under_torchrun(script: str, tmp_path: Path) -> None:
    path = str(SCRIPTS / script)
    expected = under_torchrun(path, tmp_path)
    found = launched(path, tmp_path)
    assert weights_in(found) == weights_in(expected)
    if script in ("with_fabric.py", "with_lightning.py"):
        assert "TorchElasticEnvironment" in found


def test_its_workers_may_be_on_two_nodes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = str(SCRIPTS / "ddp.py")
    expected = launched(script, tmp_path)
    with open_nodes([NodeAccess(hostname, lambda program: program) for hostname in "ab"]) as teams:
        plan = Plan(world_size=2, nodes=(NodePlacement("a", 1), NodePlacement("b", 1)))
        run_workers(plan, [script], LaunchOptions(tmp_path / "two"), nodes=teams)
    assert weights_in(capfd.readouterr().out) == weights_in(expected)


FAULTS = {
    "raise": ("exception", "failed with ValueError: sample 17 is damaged", "ValueError: sample 17 is damaged"),
    "kill": ("signal", "was killed by SIGKILL", ""),
    "hang": ("hung", "hangs: rank 0 has waited for it", "in read_from_a_disk_that_hangs"),
}


@pytest.mark.parametrize("script", LIBRARIES)
def test_whatever_happens_to_a_worker_of_it_is_named(script: str, tmp_path: Path) -> None:
    def launch(fault: str) -> subprocess.CompletedProcess[str]:
        options = ("-n", "2", "--hang-timeout", "15", "--out", fault)
        return paceline("launch", *options, str(SCRIPTS / script), fault, cwd=tmp_path, **VARIABLES)

    with ThreadPoolExecutor() as beside:
        ended = list(beside.map(launch, FAULTS))
    for (fault, (cause, sentence, evidence)), done in zip(FAULTS.items(), ended, strict=True):
        out, err = done.stdout, done.stderr
        assert done.returncode in (1, 137) and "weights" not in out, out + err
        report: dict[str, Any] = json.loads((tmp_path / fault / "failure.json").read_text())
        assert (report["cause"], report["ranks"]) == (cause, [1]), report
        assert sentence in report["sentence"] and "Rank 1 of 2" in err
        assert evidence in report["evidence"] and evidence in err
        pids = [int(line.partition("pid ")[2].partition(")")[0]) for line in report["workers"] if "pid " in line]
        assert not any(map(is_alive, [*pids, report["pid"]]))


def test_it_is_started_again_and_loads_its_own_checkpoint(tmp_path: Path) -> None:
    def trained(name: str, *arguments: str) -> tuple[str, str]:
        line = ("launch", "-n", "2", "--max-restarts", "1", "--out", str(tmp_path / name), str(SCRIPTS / "resuming.py"))
        done = paceline(*line, str(tmp_path / f"{name}.pt"), *arguments, cwd=tmp_path, timeout_s=TIMEOUT_S)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    undisturbed, _ = trained("undisturbed")
    killed, said = trained("killed", "kill")
    assert [line for line in killed.splitlines() if line.startswith("start")] == [
        "start 0 from step 0",
        "start 1 from step 3",
    ]
    assert weights_in(killed) == weights_in(undisturbed)
    assert said == "paceline: worker 1 was killed; going on with 2 workers (restart 1)\n"


def test_it_listens_on_loopback_alone(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "paceline", "launch", "-n", "2", "--out", str(tmp_path / "run")]
    environ = clean_environ()
    del environ["GLOO_SOCKET_IFNAME"]
    done = subprocess.run(
        [*line, str(SCRIPTS / "listening.py")], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    addresses = [word for line in done.stdout.splitlines() for word in line.partition("listens ")[2].split()]
    assert len(addresses) >= 3  # the store, and a socket of each worker
    assert all(address.startswith("0100007F:") for address in addresses), addresses


def test_it_may_be_a_module_and_have_options_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "__init__.py").write_text("")
    (tmp_path / "tool" / "words.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])\n")
    for line in (("-n", "1", "-m", "tool.words"), ("-m", "-n", "1", "--", "tool.words")):
        done = paceline("launch", *line, "-n", "4", "--its", "--options", cwd=tmp_path)
        assert done.stdout == "__main__ tool ['-n', '4', '--its', '--options']\n", done.stderr
    refused = paceline("launch", "tool.words", cwd=tmp_path)
    assert (refused.returncode, refused.stderr) == (
        2,
        "paceline: There is no script 'tool.words'; if it is a module, add -m: -m tool.words.\n",
    )
    missing = paceline("launch", "-n", "1", "-m", "tool.nothing", cwd=tmp_path)
    assert missing.returncode != 0 and missing.stderr.startswith("paceline: Python cannot run -m tool.nothing: ")


FINDS_ITS_STORE = (
    GENERATION
    + """
import socket
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
assert os.environ["TORCHELASTIC_RESTART_COUNT"] == str(GENERATION)
assert os.environ["TORCHELASTIC_MAX_RESTARTS"] == "3"
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
