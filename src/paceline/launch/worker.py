"""The entry point of a worker: it sets up signals and failure notes, then runs the user's program.

    python -m paceline.launch.worker train.py --flag
    python -m paceline.launch.worker -m package.module argument

A launcher whose workers must not outlive it passes the read end of a pipe as standard input and keeps the
other end: a pipe without a writer means that the launcher is gone.

SIGTERM ends the program, which may save a checkpoint first; SIGUSR1 requests a checkpoint without an end.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import os
import runpy
import select
import signal
import stat
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import NoReturn

from paceline import env
from paceline.errors import LaunchError, PacelineError, shortened
from paceline.launch.exit_watch import watch_exit_handlers
from paceline.launch.failures import Failure, failure_path, spare_failure_path, stack_path
from paceline.launch.heartbeats import start_heartbeats
from paceline.launch.torch_store import serve_store_when_called
from paceline.regular_files import make_run_folder

PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>."""


MOST_MESSAGE_CHARACTERS = 10_000
MOST_TRACEBACK_CHARACTERS = 100_000
"""The most characters of an exception in a note: its beginning and its end."""


class Terminated(SystemExit):
    """SIGTERM arrived: unwind the program, so that its `finally` blocks run, and end."""


def main(program: Sequence[str]) -> None:
    """Run `program` as `python` would have; end the process by force if it fails."""
    die_with_launcher()
    _unwind_on_sigterm()
    # "Save a checkpoint now" must not end a program that has nothing to save.
    signal.signal(signal.SIGUSR1, lambda _number, _frame: None)
    rank, run_dir = env.worker_facts().rank, env.path(env.RUN_DIR)
    if cpus := env.cpus():
        os.sched_setaffinity(0, cpus)
    if run_dir is not None:
        with contextlib.suppress(OSError):  # a full disk is no reason not to train
            _write_stacks_to(stack_path(run_dir, rank))
    if (heartbeat := env.path(env.HEARTBEAT)) is not None:
        start_heartbeats(heartbeat)
    if (descriptor := env.number(env.TORCH_STORE_FD)) is not None:
        serve_store_when_called(descriptor)
    try:
        run_program(program)
        watch_exit_handlers(functools.partial(_give_up, rank, run_dir))
    except Terminated:
        leave(128 + signal.SIGTERM)
    except SystemExit as end:
        _note_exit(end.code, rank, run_dir)
        watch_exit_handlers(functools.partial(_give_up, rank, run_dir))
        raise
    except KeyboardInterrupt:
        leave(128 + signal.SIGINT)
    except BaseException as error:
        report(error, rank, run_dir)
        # Not through the interpreter's shutdown: a process group or a thread waiting for peers would hang it.
        leave(error.exit_code if isinstance(error, PacelineError) else 1)


