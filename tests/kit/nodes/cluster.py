"""Nodes on one machine: namespaces for machines, a bridge for a switch, links between them.

    with Cluster(num_nodes=2) as cluster:
        process = cluster.nodes[0].exec(["my_program"])
        process.wait(timeout_s=60)

A node is a net, uts, mnt, pid and ipc namespace of its own, held by nothing but its first process: when that dies, the
kernel kills whatever runs in the node and takes the node away. The first process reads from a pipe that this process
holds, so it dies with this process however that ends. Nothing has a name on this machine and no file is written to it,
so nothing can be left behind.
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import IO

INTERFACE = "eth0"
"""What a node calls its end of its link."""
_BRIDGE = "switch"
_BOOT_TIMEOUT_S = 60.0
_COMMANDS = ("unshare", "nsenter", "ip", "mount")

# Flags of setns(2); the standard library has them from Python 3.12 on.
_CLONE_NEWNS = 0x00020000
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWNET = 0x40000000
_CLONE_ALL_BUT_PID = _CLONE_NEWNET | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWNS

# A name that no hosts file knows would otherwise be asked of name servers that nobody reaches, 5 s a time.
# Sockets that outlive a node powered off would keep its namespace for minutes if they tried on as by default.
# The old /proc tells this shell its process id outside; SIGCHLD ignored makes the kernel bury orphans.
_NODE_SCRIPT = """
set -e
read -r pid _ < /proc/self/stat
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
echo "$1" > /proc/sys/kernel/hostname
echo "$2" > /run/hosts
echo 'hosts: files' > /run/nsswitch.conf
mount --bind /run/hosts /etc/hosts
mount --bind /run/nsswitch.conf /etc/nsswitch.conf
echo 1 > /proc/sys/net/ipv4/tcp_orphan_retries
trap '' CHLD
echo "$pid"
exec cat > /dev/null
"""

_SWITCH_SCRIPT = """
read -r pid _ < /proc/self/stat
echo "$pid"
exec cat > /dev/null
"""

_PROBE_SCRIPT = """
set -e
mount -t tmpfs tmpfs /dev/shm
ip link add left type veth peer name right
ip link add switch type bridge
"""


@functools.cache
def why_not() -> str | None:
    """Why this machine cannot play a cluster; None where it can."""
    if sys.platform != "linux":
        return "clusters of namespaces need Linux"
    if os.geteuid() != 0:
        return "clusters of namespaces need root"
    if missing := [command for command in _COMMANDS if shutil.which(command) is None]:
        return f"clusters of namespaces need the commands {', '.join(missing)} (iproute2 and util-linux)"
    if not Path("/etc/nsswitch.conf").exists():
        return "clusters of namespaces need a file /etc/nsswitch.conf to lay their own over"
    probe = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--pid", "--ipc", "--fork", "sh", "-c", _PROBE_SCRIPT],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_BOOT_TIMEOUT_S,
    )
    if probe.returncode != 0:
        return f"the kernel lacks what clusters of namespaces need: {probe.stderr.strip()}"
    try:
        _come_home()
    except OSError as error:
        return f"clusters of namespaces need the right to enter them and to leave them again: {error}"
    return None


class Cluster:
    """`num_nodes` nodes on one switch."""

    def __init__(self, num_nodes: int) -> None:
        self._switch: FirstProcess | None = None
        hosts = "\n".join(["127.0.0.1 localhost", *(f"{_address(i)} {_hostname(i)}" for i in range(num_nodes))])
        self.nodes = tuple(Node(self, index, hosts) for index in range(num_nodes))

    def __enter__(self) -> Cluster:
        try:
            self.up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def up(self) -> None:
        """Boot the switch and all nodes."""
        self._switch = FirstProcess(["--net"], _SWITCH_SCRIPT)
        self._switch.configure([f"link add {_BRIDGE} type bridge", f"link set dev {_BRIDGE} up"])
        for node in self.nodes:
            node.boot()

    def down(self) -> None:
        """End all nodes and the switch; what ran on them is dead when this returns."""
        with ExitStack() as ends:
            if self._switch is not None:
                ends.callback(self._switch.end)
                self._switch = None
            for node in self.nodes:
                ends.callback(node.vanish)

    @property
    def switch(self) -> FirstProcess:
        if self._switch is None:
            raise RuntimeError("the cluster is down")
        return self._switch


class Node:
    """One machine of a cluster; `boot` gives it new namespaces and a new link every time."""

    def __init__(self, cluster: Cluster, index: int, hosts: str) -> None:
        self.hostname = _hostname(index)
        self.address = _address(index)
        self._cluster = cluster
        self._hosts = hosts
        self._index = index
        self._port = f"port{index}"
        """What the switch calls its end of the link."""
        self._first: FirstProcess | None = None
        self._processes: list[NodeProcess] = []
        # A crashed node's network namespace, held open so that the kernel answers for the dead.
        self._remains: int | None = None

    @property
    def is_up(self) -> bool:
        return self._first is not None

    def boot(self) -> None:
        """Start the node, after `crash` and `power_off` too; its disk is this machine's, its /dev/shm empty."""
        assert self._first is None, f"{self.hostname} is up"
        if self._remains is not None:
            self._take_link()
            self._forget_remains()
        self._first = FirstProcess(
            ["--net", "--uts", "--mount", "--pid", "--ipc"], _NODE_SCRIPT, self.hostname, self._hosts
        )
        # The same hardware address after every boot: the others remember it.
        node_end = f"name {INTERFACE} address 02:00:00:00:00:{self._index + 1:02x} netns {self._first.pid}"
        self._cluster.switch.configure(
            [f"link add {self._port} type veth peer {node_end}", f"link set dev {self._port} master {_BRIDGE} up"]
        )
        self._first.configure(
            ["link set dev lo up", f"address add {self.address}/24 dev {INTERFACE}", f"link set dev {INTERFACE} up"]
        )

    def exec(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> NodeProcess:
        """Start a program on the node, with this process's environment plus `env`, here or in `cwd`."""
        process = NodeProcess(self._running(), argv, {**os.environ, **(env or {})}, cwd or Path.cwd())
        self._processes = [other for other in self._processes if other.is_running] + [process]
        return process

    def commands(self) -> list[str]:
        """The command lines of all processes of the node, but for those that look."""
        listing = self.exec(
            ["sh", "-c", "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $f; echo; done 2> /dev/null"]
        )
        listing.wait(_BOOT_TIMEOUT_S)
        return [line.strip() for line in listing.stdout.splitlines() if line.strip()]

    def link_down(self) -> None:
        """Cut the cable at the switch: nobody is told, packets are lost."""
        self._running()
        self._cluster.switch.configure([f"link set dev {self._port} down"])

    def link_up(self) -> None:
        self._running()
        self._cluster.switch.configure([f"link set dev {self._port} up"])

    def crash(self) -> None:
        """Kill all that runs on the node while its link is up.

        The others notice at once: their reads end, and what they send from now on is answered by a reset.
        """
        first = self._running()
        self._remains = os.open(f"/proc/{first.pid}/ns/net", os.O_RDONLY)
        self._end()

    def power_off(self) -> None:
        """Take the node away without a word to anybody: its link goes before the first program dies."""
        self._running()
        self._take_link()
        self._end()

    def vanish(self) -> None:
        """End what is left of the node, in whatever state it is. Its link goes with it, a moment later."""
        if self._first is not None:
            self._end()
        self._forget_remains()

    def _running(self) -> FirstProcess:
        if self._first is None:
            raise RuntimeError(f"{self.hostname} is off")
        return self._first

    def _end(self) -> None:
        assert self._first is not None
        first, self._first = self._first, None
        first.end(reap=[process.reap for process in self._processes])
        self._processes.clear()

    def _forget_remains(self) -> None:
        if self._remains is not None:
            os.close(self._remains)
            self._remains = None

    def _take_link(self) -> None:
        self._cluster.switch.configure([f"link delete dev {self._port}"])


class NodeProcess:
    """A program on a node, from its start to its end; it ends with the node at the latest."""

    def __init__(self, first: FirstProcess, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        self.argv = tuple(argv)
        # Files without a name; a pipe would block a program that nobody reads.
        self._stdout = tempfile.TemporaryFile()  # noqa: SIM115
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self._num_expected = 0
        self._popen = first.start(argv, env, cwd, self._stdout, self._stderr)

    @property
    def pid(self) -> int:
        """Its process id as this machine counts; on the node it has another."""
        return self._popen.pid

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    @property
    def stdout(self) -> str:
        """What it has written to standard output so far."""
        return _read_all(self._stdout)

    @property
    def stderr(self) -> str:
        return _read_all(self._stderr)

    @property
    def output(self) -> str:
        """Both streams so far, one after the other."""
        return self.stdout + self.stderr

    def wait(self, timeout_s: float) -> int:
        """Its exit code, minus the signal's number if one killed it; `TimeoutError` leaves it running."""
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self} runs on after {timeout_s} s\n{self.output}") from None

    def expect(self, text: str, timeout_s: float) -> None:
        """Wait until standard output goes on with `text` somewhere after what was last expected."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = not self.is_running
            found = self.stdout.find(text, self._num_expected)
            if found >= 0:
                self._num_expected = found + len(text)
                return
            if ended:
                raise AssertionError(f"{self} ended without {text!r}\n{self.output}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self} has not written {text!r} after {timeout_s} s\n{self.output}")
            time.sleep(0.005)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the program alone: SIGSTOP hangs it, SIGKILL leaves its children to the node."""
        self._popen.send_signal(number)

    def kill(self) -> None:
        """Kill the program and its process group, and wait for its end."""
        # Once it is waited for, its number may belong to somebody else.
        if self._popen.returncode is None:
            os.killpg(self._popen.pid, signal.SIGKILL)
        self.reap()

    def reap(self) -> None:
        """Wait for the end of a program that is being killed."""
        self._popen.wait(_BOOT_TIMEOUT_S)

    def __str__(self) -> str:
        return f"{' '.join(self.argv)[:200]!r} (pid {self.pid})"


class FirstProcess:
    """The process that holds a set of namespaces: `cat` on a pipe whose other end is here."""

    def __init__(self, namespaces: Sequence[str], script: str, *args: str) -> None:
        with tempfile.TemporaryFile() as errors:
            self._popen = subprocess.Popen(
                ["unshare", *namespaces, "--fork", "--kill-child", "sh", "-c", script, "sh", *args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
            assert self._popen.stdout is not None
            with self._popen.stdout as stdout:
                readable, _, _ = select.select([stdout], [], [], _BOOT_TIMEOUT_S)
                line = stdout.readline() if readable else b""
            if not line:
                self._popen.kill()
                self._popen.communicate(timeout=_BOOT_TIMEOUT_S)
                raise RuntimeError(f"a node does not come up: {_read_all(errors).strip() or 'no answer'}")
        self.pid = int(line)
        self._pidfd = os.pidfd_open(self.pid)

    def configure(self, commands: Sequence[str]) -> None:
        """Run commands of `ip` in the network namespace."""
        done = subprocess.run(
            ["nsenter", f"--net=/proc/{self.pid}/ns/net", "ip", "-batch", "-"],
            input="\n".join(commands),
            capture_output=True,
            text=True,
            timeout=_BOOT_TIMEOUT_S,
        )
        if done.returncode != 0:
            raise RuntimeError(f"ip: {done.stderr.strip()}\n" + "\n".join(commands))

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, stdout: IO[bytes], stderr: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """A child of this process that lives in the namespaces of the first process."""

        def enter() -> None:
            _join(self._pidfd, _CLONE_ALL_BUT_PID)
            os.chdir(cwd)

        # A process never moves to another pid namespace: this thread's next children are born there.
        _join(self._pidfd, _CLONE_NEWPID)
        try:
            return subprocess.Popen(
                argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=enter,
            )
        finally:
            _come_home()

    def end(self, reap: Sequence[Callable[[], None]] = ()) -> None:
        """Kill it and with it all in its pid namespace; `reap` waits for those of them that this process started."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        # The first process is gone only when all others are, and ours stay as zombies until we ask for them.
        for wait in reap:
            wait()
        self._popen.communicate(timeout=_BOOT_TIMEOUT_S)
        os.close(self._pidfd)


def _join(pidfd: int, namespaces: int) -> None:
    """setns(2): move this thread to the given kinds of namespaces of another process."""
    if _libc().setns(pidfd, namespaces) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _come_home() -> None:
    """Have this thread's next children born beside it again."""
    own = os.pidfd_open(os.getpid())
    try:
        _join(own, _CLONE_NEWPID)
    finally:
        os.close(own)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _hostname(index: int) -> str:
    return f"node{index}"


def _address(index: int) -> str:
    return f"10.77.0.{index + 1}"


def _read_all(file: IO[bytes]) -> str:
    # By position: the program on the other side writes through the same file offset.
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")
