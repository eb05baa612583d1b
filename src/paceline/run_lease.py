"""One run at a time in a folder: a small file says which process uses it, and is ignored once that process is gone.

On the same boot of the same node a process is gone when no process has its number and its time of start. Elsewhere it
is gone when the count in its file, which it raises every few seconds, has stood still for a minute. No clocks are
compared. A link is made by one of several at a time, on shared file systems too; who changes or removes a file that
exists holds an advisory lock on the folder meanwhile (flock), so that what it has read is still there. Where the file
system has no such locks, or somebody keeps it for seconds, the file of a run that has ended is renamed before it is
looked at again, and linked back if another run has just replaced it: a third run that comes between these two calls
gets the folder as well. Where there are no links either, so does a second one that reads the file before it is written.

A run whose file was removed, with its folder or without, makes it again. One that was stopped for so long that another
run has taken the folder is told so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import os
import platform
import shutil
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import JobError, LaunchError
from paceline.regular_files import NO_FILE, STALE_VIEW_S, read_json
from paceline.spec.codec import NOT_NEGATIVE, JsonValue

LEASE_FILE = "in-use.json"

_HIDDEN = "hidden"
_RENEWAL_S = 5.0
_LOCK_WAIT_S = 3.0
"""Whoever can read the folder can keep it locked: nobody waits for longer."""
_STANDSTILL_S = STALE_VIEW_S


@dataclass(frozen=True)
class Lease(JsonValue):
    """Which process uses a folder."""

    token: str
    """A token that all processes of one run share, which may use the folder one after the other."""
    node: str
    boot: str
    """The node's boot, and the processes that see each other there: a pid means nothing outside of these."""
    pid: int = dataclasses.field(metadata=NOT_NEGATIVE)
    process_started: str
    """The start of the process in the kernel's own time, against pids that are used again."""
    began_at: str
    """For people: local time of the node."""
    count: int = dataclasses.field(default=0, metadata=NOT_NEGATIVE)
    """Raised while the process lives."""

    @property
    def is_gone(self) -> bool | None:
        """Whether its process has ended; None: it cannot be seen from here."""
        if (self.node, self.boot) != (platform.node(), _boot()):
            return None
        started = _start_of(self.pid)
        return not started or (_HIDDEN not in (started, self.process_started) and started != self.process_started)


def own_lease(token: str) -> Lease:
    """The lease of this process."""
    pid, now = os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S")
    return Lease(token, platform.node(), _boot(), pid, _start_of(pid), now)


