"""Every write of a run fails: what is left, what is said, and whether the run ends with the right bits after all.

    python -m benchmarks.survival.write_faults [--kinds full,denied,killed,torn,…] [--only PATH] [--every 1]

A small job trains in one process (`--launcher debug`), with a layer below Paceline's files that counts every change
of the run folder: files that are opened, written, flushed, renamed, linked, removed, folders that are made and
removed. For each of these points and each kind of fault a fork of this process trains the job with that fault, once or
from that point on, and another one goes on from what it left. The exit code says whether there always was a good
checkpoint where one had been completed, a sentence and no traceback where the run did not end well, results where it
did, and in the end the undisturbed run's weights.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import errno
import gc
import importlib
import io
import os
import re
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint import weights
from paceline.checkpoint.load import newest_good
from paceline.checkpoint.storage import open_storage
from paceline.cli import main as command_line
from paceline.spec import RunRecord
from paceline.train.session import final_save

_NEEDS_SPACE = ("open", "write", "fsync", "save", "mkdir", "link")
_RENAMES = ("rename", "replace")


@dataclass(frozen=True)
class Kind:
    """What happens at a point."""

    number: int | None = None
    """The error of the system; None: the process is killed, before the operation or in the middle of a write."""
    at: Sequence[str] = ()
    """The operations that it happens to; empty: all."""
    lasts: bool = False
    """Whether it happens at all later points too."""
    deletes: bool = False
    """Whether somebody deletes the run folder, and that is all."""


KINDS = {
    "full": Kind(errno.ENOSPC),
    "denied": Kind(errno.EACCES),
    "killed": Kind(),
    "torn": Kind(at=("write",)),
    "quota for good": Kind(errno.EDQUOT, _NEEDS_SPACE, lasts=True),
    "read-only for good": Kind(errno.EROFS, lasts=True),
    "nothing replaced for good": Kind(errno.EEXIST, _RENAMES, lasts=True),
    "other device": Kind(errno.EXDEV, _RENAMES),
    "stale": Kind(errno.ESTALE),
    "deleted": Kind(deletes=True),
}

_NUMBERED = ("rename", "replace", "link", "unlink", "remove", "mkdir", "rmdir", "chmod")
_SETTINGS = ("model=mlp", "epochs=1", "checkpoint.every_steps=2", "checkpoint.keep_last=1", "channels_last=false")
_MAX_STEPS = 6
_RANDOM = re.compile(r"[0-9a-f]{32}")

_SENTENCE = re.compile(r"(paceline: |The checkpoint of|What an earlier|/).* (could not|cannot|can not) .*")

Point = tuple[str, str, int]
"""The operation, the path in the run folder, and how often that happened before."""


class Layer:
    """Counts the changes of a folder, and calls `on_point` before each; it stays until the process ends."""

    def __init__(self, folder: Path, on_point: Callable[[Point], None]) -> None:
        self._folder = str(folder)
        self._on_point = on_point
        self._seen: collections.Counter[tuple[str, str]] = collections.Counter()

    def install(self) -> None:
        for name in _NUMBERED:
            setattr(os, name, self._wrapped(name, getattr(os, name)))
        open_file, fdopen, fsync, io_open = os.open, os.fdopen, os.fsync, io.open
        writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT

        def os_open(path: Any, flags: int, *rest: Any, **named: Any) -> int:
            if flags & writes:
                self.note("open", path)
            return open_file(path, flags, *rest, **named)

        def os_fdopen(descriptor: int, mode: str = "r", *rest: Any, **named: Any) -> Any:
            if mode == "wb" and (path := self._path_of(descriptor)):
                return _File(descriptor, self, path)
            return fdopen(descriptor, mode, *rest, **named)

        def os_fsync(descriptor: int) -> None:
            self.note("fsync", self._path_of(descriptor))
            fsync(descriptor)

        def opened(path: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
            if set(mode) & set("wax"):
                self.note("open", path)
            return io_open(path, mode, *rest, **named)

        os.open, os.fdopen, os.fsync, io.open = os_open, os_fdopen, os_fsync, opened  # type: ignore[assignment]
        setattr(weights, "save_file", self._wrapped_save(getattr(weights, "save_file")))  # noqa: B009, B010

    def note(self, operation: str, path: Any) -> None:
        text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        if f"{text}/".startswith(f"{self._folder}/"):
            key = operation, _RANDOM.sub("*", text[len(self._folder) + 1 :])
            self._seen[key] += 1
            self._on_point((*key, self._seen[key]))

    def _wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *rest: Any, **named: Any) -> Any:
            inside = named.get("dir_fd")
            self.note(name, path if inside is None else f"{self._path_of(inside)}/{os.fsdecode(path)}")
            return function(path, *rest, **named)

        return call

    def _wrapped_save(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def save(tensors: Any, path: Path, *rest: Any) -> None:
            self.note("save", path)
            function(tensors, path, *rest)

        return save

    def _path_of(self, descriptor: int) -> str:
        with contextlib.suppress(OSError):
            return str(Path(f"/proc/self/fd/{descriptor}").readlink())
        return ""


class _File(io.FileIO):
    """A file that tells its layer of each write."""

    def __init__(self, descriptor: int, layer: Layer, path: str) -> None:
        super().__init__(descriptor, "wb")
        self._layer, self._path = layer, path

    def write(self, content: Any) -> int:
        try:
            self._layer.note("write", self._path)
        except Torn:
            super().write(memoryview(content)[: len(content) // 2])
            _die()
        return super().write(content) or 0


class Torn(Exception):  # noqa: N818
    """The process is to die in the middle of what it does."""


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Left:
    """What a run with one fault has left, and what became of it."""

    point: Point
    kind: str
    fired: bool
    exit_code: int
    has_results: bool
    """Whether there were weights and a record when it ended."""
    said: str
    had: int
    """The step of the newest complete checkpoint when the fault came; -1: none."""
    good: int
    """The step of the newest good checkpoint afterwards; -1: none."""
    resumed: int
    """The exit code of the run that went on."""
    equal: bool

    @property
    def problem(self) -> str:
        """What should not be; empty if all is well."""
        was_killed = self.exit_code == -signal.SIGKILL
        complaints = {
            "no good checkpoint": self.good < self.had and not KINDS[self.kind].deletes,
            "a traceback": "Traceback" in self.said,
            "no sentence": self.exit_code != 0 and not was_killed and "paceline: " not in self.said,
            "no results": self.exit_code == 0 and not self.has_results,
            f"resume exits with {self.resumed}": self.resumed != 0,
            "other weights": not self.equal,
        }
        return ", ".join(what for what, holds in complaints.items() if holds)

    def row(self) -> str:
        operation, path, number = self.point
        ended = {0: "went on"}.get(self.exit_code, "killed" if self.exit_code < 0 else "ended with a sentence")
        sentence = _SENTENCE.search(self.said)
        told = sentence.group()[:110].replace("|", "/") if sentence else ""
        left = "none" if self.good < 0 else f"step {self.good}"
        how = ended if self.fired else "not reached"
        return f"| {operation} {path} {number} | {self.kind} | {how} | {told} | {left} | {self.problem or 'equal'} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--only", default="", help="only points whose paths contain this")
    parser.add_argument("--every", type=int, default=1, help="only every so manieth pair of a point and a kind")
    parser.add_argument("--out", type=Path, default=None, help="folder of the runs; a temporary one")
    arguments = parser.parse_args()
    _load_before_forks()
    out = (arguments.out or Path(tempfile.mkdtemp(prefix="paceline-writes-"))).resolve()
    points, digest = undisturbed(out / "undisturbed")
    kinds = arguments.kinds.split(",")
    wanted = [point for point in points if arguments.only in point[1]]
    pairs = [(point, kind) for point in wanted for kind in kinds if not KINDS[kind].at or point[0] in KINDS[kind].at]
    print(f"{len(points)} points, {len(pairs)} faults, {len(pairs[:: arguments.every])} of them here", flush=True)
    print("| point | fault | run | what it said | good checkpoint | after going on |\n|---|---|---|---|---|---|")
    problems = num_fired = 0
    for number, (point, kind) in enumerate(pairs[:: arguments.every]):
        left = fail_once(out / str(number), point, kind, digest)
        problems += bool(left.problem)
        num_fired += left.fired
        print(left.row(), flush=True)
    print(f"{num_fired} faults came; {problems} of them left what should not be")
    raise SystemExit(bool(problems) or not num_fired)


def _load_before_forks() -> None:
    """Load what every run would load; a run takes a quarter of the processor time then."""
    for module in ("paceline.cli.train", "paceline.train.loop", "pydantic", "torch._dynamo"):
        importlib.import_module(module)
    gc.freeze()


def undisturbed(folder: Path) -> tuple[list[Point], str]:
    """Every point of a run in a new folder, and the fingerprint of its weights."""
    points: list[Point] = []
    exit_code, said = train(folder, lambda point: _append(folder, point))
    if exit_code:
        raise SystemExit(f"The undisturbed run ends with {exit_code}: {said}")
    for line in _log_of(folder).read_text().splitlines():
        operation, path, number = line.split("\t")
        points.append((operation, path, int(number)))
    return sorted(set(points)), RunRecord.load(folder / "record.json").weights_sha256


def fail_once(folder: Path, point: Point, kind: str, digest: str) -> Left:
    """A run with a fault, and one that goes on from what it left."""
    fault, log = KINDS[kind], _log_of(folder)
    deleted = folder.with_suffix(".deleted")
    """Made where the folder is deleted after the run has left its results, which no run can help."""

    def results() -> bool:
        return (folder / "record.json").exists() and (folder / "model.safetensors").exists()

    def on_point(reached: Point) -> None:
        is_first = reached == point and not log.exists()
        if is_first:
            complete = [int(path.parent.name[5:]) for path in folder.glob("checkpoints/step-*/manifest.json")]
            log.write_text(str(max(complete, default=-1)))
        if fault.deletes and is_first:
            if results():
                deleted.touch()
            shutil.rmtree(folder, ignore_errors=True)
        elif is_first or (fault.lasts and log.exists() and reached[0] in (fault.at or reached[0])):
            _fail(kind, reached)

    exit_code, said = train(folder, on_point)
    fired = log.exists()
    had = int(log.read_text()) if fired else -1
    found, _ = newest_good(open_storage(folder / "checkpoints"))
    record = folder / "record.json"
    has_results = results() or deleted.exists()
    resumed, said_then = (0, "") if exit_code == 0 and results() else train(folder, lambda _point: None)
    equal = record.exists() and RunRecord.load(record).weights_sha256 == digest
    good = -1 if found is None else found.manifest.step
    said += said_then if resumed else ""
    return Left(point, kind, fired, exit_code, has_results, said, had, good, resumed, equal)


def _fail(kind: str, point: Point) -> None:
    number = KINDS[kind].number
    if number is not None:
        raise OSError(number, os.strerror(number), point[1])
    if kind == "torn":
        raise Torn
    _die()


def train(folder: Path, on_point: Callable[[Point], None], said_in: Path | None = None) -> tuple[int, str]:
    """Train the job in a fork of this process; its exit code, negative for a signal, and what it said.

    Args:
        said_in: the file for its output; None: one beside the folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    said = said_in or folder.with_suffix(".said")
    pid = os.fork()
    if pid == 0:
        descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os._exit(_train_here(folder, on_point))
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), said.read_text(errors="replace")


def _train_here(folder: Path, on_point: Callable[[Point], None]) -> int:
    final_save.PATIENCE_S, final_save._PAUSE_S = 0.2, 0.01
    os.chdir(folder.parent)
    settings = [word for setting in _SETTINGS for word in ("--set", setting)]
    where = ["--launcher", "debug", "-n", "1", "--threads", "1", "--max-steps", str(_MAX_STEPS)]
    sys.argv = ["paceline", "train", "digits-lenet", *settings, *where, "--out", str(folder)]
    Layer(folder, on_point).install()
    exit_code = 0
    try:
        command_line()
    except SystemExit as end:
        exit_code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        exit_code = 70
    with _flushed():
        return exit_code


@contextlib.contextmanager
def _flushed() -> Iterator[None]:
    try:
        yield
    finally:
        streams: Sequence[Any] = (sys.stdout, sys.stderr)
        for stream in streams:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


def _append(folder: Path, point: Point) -> None:
    descriptor = os.open(_log_of(folder), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, "\t".join(map(str, point)).encode() + b"\n")
    os.close(descriptor)


def _log_of(folder: Path) -> Path:
    """Beside the run folder, where nothing fails."""
    return folder.with_suffix(".log")


if __name__ == "__main__":
    main()
