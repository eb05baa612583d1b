"""Many `paceline` commands, one after the other in a single forked process: none of them loads its modules anew."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from tests.kit.commands import user_environ
from tests.kit.workers import fork_process

INPUTS = Path(__file__).with_name("inputs")
TOPOLOGIES = Path(__file__).parents[1] / "data" / "topologies"


@dataclass(frozen=True)
class Said:
    """How a command ended."""

    exit_code: int
    out: str
    err: str
    files: dict[str, str]
    """Names and content of the files that it wrote or changed; empty content where that is no text."""


def run_commands(commands: Sequence[Sequence[str]], files: Sequence[dict[str, str]] = ()) -> list[Said]:
    """Run `paceline ARGUMENTS` for each, in a folder of its own that has the recorded inputs and `files` in it."""
    return _in_forked_process([partial(_command, list(one)) for one in commands], files)


def run_calls(calls: Sequence[str]) -> list[Said]:
    """Run each Python expression as a script would; what it raises for a user is told as the command line tells it."""
    return _in_forked_process([partial(_call, one) for one in calls], ())


def _in_forked_process(programs: Sequence[Callable[[], object]], files: Sequence[dict[str, str]]) -> list[Said]:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = fork_process(_run_all, programs, list(files), user_environ(), sender)
    sender.close()
    try:
        said: list[Said] | str = pickle.loads(receiver.recv_bytes())
    finally:
        process.kill()
        process.join()
    assert not isinstance(said, str), said
    return said


def _run_all(
    programs: Sequence[Callable[[], object]], files: list[dict[str, str]], environ: dict[str, str], sender: Connection
) -> None:
    os.environ.clear()
    os.environ.update(environ)
    try:
        answer: list[Said] | str = [
            _run(program, files[place] if files else {}) for place, program in enumerate(programs)
        ]
    except BaseException:
        answer = traceback.format_exc()
    sender.send_bytes(pickle.dumps(answer))


def _command(arguments: list[str]) -> None:
    from paceline.cli.commands import main

    sys.argv = ["paceline", *arguments]
    main()


def _call(expression: str) -> None:
    import paceline

    try:
        eval(expression, {"paceline": paceline})
    except paceline.errors.PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _run(program: Callable[[], object], files: dict[str, str]) -> Said:
    with tempfile.TemporaryDirectory(prefix="paceline-golden-") as name:
        folder = Path(name) / "folder"
        shutil.copytree(INPUTS, folder)
        shutil.copytree(TOPOLOGIES, folder / "topologies", ignore=shutil.ignore_patterns("__*"))
        for file, text in files.items():
            (folder / file).write_text(text)
        before = _content(folder)
        os.chdir(folder)
        out, err, exit_code = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                program()
            except SystemExit as end:
                exit_code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except Exception:
                traceback.print_exc()
                exit_code = 1
        after = _content(folder)
        os.chdir("/")
        written = {file: content for file, content in after.items() if before.get(file) != content}
        return Said(exit_code, out.getvalue(), err.getvalue(), {file: _text(written[file]) for file in sorted(written)})


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return ""