@contextlib.contextmanager
def hold_folder(folder: Path, token: str = "", say: Callable[[str], None] = print) -> Iterator[None]:
    """Let no other run use the folder, which exists, while the block is open.

    Args:
        token: what the processes of this run have in common; empty: this process is all of it.
        say: told that it takes a minute to see whether a run on another node still lives, and, from another thread,
            that another run has taken the folder.

    Raises:
        LaunchError: another run uses it; says which.
        OSError: nothing can be written there.
    """
    mine = own_lease(token or uuid.uuid4().hex)
    path = folder / LEASE_FILE
    _take(path, mine, say)
    ended = threading.Event()
    thread = threading.Thread(target=_renew, args=(path, mine, ended, say), name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(OSError), _locked(folder):
            if _is_of(_read(path), mine):
                path.unlink()


def temporary_folder(prefix: str, parent: str | None = None) -> tempfile.TemporaryDirectory[str]:
    """A temporary folder of this process; those of processes that were killed before they could remove theirs go.

    Args:
        parent: where; None: where temporary files belong.
    """
    for path in Path(parent or tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            holder = _read(path / LEASE_FILE) if is_ours else None
            if holder is not None and holder.is_gone:
                shutil.rmtree(path, ignore_errors=True)
    folder = tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
    with contextlib.suppress(OSError):  # a full disk is no reason not to start
        own_lease("temporary").save(Path(folder.name) / LEASE_FILE, 0o600)
    return folder


def run_token(run_dir: Path | None) -> str:
    """What the processes of the run have in common that uses a folder now; empty if none does."""
    holder = None if run_dir is None else _read(run_dir / LEASE_FILE)
    return "" if holder is None else holder.token


def check_free(folder: Path) -> None:
    """Raise the `LaunchError` of `hold_folder` if a living process of this node uses the folder; takes nothing."""
    path = folder / LEASE_FILE
    holder = _read(path)
    if holder is not None and holder.is_gone is False:
        raise _in_use(path, holder)


def _in_use(path: Path, holder: Lease) -> LaunchError:
    return LaunchError(
        f"{path.parent} is in use by process {holder.pid} on {holder.node} since {holder.began_at}; wait for its end, "
        "or choose another folder."
    )


def _take(path: Path, mine: Lease, say: Callable[[str], None]) -> None:
    for _ in range(10):  # others may try at the same time
        if _place(path, mine):
            return
        holder = _read(path)
        is_free = holder is None or holder.token == mine.token or holder.is_gone or _stands_still(path, holder, say)
        if holder is not None and not is_free:
            raise _in_use(path, holder)
        _remove(path, holder)
    raise LaunchError(f"{path.parent} is claimed by several runs at once; choose another folder for this one.")


def _place(path: Path, lease: Lease) -> bool:
    """Make the file; whether there was none."""
    draft = path.with_name(f".{LEASE_FILE}-{uuid.uuid4().hex}")
    lease.save(draft, 0o644)
    try:
        os.link(draft, path)  # unlike a rename it replaces nothing
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        return _write_in_place(path, draft.read_text(encoding="utf-8"))
    finally:
        draft.unlink(missing_ok=True)
    return True


def _write_in_place(path: Path, text: str) -> bool:
    """As `_place`; meanwhile nobody may remove the file because it says nothing yet."""
    with _locked(path.parent):
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            return False
    return True


def _remove(path: Path, holder: Lease | None) -> None:
    """Remove the lease of a run that has ended, unless another run has just replaced it by its own."""
    with _locked(path.parent) as is_locked:
        if is_locked:
            if _is_same(_read(path), holder):
                path.unlink(missing_ok=True)
            return
        aside = path.with_name(f".{LEASE_FILE}-{uuid.uuid4().hex}")
        try:
            path.rename(aside)
        except FileNotFoundError:
            return
        if not _is_same(_read(aside), holder):
            with contextlib.suppress(OSError):
                os.link(aside, path)
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Keep others from changing leases in the folder; whether that was possible."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield _lock(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    until = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        except OSError:  # a file system without locks
            return False


def _stands_still(path: Path, holder: Lease, say: Callable[[str], None]) -> bool:
    """Whether a lease of a process that cannot be seen from here is not renewed any more."""
    if holder.is_gone is False:
        return False
    say(f"{path.parent} was in use by a run on {holder.node}; looking for {_STANDSTILL_S:.0f} s whether it still is.")
    until = time.monotonic() + _STANDSTILL_S
    while time.monotonic() < until:
        time.sleep(1.0)
        if _read(path) != holder:
            return False
    return True


def _renew(path: Path, mine: Lease, ended: threading.Event, say: Callable[[str], None]) -> None:
    has_told = False
    for count in itertools.count(1):
        if ended.wait(_RENEWAL_S):
            return
        with contextlib.suppress(OSError):  # a full disk is no reason to stop
            found = _replace_own(path, dataclasses.replace(mine, count=count))
            if found is None:
                _place(path, dataclasses.replace(mine, count=count))
            elif found.token != mine.token and not has_told:
                has_told = True
                say(
                    f"{path.parent} was taken by process {found.pid} on {found.node} at {found.began_at}, which saw no "
                    "sign of life of this run; end one of the two, as they write over each other's files."
                )


def _replace_own(path: Path, lease: Lease) -> Lease | None:
    """Write a lease over an earlier one of the same process; what was found there."""
    with _locked(path.parent):
        found = _read(path)
        if _is_of(found, lease):
            lease.save(path, 0o644)
        return found


def _read(path: Path) -> Lease | None:
    """The lease in a file; None where there is none, or one that says nothing."""
    try:
        return Lease.from_mapping(read_json(path))
    except (FileNotFoundError, ValueError, JobError):
        return None
    except OSError as problem:
        if problem.errno in NO_FILE:
            return None
        raise


def _is_of(found: Lease | None, holder: Lease) -> bool:
    return found is not None and dataclasses.replace(found, count=0) == dataclasses.replace(holder, count=0)


def _is_same(found: Lease | None, before: Lease | None) -> bool:
    """Whether a file is still of the run that it was of; None: it says nothing."""
    return found is None if before is None else _is_of(found, before)


def _boot() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _start_of(pid: int) -> str:
    """When a process started, or `_HIDDEN`; empty if there is none."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else rest[18]
    except (OSError, ValueError, IndexError):  # no Linux, or another user's process that /proc hides
        pass
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return ""
    except OSError:
        pass
    return _HIDDEN
