"""Agents over plain pipes: what a launcher on another node would see, on this one."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import LaunchError, PacelineError, WorkerFailed
from paceline.launch import agent, messages
from paceline.launch.remote_team import NodeAccess, RemoteTeam, open_nodes
from paceline.launch.run_workers import run_workers
from paceline.launch.team import LaunchOptions
from paceline.spec import NodePlacement, Plan
from tests.old.ranks.launching import Stage, open_stage

pytestmark = pytest.mark.timeout(120)

TWO_NODES = Plan(world_size=3, nodes=(NodePlacement("a", 2), NodePlacement("b", 1)))

MEET = """
import socket
from urllib.parse import urlsplit

place = urlsplit(os.environ["PACELINE_RENDEZVOUS"])
job = os.environ["PACELINE_RUN_DIR"].encode()
if RANK == 0:
    listening = socket.socket(fileno=int(os.environ["PACELINE_STORE_FD"]))
    assert listening.getsockname() == (place.hostname, place.port)
    listening.settimeout(30)
    for _ in range(WORLD_SIZE - 1):
        with listening.accept()[0] as caller:
            assert caller.recv(4096) == job  # another job's worker would say another folder
else:
    assert "PACELINE_STORE_FD" not in os.environ
    with socket.create_connection((place.hostname, place.port), timeout=30) as call:
        call.sendall(job)
