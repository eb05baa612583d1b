"""A folder as a slow or forgetful file server shows it to a node: a file system in user space, by the kernel's words.

    python tests/old/hosts/folder_view.py FOLDER MOUNT [--late 0.05] [--remember 60] [--refuse replace=EEXIST]

Mounts a view of FOLDER at MOUNT and says "mounted". Each view has caches of its own, as each client of NFS has: what
one changes, another sees once it has forgotten, after `--remember` seconds, what it knew of names, absent ones
included, of listings and of attributes; the content of a file is read anew when it is opened. A file that another
view has removed is stale (ESTALE), and locks are known to one view only, as with NFS's `local_lock`. What `--refuse`
names is refused from the start, or once this view has renamed a file to the name after `--when`; then, too, the command
after `--run` is run in FOLDER. The view ends with this process, or when it is unmounted. Needs root and /dev/fuse.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import itertools
import os
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.kit.nodes.cluster import Node  # the program of this file finds no package of tests

_HEADER = struct.Struct("<IIQQIIIHH")
_ANSWER = struct.Struct("<IiQ")
_ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
_LARGEST = 1 << 17
"""Bytes of a write or a read; requests need room for their header besides."""

_ROOT = 1
_FORGET, _BATCH_FORGET, _INTERRUPT = 2, 42, 36
_FLOCK_LOCKS, _BIG_WRITES, _POSIX_LOCKS = 1 << 10, 1 << 5, 1 << 1
_KEEP_LISTING = 1 << 1 | 1 << 3
_NO_REPLACE = 1
"""From <linux/fuse.h> and <linux/fs.h>."""


@dataclass
class _Node:
    """A file or folder that the kernel knows."""

    handle: int
    """Opened with O_PATH: it stays the same file however it is renamed."""
    num_lookups: int = 0
    removed_here: bool = False

    @property
    def path(self) -> str:
        return f"/proc/self/fd/{self.handle}"


class View:
    """Answers the kernel's requests, each in a thread of several."""

    def __init__(
        self, folder: Path, *, late_s: float, remember_s: float, refusals: dict[str, int], when: str, command: str
    ) -> None:
        self._folder, self._late_s, self._remember_s, self._refusals = folder, late_s, remember_s, refusals
        self._when, self._command = when, command
        self._refuses = not when
        self._nodes = {_ROOT: _Node(os.open(folder, os.O_PATH | os.O_DIRECTORY), 1)}
        self._numbers: dict[int, int] = {}
        """The kernel's number of each inode."""
        self._next = itertools.count(_ROOT + 1)
        self._listings: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._device = -1
        self._operations: dict[int, tuple[str, Callable[[int, bytes], bytes]]] = {
            1: ("lookup", self._lookup),
            3: ("attributes", lambda node, _body: self._attributes(self._of(node))),
            4: ("change", self._change),
            5: ("readlink", lambda node, _body: os.fsencode(os.readlink("", dir_fd=self._of(node).handle))),
            6: ("symlink", self._symlink),
            9: ("mkdir", self._mkdir),
            10: ("unlink", lambda node, body: self._remove(node, body, os.unlink)),
            11: ("rmdir", lambda node, body: self._remove(node, body, os.rmdir)),
            12: ("rename", lambda node, body: self._rename(node, body[:8], body[8:])),
            13: ("link", self._link),
            14: ("open", self._open),
            15: ("read", self._read),
            16: ("write", self._write),
            17: ("space", self._space),
            18: ("close", self._close),
            20: ("sync", self._sync),
            25: ("flush", lambda _node, _body: b""),
            26: ("begin", self._begin),
            27: ("list", self._list),
            28: ("entries", self._entries),
            29: ("listed", self._listed),
            30: ("sync", lambda _node, _body: b""),
            31: ("lock", lambda _node, _body: b""),
            32: ("lock", lambda _node, _body: b""),
            33: ("lock", lambda _node, _body: b""),
            35: ("create", self._create),
            45: ("rename", lambda node, body: self._rename(node, body[:8], body[16:], body[8])),
        }

    def mount(self, place: Path) -> None:
        self._device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"view", os.fsencode(place), b"fuse.view", 0, options.encode()):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(place))

    def serve(self, num_threads: int = 8) -> None:
        """Until it is unmounted."""
        threads = [threading.Thread(target=self._serve) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, _LARGEST + 4096)
            except OSError as problem:
                if problem.errno in (errno.EINTR, errno.ENOENT):  # the caller was interrupted
                    continue
                return  # unmounted
            _, code, unique, node, *_ = _HEADER.unpack_from(request)
            body = request[_HEADER.size :]
            if code in (_FORGET, _BATCH_FORGET):
                self._forget(code, node, body)
            elif code != _INTERRUPT:
                self._answer(unique, *self._result(code, node, body))

    def _answer(self, unique: int, error: int, content: bytes) -> None:
        try:
            os.write(self._device, _ANSWER.pack(_ANSWER.size + len(content), -error, unique) + content)
        except OSError as problem:
            if problem.errno != errno.ENOENT:  # the caller did not wait for it
                raise

    def _result(self, code: int, node: int, body: bytes) -> tuple[int, bytes]:
        if code not in self._operations:
            return errno.ENOSYS, b""
        name, operation = self._operations[code]
        if name != "begin":
            time.sleep(self._late_s)
        try:
            self._refuse(name)
            return 0, operation(node, body)
        except OSError as problem:
            return problem.errno or errno.EIO, b""

    def _refuse(self, name: str) -> None:
        if self._refuses and (number := self._refusals.get(name)):
            raise OSError(number, name)

    def _begin(self, _node: int, body: bytes) -> bytes:
        _, _, read_ahead, flags = struct.unpack_from("<IIII", body)
        wanted = _BIG_WRITES | (_FLOCK_LOCKS | _POSIX_LOCKS if "lock" in self._refusals else 0)
        times = struct.pack("<HHIIHHIIH22x", 12, 10, _LARGEST, 1, 0, 0, 0, 0, 0)
        return struct.pack("<IIII", 7, 31, read_ahead, flags & wanted) + times

    def _of(self, node: int) -> _Node:
        with self._lock:
            found = self._nodes[node]
        if os.fstat(found.handle).st_nlink == 0 and not found.removed_here:
            raise OSError(errno.ESTALE, "removed by another view")
        return found

    def _forget(self, code: int, node: int, body: bytes) -> None:
        lists = [(node, *struct.unpack_from("<Q", body))] if code == _FORGET else struct.iter_unpack("<QQ", body[8:])
        with self._lock:
            for number, count in lists:
                known = self._nodes[number]
                known.num_lookups -= count
                if known.num_lookups <= 0 and number != _ROOT:
                    del self._nodes[number]
                    inode = os.fstat(known.handle).st_ino
                    if self._numbers.get(inode) == number:
                        del self._numbers[inode]
                    os.close(known.handle)

    def _entry(self, parent: _Node, name: bytes) -> bytes:
        """What is in a folder under a name."""
        handle = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=parent.handle)
        status = os.fstat(handle)
        with self._lock:
            number = self._numbers.get(status.st_ino)
            if number is None:
                number = self._numbers[status.st_ino] = next(self._next)
                self._nodes[number] = _Node(handle)
            else:
                os.close(handle)
            self._nodes[number].num_lookups += 1
        return struct.pack("<QQ", number, 0) + self._times(2) + _attributes_of(status)

    def _times(self, count: int) -> bytes:
        """For how long the kernel may believe what it is told, as seconds and nanoseconds."""
        seconds, rest = divmod(self._remember_s, 1)
        return struct.pack(f"<{count}Q{count}I", *[int(seconds)] * count, *[int(rest * 1e9)] * count)

    def _attributes(self, node: _Node) -> bytes:
        return self._times(1) + bytes(4) + _attributes_of(os.fstat(node.handle))

    def _lookup(self, node: int, body: bytes) -> bytes:
        try:
            return self._entry(self._of(node), body[:-1])
        except FileNotFoundError:
            if not self._remember_s:
                raise
            return struct.pack("<QQ", 0, 0) + self._times(2) + bytes(_ATTRIBUTES.size)  # remembered as absent

    def _change(self, node: int, body: bytes) -> bytes:
        valid, _, _, size, _, _, mtime, _, _, mtime_ns, _, mode, _, uid, gid, _ = struct.unpack_from(
            "<IIQQQQQQIIIIIIII", body
        )
        known = self._of(node)
        if valid & 1:
            Path(known.path).chmod(stat.S_IMODE(mode))
        if valid & 6:
            os.chown(known.path, uid if valid & 2 else -1, gid if valid & 4 else -1)
        if valid & 8:
            self._refuse("write")
            os.truncate(known.path, size)
        if valid & 32:
            when = time.time_ns() if valid & 256 else mtime * 10**9 + mtime_ns
            os.utime(known.path, ns=(when, when))
        return self._attributes(known)

    def _symlink(self, node: int, body: bytes) -> bytes:
        name, target, _ = body.split(b"\0", 2)
        os.symlink(target, name, dir_fd=self._of(node).handle)
        return self._entry(self._of(node), name)

    def _mkdir(self, node: int, body: bytes) -> bytes:
        mode, _ = struct.unpack_from("<II", body)
        name = body[8:-1]
        os.mkdir(name, dir_fd=self._of(node).handle)
        (Path(self._of(node).path) / os.fsdecode(name)).chmod(stat.S_IMODE(mode))
        return self._entry(self._of(node), name)

    def _remove(self, node: int, body: bytes, remove: Callable[..., None]) -> bytes:
        parent, name = self._of(node), body[:-1]
        self._is_removed_here(parent, name)
        remove(name, dir_fd=parent.handle)
        return b""

    def _is_removed_here(self, parent: _Node, name: bytes) -> None:
        try:
            inode = os.stat(name, dir_fd=parent.handle, follow_symlinks=False).st_ino
        except FileNotFoundError:
            return
        with self._lock:
            if (number := self._numbers.get(inode)) is not None:
                self._nodes[number].removed_here = True

    def _rename(self, node: int, head: bytes, names: bytes, flags: int = 0) -> bytes:
        old, new, _ = names.split(b"\0", 2)
        source, target = self._of(node), self._of(*struct.unpack("<Q", head))
        place = f"{target.path}/{os.fsdecode(new)}"
        if os.path.lexists(place):
            if flags & _NO_REPLACE:
                raise FileExistsError(errno.EEXIST, place)
            self._refuse("replace")
            self._is_removed_here(target, new)
        os.rename(old, new, src_dir_fd=source.handle, dst_dir_fd=target.handle)
        if self._when == os.fsdecode(new) and not self._refuses:
            self._refuses = True
            subprocess.run(self._command, shell=True, check=True, cwd=self._folder)
        return b""

    def _link(self, node: int, body: bytes) -> bytes:
        (source,) = struct.unpack_from("<Q", body)
        target, name = self._of(node), body[8:-1]
        os.link(self._of(source).path, name, dst_dir_fd=target.handle)  # with a dir_fd it follows the first name
        return self._entry(target, name)

    def _open(self, node: int, body: bytes) -> bytes:
        (flags,) = struct.unpack_from("<I", body)
        if flags & (os.O_WRONLY | os.O_RDWR):
            self._refuse("write")
        # The kernel asks for each write where a file's end is what counts.
        return struct.pack("<QII", os.open(self._of(node).path, flags & ~(os.O_NOFOLLOW | os.O_APPEND)), 0, 0)

    def _create(self, node: int, body: bytes) -> bytes:
        flags, mode, _, _ = struct.unpack_from("<IIII", body)
        parent, name = self._of(node), body[16:-1]
        self._refuse("write")
        flags = flags & ~os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        handle = os.open(name, flags, stat.S_IMODE(mode), dir_fd=parent.handle)
        os.fchmod(handle, stat.S_IMODE(mode))
        return self._entry(parent, name) + struct.pack("<QII", handle, 0, 0)

    def _read(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        self._of(node)
        return os.pread(handle, size, offset)

    def _write(self, _node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        return struct.pack("<II", os.pwrite(handle, body[40 : 40 + size], offset), 0)

    def _sync(self, _node: int, body: bytes) -> bytes:
        os.fsync(*struct.unpack_from("<Q", body))
        return b""

    def _close(self, _node: int, body: bytes) -> bytes:
        os.close(*struct.unpack_from("<Q", body))
        return b""

    def _space(self, _node: int, _body: bytes) -> bytes:
        found = os.statvfs(self._nodes[_ROOT].path)
        counts = found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree
        return struct.pack("<QQQQQIII28x", *counts, found.f_bsize, found.f_namemax, found.f_frsize)

    def _list(self, node: int, _body: bytes) -> bytes:
        content, names = b"", sorted(path.name for path in Path(self._of(node).path).iterdir())
        for name in (".", "..", *names):
            encoded = os.fsencode(name)
            size = 24 + len(encoded)
            content += struct.pack("<QQII", 1, len(content) + -(-size // 8) * 8, len(encoded), 0)
            content += encoded + bytes(-size % 8)
        handle = next(self._next)
        self._listings[handle] = content
        return struct.pack("<QII", handle, _KEEP_LISTING if self._remember_s else 0, 0)

    def _entries(self, _node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        content, end = self._listings[handle], offset
        while end < len(content):
            (following,) = struct.unpack_from("<Q", content, end + 8)
            if following - offset > size:
                break
            end = following
        return content[offset:end]

    def _listed(self, _node: int, body: bytes) -> bytes:
        del self._listings[struct.unpack_from("<Q", body)[0]]
        return b""


@contextmanager
def folder_seen_from(nodes: Sequence[Node], folder: Path, place: Path, *options: str) -> Iterator[None]:
    """Each node sees a folder at a place by a view of its own, until the end."""
    program = [sys.executable, "-S", str(Path(__file__).resolve()), str(folder), str(place), *options]
    views = [node.exec(program) for node in nodes]
    try:
        for view in views:
            view.expect("mounted", 60.0)
        yield
    finally:
        for node, view in zip(nodes, views, strict=True):
            node.exec(["umount", "--lazy", str(place)]).wait(60.0)
            view.kill()


def why_no_views() -> str | None:
    """Why nodes can have no views of folders; None where they can."""
    return None if Path("/dev/fuse").exists() else "views of folders need /dev/fuse"


def _attributes_of(status: os.stat_result) -> bytes:
    times = [status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns]
    return _ATTRIBUTES.pack(
        *(status.st_ino, status.st_size, status.st_blocks),
        *(moment // 10**9 for moment in times),
        *(moment % 10**9 for moment in times),
        *(status.st_mode, status.st_nlink, status.st_uid, status.st_gid, status.st_rdev, status.st_blksize, 0),
    )


def _refusals(text: str) -> dict[str, int]:
    pairs = (word.split("=") for word in text.split(",") if word)
    return {name: getattr(errno, number) for name, number in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("mount", type=Path)
    parser.add_argument("--late", type=float, default=0.0, help="seconds that each operation takes more")
    parser.add_argument("--remember", type=float, default=0.0, help="seconds for which names and attributes are kept")
    parser.add_argument("--refuse", type=_refusals, default={}, help="what is not done: replace=EEXIST,link=EPERM")
    parser.add_argument("--when", default="", help="the name of the file with which this begins; from the start")
    parser.add_argument("--run", default="", help="a command that is run then")
    arguments = parser.parse_args()
    view = View(
        arguments.folder,
        late_s=arguments.late,
        remember_s=arguments.remember,
        refusals=arguments.refuse,
        when=arguments.when,
        command=arguments.run,
    )
    view.mount(arguments.mount)
    print("mounted", flush=True)
    view.serve()


if __name__ == "__main__":
    main()
