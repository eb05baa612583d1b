"""`paceline`, `python` and `torchrun` in processes that are forked from one which has loaded torch, for tests of what
commands and scripts do and not of how they start.

    run_forked(["paceline", "train", "digits-lenet"], cwd=folder, environ=environ, timeout_s=60)
    with paceline_on_path(folder) as bin_folder: ...

    @in_forked_process
    def test_of_functions_that_start_workers(tmp_path): ...

The fork server and the workers that a command starts as `python -m paceline.launch...` are forked from the command,
with the arguments, variables, descriptors, signals and exit handlers that a new process would have. Commands are
started for real in tests/old/ranks/test_cli.py and in the README.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import importlib
import json
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from paceline.__main__ import main
from paceline.launch import fork_server, forking, team, worker
from paceline.launch.forking import receive
from tests.kit.workers import fork_process

_LENGTH = struct.Struct("!I")
_STREAMS = 3
_CLIENT = """\
#!{python} -IS
import json, os, socket, struct, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    request = json.dumps([[{name!r}, *sys.argv[1:]], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [struct.pack("!I", len(request))], [0, 1, 2])
    server.sendall(request)
    answer = server.recv(1)
sys.exit(answer[0] if answer else 1)
"""


def run_forked(
    argv: Sequence[str], *, cwd: Path, environ: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """`paceline ARGUMENTS`, `python SCRIPT ARGUMENTS` or `torchrun SCRIPT ARGUMENTS` (two workers on this node) to its
    end, as `subprocess.run` would with captured streams.

    Raises:
        subprocess.TimeoutExpired: it was still running, and was killed.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-command-") as folder:
        out, err, end = (Path(folder) / name for name in ("out", "err", "exit_code"))
        parent = fork_process(_run_into_files, list(argv), str(cwd), dict(environ), out, err, end)
        parent.join(timeout_s)
        parent.kill()
        parent.join()
        if not end.exists():
            raise subprocess.TimeoutExpired(list(argv), timeout_s, out.read_bytes(), err.read_bytes())
        return subprocess.CompletedProcess(list(argv), int(end.read_text()), out.read_text(), err.read_text())


def in_forked_process(test: Callable[..., None]) -> Callable[..., None]:
    """A test that runs in a process of its own, in the folder and with the variables that its fixtures have set; what
    Paceline starts there is forked. Its arguments are pickled."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        place = str(Path.cwd()), dict(os.environ)
        process = fork_process(_call, test.__module__, test.__name__, fixtures, *place, sender)
        sender.close()
        try:
            failed = pickle.loads(receiver.recv_bytes())
        except EOFError:
            failed = "died without a word"
        finally:
            process.kill()
            process.join()
        assert failed is None, failed

    return run


def _call(
    module: str, test: str, fixtures: Mapping[str, Any], cwd: str, environ: Mapping[str, str], sender: Connection
) -> NoReturn:
    """Send how a test failed, or None."""

    def run() -> None:
        failed = None
        try:
            getattr(importlib.import_module(module), test).__wrapped__(**fixtures)
        except BaseException:
            failed = traceback.format_exc()
        sender.send_bytes(pickle.dumps(failed))

    _enter(range(_STREAMS), (sender.fileno(),), cwd, environ, [cwd])
    _fork_what_is_started()
    _run_to_the_end(run, [test])


Place = Callable[[socket.socket], None]
"""Have the next child of this process live where the program at the other end of a connection does."""


@contextlib.contextmanager
def paceline_on_path(folder: Path, name: str = "paceline", place: Place | None = None) -> Iterator[Path]:
    """A folder for PATH with a program `paceline` that works until the block ends; commands that run then are killed.

    The program hands over its arguments, variables, folder and streams, and waits for the exit code.

    Args:
        name: "paceline", or "python".
        place: where commands live; None: beside this process.
    """
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    with tempfile.TemporaryDirectory(prefix="paceline-commands-") as short:  # a socket's name has 107 characters
        address = f"{short}/socket"
        program = bin_folder / name
        program.write_text(_CLIENT.format(python=sys.executable, name=name, address=address))
        program.chmod(0o755)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            server = fork_process(_serve, listener, place)
            try:
                yield bin_folder
            finally:
                server.kill()
                server.join()


def _run_into_files(argv: list[str], cwd: str, environ: dict[str, str], out: Path, err: Path, end: Path) -> None:
    files = [os.open(path, os.O_WRONLY | os.O_CREAT) for path in (out, err)]
    command = _fork()
    if command == 0:
        _run(argv, cwd, environ, [os.open(os.devnull, os.O_RDONLY), *files])
    # By a file: two threads that look after their processes at once may miss the exit code of one.
    end.write_text(str(os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])))


def _serve(listener: socket.socket, place: Place | None) -> None:
    signal.signal(signal.SIGCHLD, lambda *_: _reap())  # so that their processor time is that of this process
    while True:
        connection, _ = listener.accept()
        with connection:
            if _fork() == 0:
                listener.close()
                _answer(connection, place)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _answer(connection: socket.socket, place: Place | None) -> NoReturn:
    """Run one command to its end, and send its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    header, streams, _, _ = socket.recv_fds(connection, _LENGTH.size, _STREAMS)
    argv, cwd, environ = json.loads(receive(connection, *_LENGTH.unpack(header)))
    if place is not None:
        place(connection)
    command = _fork()
    if command == 0:
        _run(argv, cwd, environ, streams)
    for stream in streams:
        os.close(stream)
    exit_code = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
    connection.sendall(bytes([exit_code if exit_code >= 0 else 128 - exit_code]))
    os._exit(0)


def _run(argv: list[str], cwd: str, environ: Mapping[str, str], streams: Sequence[int]) -> NoReturn:
    """Be that command, to its end."""
    _enter(streams, (), cwd, environ, [str(Path(sys.executable).parent)])
    _fork_what_is_started()
    program, *arguments = argv
    if program == "paceline":
        _run_to_the_end(main, argv)
    if program == "torchrun":
        _run_to_the_end(lambda: _run_in_two_workers(arguments), arguments)
    assert program == "python"
    _run_to_the_end(lambda: worker.run_program(arguments), arguments)


def _fork_what_is_started() -> None:
    for module in (forking, team):
        vars(module)["subprocess"] = SimpleNamespace(Popen=_Forked.start, DEVNULL=subprocess.DEVNULL)


def _run_in_two_workers(script: Sequence[str]) -> None:
    """Do what `torchrun --standalone --nproc-per-node 2` does, with workers that are forked."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    one_node = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="forked",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    elastic_launch(one_node, worker.run_program)(script)


@dataclass
class _Forked:
    """As `subprocess.Popen` of one of our programs, as far as launchers use it."""

    pid: int
    returncode: int | None = None

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        stdout: int | None,
        stderr: int | None,
        pass_fds: Sequence[int],
        start_new_session: bool,
    ) -> _Forked:
        """Fork a process in place of `python -m MODULE ARGUMENTS`."""
        python, flag, module, *arguments = argv
        assert (python, flag, start_new_session) == (sys.executable, "-m", True)
        program = {"paceline.launch.fork_server": fork_server.main, "paceline.launch.worker": worker.main}[module]
        nothing = os.open(os.devnull, os.O_RDWR)
        asked = [number if given is None else given for number, given in enumerate((stdin, stdout, stderr))]
        streams = [nothing if stream == subprocess.DEVNULL else stream for stream in asked]
        pid = os.fork()
        if pid == 0:
            os.setsid()
            cwd = str(Path.cwd())
            _enter(streams, pass_fds, cwd, env, [cwd])
            _run_to_the_end(lambda: program(arguments), [module, *arguments])
        os.close(nothing)
        return cls(pid)

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def poll(self) -> int | None:
        if self.returncode is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            self.wait()
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _enter(
    streams: Sequence[int], kept: Sequence[int], cwd: str, environ: Mapping[str, str], import_from: Sequence[str]
) -> None:
    """Have the descriptors, folder, variables and signals that a new process would have been given."""
    copies = [fcntl.fcntl(stream, fcntl.F_DUPFD, 10) for stream in streams]
    for target, copy in enumerate(copies):
        os.dup2(copy, target)
    first = _STREAMS
    for descriptor in [*sorted(kept), os.sysconf("SC_OPEN_MAX")]:
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:0] = [*import_from, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    if (num_threads := environ.get("OMP_NUM_THREADS", "")).isdigit():  # read when torch was loaded
        torch.set_num_threads(int(num_threads))
    vars(weakref.finalize)["_registry"].clear()  # a launcher's temporary folders are not its workers' to remove
    tempfile.tempdir = None  # it follows TMPDIR
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    # Its descriptor is closed: the next use starts another.
    vars(resource_tracker._resource_tracker).update(_fd=None, _pid=None)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _run_to_the_end(program: Callable[[], object], argv: list[str]) -> NoReturn:
    """Call `program` and end this process as Python ends."""
    sys.argv = argv
    multiprocessing.set_start_method(None, force=True)  # Python's own default again
    exit_code = 0
    try:
        program()
    except SystemExit as end:
        exit_code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        exit_code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # to take all modules apart would take longer than most commands


def _fork() -> int:
    """os.fork() whose child dies with its parent."""
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(worker.PR_SET_PDEATHSIG, signal.SIGKILL)
    return child