"""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with open_stage(tmp_path) as stage:
        yield stage


def _here(hostname: str) -> NodeAccess:
    return NodeAccess(hostname, lambda program: program)


def _answering(*lines: bytes, exit_code: int = 0) -> NodeAccess:
    """A node whose agent says these lines and ends."""
    script = f"import sys; sys.stdout.buffer.write({b''.join(lines)!r}); sys.stderr.write('the reason'); "
    return NodeAccess("odd", lambda _program: [sys.executable, "-c", script + f"sys.exit({exit_code})"])


def _hello(**versions: str) -> bytes:
    return messages.Hello("odd", 1, versions, {}).encode()


def test_ranks_are_spread_and_meet_at_a_socket_that_listened_before(
    stage: Stage, capfd: pytest.CaptureFixture[str]
) -> None:
    script = stage.script(MEET + "\nprint('met', os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE'])")
    with open_nodes([_here("a"), _here("b")]) as teams:
        assert [team.hello.versions for team in teams] == [teams[0].hello.versions] * 2
        for _ in range(2):  # an agent serves one run after the other
            run_workers(TWO_NODES, [script], LaunchOptions(stage.run_dir, output="all"), nodes=teams)
            lines = sorted(capfd.readouterr().out.splitlines())
            assert lines == ["[rank 1] met 1 2", "[rank 2] met 0 1", "met 0 2"]
    assert (stage.run_dir / "logs" / "rank0.log").read_text() == "met 0 2\n"


def test_an_agent_has_its_workers_forked_of_what_has_loaded_their_modules(stage: Stage) -> None:
    """Also those of the next run."""
    script = stage.script("(STAGE / f'start-{RANK}').write_text(f'{os.getppid()} {\"wave\" in sys.modules}')")
    with open_nodes([_here("a"), _here("b")]) as teams:
        for preload, is_forked in (("wave",), True), (("wave",), True), ((), False):
            options = LaunchOptions(stage.run_dir, preload=preload)
            run_workers(TWO_NODES, [script], options, nodes=teams)
            for rank, team in ((0, teams[0]), (1, teams[0]), (2, teams[1])):
                said = (stage.folder / f"start-{rank}").read_text()
                assert said == f"{team.hello.pid} {is_forked}"


@pytest.mark.slow
def test_jobs_that_start_in_the_same_instant_do_not_meet_each_other(stage: Stage) -> None:
    script = stage.script(MEET)
    problems: list[BaseException] = []
    barrier = threading.Barrier(2)

    def launch(name: str) -> None:
        try:
            with open_nodes([_here("a"), _here("b")]) as teams:
                for attempt in range(6):
                    barrier.wait(60)
                    run_workers(TWO_NODES, [script], LaunchOptions(stage.folder / f"{name}{attempt}"), nodes=teams)
        except BaseException as problem:
            problems.append(problem)
            barrier.abort()

    jobs = [threading.Thread(target=launch, args=(name,)) for name in ("one", "two")]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert not problems, problems


def test_workers_that_end_at_once_are_all_counted(stage: Stage) -> None:
    script = stage.script("sys.exit(3 if RANK == 1 else 0)")
    with open_nodes([_here("a"), _here("b")]) as teams:
        for attempt in range(5):
            with pytest.raises(WorkerFailed, match=r"Rank 1 of 3 .* on a\) ended with exit code 3\."):
                run_workers(TWO_NODES, [script], LaunchOptions(stage.folder / str(attempt)), nodes=teams)


def test_a_failure_on_another_node_carries_its_traceback_and_its_node(stage: Stage) -> None:
    script = stage.script("if RANK == 2: raise ValueError('no such label: 11')\npark()")
    with open_nodes([_here("a"), _here("b")]) as teams, pytest.raises(WorkerFailed) as caught:
        run_workers(TWO_NODES, [script], LaunchOptions(stage.run_dir), nodes=teams)
    assert "Rank 2 of 3 (pid " in str(caught.value) and " on b) failed with ValueError: no such label: 11" in str(
        caught.value
    )
    assert "program.py" in caught.value.details
    report: dict[str, Any] = json.loads((stage.run_dir / "failure.json").read_text())
    assert (report["hostname"], report["ranks"], report["cause"]) == ("b", [2], "exception")


def test_a_mistake_of_the_user_stays_one_sentence(stage: Stage) -> None:
    script = stage.script("from paceline.errors import DataError\nraise DataError('train.bin is cut short.')")
    with open_nodes([_here("a"), _here("b")]) as teams, pytest.raises(PacelineError) as caught:
        run_workers(TWO_NODES, [script], LaunchOptions(stage.run_dir), nodes=teams)
    assert (type(caught.value), str(caught.value)) == (PacelineError, "train.bin is cut short.")


@pytest.mark.parametrize(
    ("odd", "sentence"),
    [
        (_answering(b"Welcome to the login node!\n"), "got 'Welcome to the login node!"),
        (_answering(exit_code=3), "No agent runs on odd (exit code 3): the reason"),
        (_answering(_hello(paceline="0.0.1")), "odd has paceline 0.0.1, but a has"),
        (NodeAccess("odd", lambda _program: ["/nowhere/ssh"]), "/nowhere/ssh cannot be started to reach odd"),
        (
            NodeAccess("odd", lambda _program: ["false"], lambda code, _stderr: f"odd is unreachable ({code})."),
            "odd is unreachable (1).",
        ),
    ],
    ids=["chatty", "ends", "version", "no client", "explained"],
)
def test_a_node_that_cannot_take_part_is_one_sentence(odd: NodeAccess, sentence: str) -> None:
    with pytest.raises(LaunchError) as caught, open_nodes([_here("a"), odd]):
        pytest.fail("it took part")
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_what_an_agent_refuses_to_start_is_told_with_its_node(stage: Stage) -> None:
    refuses = _answering(_hello(), messages.Listening([]).encode(), messages.Refused("there is no room.").encode())
    with contextlib.closing(RemoteTeam(refuses)) as team:
        team.greet()
        with pytest.raises(LaunchError, match=r"odd: there is no room\."):
            team.begin_run([], LaunchOptions(stage.run_dir), lambda _event: None, marker="", port=None)
            team.await_start()


def test_a_run_folder_that_a_node_does_not_see(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "MARKER_WAIT_S", 0.3)
    (stage.folder / "marker").touch()
    agent.await_marker(stage.folder, "marker")
    with pytest.raises(LaunchError, match=r"the run folder .* that all nodes share"):
        agent.await_marker(stage.folder, "another")


def test_a_plan_for_nodes_that_are_not_there(stage: Stage) -> None:
    with pytest.raises(LaunchError, match="The plan needs node a, but this run was given none"):
        run_workers(TWO_NODES, [stage.script("")], LaunchOptions(stage.run_dir))


class _Bare:
    """An agent without a launcher behind it: says and hears what a test wants."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paceline", "agent"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def send(self, message: messages.AgentMessage) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(message.encode())
        self.process.stdin.flush()

    def receive(self, kind: type[messages.AgentMessage]) -> messages.AgentMessage:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message = messages.decode(line)
            if isinstance(message, kind):
                return message
        pytest.fail(f"the agent ended before it said {kind.__name__}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@pytest.mark.parametrize("ending", ["silence", "end of input", "kill"])
def test_workers_do_not_outlive_launcher_or_agent(stage: Stage, ending: str) -> None:
    stage.run("", world_size=1)  # makes the folders
    (stage.run_dir / "marker").touch()
    bare = _Bare()
    try:
        bare.receive(messages.Hello)
        command = _command(stage.script("tell('ready')\npark()"), stage)
        # Only silence ends it within two seconds; a busy machine may take longer to start a worker.
        hang_timeout_s = 2.0 if ending == "silence" else 600.0
        options = {"run_dir": str(stage.run_dir), "hang_timeout_s": hang_timeout_s}
        bare.send(messages.Start([command], options, "marker", None))
        bare.receive(messages.Started)
        if ending == "end of input":
            stage.await_marks("ready")
            assert bare.process.stdin is not None
            bare.process.stdin.close()
        elif ending == "kill":
            stage.await_marks("ready")
            bare.process.kill()
        assert bare.process.wait(20) == (-9 if ending == "kill" else 0)
        stage.assert_nobody_left()
    finally:
        bare.close()


def _command(script: str, stage: Stage) -> dict[str, Any]:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "PACELINE_RUN_DIR": str(stage.run_dir)}
    return {"rank": 0, "node": 0, "program": [script], "variables": variables}