def die_with_launcher() -> None:
    """Ask the kernel to kill this process when its launcher dies; end now if it is dead already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The launcher may have died before the line above; no signal will come then. Its end of the pipe shows
    # it, where a parent's pid could not: which pid to expect is unknown.
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
        return  # no lifeline: torchrun, srun or a terminal started this process
    lifeline = select.poll()
    lifeline.register(0, 0)  # a hang-up is always reported
    if lifeline.poll(0):
        os._exit(128 + signal.SIGKILL)
    # The program finds an empty standard input, not our pipe.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def run_program(program: Sequence[str]) -> None:
    """Run a script path or `-m module` as `python` would, with the same sys.argv, sys.path and __main__.

    Raises:
        LaunchError: there is no such script or module.
    """
    if program[0] == "-m":
        _run_module(program[1], program[2:])
    else:
        _run_script(program[0], program[1:])


def _run_module(module: str, arguments: Sequence[str]) -> None:
    sys.argv = [module, *arguments]  # runpy replaces the first by the module's path, as python does
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except ImportError as error:
        if _user_frames(error.__traceback__) is not None:
            raise
        raise LaunchError(f"Python cannot run -m {module}: {error}.") from None


def _run_script(script: str, arguments: Sequence[str]) -> None:
    # Not runpy.run_path: it removes __main__ after the script's last line, while its threads and exit
    # handlers may still pickle objects from there, and it changes sys.argv[0].
    path = Path(script).absolute()
    if not path.is_file():
        raise LaunchError(f"There is no script {script} in {Path.cwd()}: check its path.")
    sys.argv = [script, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(path.resolve().parent)  # our own -m set it to the working directory
    main_module = ModuleType("__main__")
    main_module.__file__ = str(path)
    sys.modules["__main__"] = main_module
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(main_module))


def report(error: BaseException, rank: int, run_dir: Path | None) -> None:
    """Write a note of `error` to the run folder, or to standard error if that is impossible."""
    is_user_error = isinstance(error, PacelineError)
    error.__traceback__ = _user_frames(error.__traceback__)
    lines = traceback.TracebackException.from_exception(error)
    text = "" if is_user_error else "".join(lines.format())
    message = _legible(_message(error), MOST_MESSAGE_CHARACTERS)
    if not _leave_note(rank, run_dir, type(error), message, _legible(text, MOST_TRACEBACK_CHARACTERS)):
        with contextlib.suppress(OSError, ValueError):
            print(text or message, file=sys.stderr)


def _legible(text: str, most_characters: int) -> str:
    """What a note keeps of `text`, with what none may hold in words: null characters, halves of pairs."""
    return shortened(text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00"), most_characters)


def _leave_note(rank: int, run_dir: Path | None, error: type[BaseException], message: str, trace: str = "") -> bool:
    """Write a note for the launcher where that is possible; whether it was."""
    is_user_error = issubclass(error, PacelineError)
    note = Failure(rank, os.getpid(), time.time(), error.__name__, message, trace, is_user_error)
    heartbeat = env.path(env.HEARTBEAT)
    places = [] if run_dir is None else [failure_path(run_dir, rank)]
    for place in places if heartbeat is None else [*places, spare_failure_path(heartbeat)]:
        with contextlib.suppress(OSError):
            note.write(place)
            return True
    return False


def _note_exit(code: object, rank: int, run_dir: Path | None) -> None:
    """Record when the program asked to exit and with which code: its peers may fail, and have it killed, while the
    interpreter still shuts down."""
    exit_code = (code & 0xFF) if isinstance(code, int) else int(code is not None)
    if exit_code:
        _leave_note(rank, run_dir, SystemExit, str(exit_code))


def _give_up(rank: int, run_dir: Path | None, sentence: str) -> None:
    """End this process, whose exit handlers do not return."""
    if not _leave_note(rank, run_dir, LaunchError, sentence):
        print(sentence, file=sys.stderr)
    leave(LaunchError.exit_code)


def leave(exit_code: int) -> NoReturn:
    """End this process at once, with everything written so far."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, broken or replaced by the program
            stream.flush()
    os._exit(exit_code)


def _unwind_on_sigterm() -> None:
    """Make SIGTERM raise `Terminated` in this process; in a child that the program forks it kills, as by default."""
    forking = threading.local()

    def unwind(number: int, _frame: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # a second one must not cut the `finally` blocks short
        raise Terminated(128 + number)

    # A new child drops signals that its inherited handlers have noted, so this one must wait.
    def hold() -> None:
        forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)

    def release_in_child() -> None:
        if signal.getsignal(signal.SIGTERM) is unwind:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        release()

    signal.signal(signal.SIGTERM, unwind)
    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=release_in_child)


def _write_stacks_to(path: Path) -> None:
    """Python stacks of a crash, and on SIGUSR2 of a live process, go to `path`."""
    make_run_folder(path.parent)
    # Never closed and never collected: the handlers write to its bare descriptor until the process ends.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    faulthandler.enable(descriptor)
    faulthandler.register(signal.SIGUSR2, descriptor)


def _user_frames(trace: TracebackType | None) -> TracebackType | None:
    """`trace` without the frames of this file and of runpy at its top."""
    ours = (globals(), vars(runpy))
    while trace is not None and any(trace.tb_frame.f_globals is module for module in ours):
        trace = trace.tb_next
    return trace


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a user's own __str__ may fail
        return ""


if __name__ == "__main__":
    main(sys.argv[1:])
