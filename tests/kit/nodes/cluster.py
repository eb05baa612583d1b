"""Nodes on one machine: namespaces for machines, a bridge for a switch, shaped links between them.

    with Cluster(num_nodes=2, rate_bits_per_s=200e6) as cluster:
        outputs = run_on_nodes(cluster, [2, 2], ["-m", "my_program"], timeout_s=60)
        cluster.nodes[0].bytes_sent()

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

from paceline.launch.worker import PR_SET_PDEATHSIG

INTERFACE = "eth0"
"""What a node calls its end of its link, the first if it has several: eth0, eth1, …"""

MASTER_PORT = 29500

_BOOT_TIMEOUT_S = 60.0
_MAX_NUM_NODES = 200
_COMMANDS = ("unshare", "nsenter", "ip", "tc", "mount")

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
tc qdisc add dev left root tbf rate 1mbit burst 66kb latency 50ms
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
    """`num_nodes` nodes on one switch, each by a link of `rate_bits_per_s` in either direction.

    With several links every node has one to each of as many switches, which are networks of their own.
    """

    def __init__(self, num_nodes: int, rate_bits_per_s: float, num_links: int = 1) -> None:
        assert 1 <= num_nodes <= _MAX_NUM_NODES
        self._rate_bits_per_s = rate_bits_per_s
        self.interfaces = tuple(f"eth{number}" for number in range(num_links))
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
        for interface in self.interfaces:
            bridge = bridge_of(interface)
            self._switch.configure("ip", [f"link add {bridge} type bridge", f"link set dev {bridge} up"])
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

    def set_rate(self, bits_per_s: float) -> None:
        """Give every link another rate; what is under way stays under way."""
        self._rate_bits_per_s = bits_per_s
        for node in self.nodes:
            if node.is_up:
                node.shape_link()

    @property
    def rate_bits_per_s(self) -> float:
        return self._rate_bits_per_s

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
        self.port = self._port(INTERFACE)
        """What the switch calls its end of the first link."""
        self._first: FirstProcess | None = None
        self._processes: list[NodeProcess] = []
        # A crashed node's network namespace, held open so that the kernel answers for the dead.
        self._remains: int | None = None

    @property
    def is_up(self) -> bool:
        return self._first is not None

    @property
    def init_pid(self) -> int:
        """The node's first process, as this machine counts processes."""
        return self._running().pid

    def boot(self) -> None:
        """Start the node, after `crash` and `power_off` too; its disk is this machine's, its /dev/shm empty."""
        assert self._first is None, f"{self.hostname} is up"
        if self._remains is not None:
            self._take_link()
            self._forget_remains()
        self._first = FirstProcess(
            ["--net", "--uts", "--mount", "--pid", "--ipc"], _NODE_SCRIPT, self.hostname, self._hosts
        )
        for interface in self._cluster.interfaces:
            self._plug_in(interface)
        self.shape_link()

    def _plug_in(self, interface: str) -> None:
        """Give the node a link between this interface and its switch."""
        first, network = self._running(), int(interface.removeprefix("eth"))
        # The same hardware address after every boot: the others remember it.
        node_end = f"name {interface} address 02:00:00:00:{network:02x}:{self._index + 1:02x} netns {first.pid}"
        port, bridge = self._port(interface), bridge_of(interface)
        self._cluster.switch.configure(
            "ip", [f"link add {port} type veth peer {node_end}", f"link set dev {port} master {bridge} up"]
        )
        # The route chooses cubic: bbr, some kernels' default, loses a tenth in a token bucket.
        congestion = "congctl cubic" if "cubic" in _congestion_controls() else ""
        first.configure(
            "ip",
            [
                "link set dev lo up",
                f"address add {_address(self._index, network)}/24 dev {interface} noprefixroute",
                f"link set dev {interface} up",
                f"route add {_subnet(network)}.0/24 dev {interface} src {_address(self._index, network)} {congestion}",
            ],
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

    def configure(self, tool: str, commands: Sequence[str]) -> None:
        """Run commands of `ip` or `tc` on the node."""
        self._running().configure(tool, commands)

    def link_down(self, interface: str = INTERFACE) -> None:
        """Cut the cable at the switch: nobody is told, packets are lost."""
        self._running()
        self._cluster.switch.configure("ip", [f"link set dev {self._port(interface)} down"])

    def link_up(self, interface: str = INTERFACE) -> None:
        self._running()
        self._cluster.switch.configure("ip", [f"link set dev {self._port(interface)} up"])

    def limit_segments(self) -> None:
        """Send no frame of several packets, such as network cards divide."""
        self._running().configure("ip", [f"link set dev {INTERFACE} gso_max_segs 1"])

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

    def bytes_sent(self) -> int:
        """Bytes that left through the node's link since boot, headers included."""
        return self._interface_counters()[8]

    def bytes_received(self) -> int:
        """Bytes that came through the node's link since boot, headers included."""
        return self._interface_counters()[0]

    def _interface_counters(self) -> list[int]:
        """The sixteen columns of /proc/net/dev: eight for what came in, eight for what went out."""
        for line in Path(f"/proc/{self._running().pid}/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == INTERFACE:
                return [int(counter) for counter in counters.split()]
        raise RuntimeError(f"{self.hostname} has no interface {INTERFACE}")

    def shape_link(self) -> None:
        """A token bucket at both ends: one shapes what the node sends, the other what it receives."""
        rate_bits_per_s = self._cluster.rate_bits_per_s
        # At least 1 ms of the line, and a whole segmentation-offload packet of 64 KiB.
        burst_bytes = max(round(rate_bits_per_s / 8 * 1e-3), 66_000)
        bucket = f"root tbf rate {round(rate_bits_per_s)}bit burst {burst_bytes}b latency 50ms"
        for interface in self._cluster.interfaces:
            self._running().configure("tc", [f"qdisc replace dev {interface} {bucket}"])
            self._cluster.switch.configure("tc", [f"qdisc replace dev {self._port(interface)} {bucket}"])

    def _port(self, interface: str) -> str:
        """What the switch calls its end of a link."""
        return f"port{self._index}-{interface}"

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
        self._cluster.switch.configure(
            "ip", [f"link delete dev {self._port(interface)}" for interface in self._cluster.interfaces]
        )


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

    def configure(self, tool: str, commands: Sequence[str]) -> None:
        """Run commands of `ip` or `tc` in the network namespace."""
        done = subprocess.run(
            ["nsenter", f"--net=/proc/{self.pid}/ns/net", tool, "-batch", "-"],
            input="\n".join(commands),
            capture_output=True,
            text=True,
            timeout=_BOOT_TIMEOUT_S,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{tool}: {done.stderr.strip()}\n" + "\n".join(commands))

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


def places_of(cluster: Cluster, workers_per_node: Sequence[int]) -> list[tuple[Node, dict[str, str]]]:
    """Each rank's node and variables, where node i has `workers_per_node[i]` workers.

    Ranks count through the nodes in order and meet on the first node that has a worker by `env://`.
    """
    assert len(workers_per_node) <= len(cluster.nodes)
    shares = list(zip(cluster.nodes, workers_per_node, strict=False))
    places = [(node, local, num) for node, num in shares for local in range(num)]
    return [
        (
            node,
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(num_local),
                "MASTER_ADDR": places[0][0].hostname,
                "MASTER_PORT": str(MASTER_PORT),
                "GLOO_SOCKET_IFNAME": ",".join(cluster.interfaces),
                "TP_SOCKET_IFNAME": INTERFACE,
                "OMP_NUM_THREADS": "1",
                "PACELINE_DEVICE": "cpu",
            },
        )
        for rank, (node, local_rank, num_local) in enumerate(places)
    ]


def run_on_nodes(
    cluster: Cluster,
    workers_per_node: Sequence[int],
    program: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> list[str]:
    """Run `python *program` as one group of workers, and return what each rank wrote to standard output.

    They are placed as `places_of` says; `env` wins over every variable that is set there.

    Raises:
        AssertionError: workers failed; the text is the standard error of those that did first. The others are killed.
        TimeoutError: workers still ran after `timeout_s`, and were killed.
    """
    places = places_of(cluster, workers_per_node)
    deadline = time.monotonic() + timeout_s
    workers: list[NodeProcess] = []
    try:
        for node, variables in places:
            workers.append(node.exec([sys.executable, *program], env={**variables, **(env or {})}, cwd=cwd))
        _wait_for_all(workers, [node.hostname for node, _ in places], deadline)
        return [worker.stdout for worker in workers]
    finally:
        for worker in workers:
            worker.kill()


def _wait_for_all(workers: Sequence[NodeProcess], hostnames: Sequence[str], deadline: float) -> None:
    """Until all have ended well. Raises what `run_on_nodes` says."""
    running = {os.pidfd_open(worker.pid): rank for rank, worker in enumerate(workers)}
    try:
        while running:
            ended, _, _ = select.select(list(running), [], [], max(0.0, deadline - time.monotonic()))
            if not ended:
                raise TimeoutError(
                    "no end of "
                    + "\n".join(f"rank {rank} ({hostnames[rank]}): {workers[rank].stderr}" for rank in running.values())
                )
            failures = []
            for pidfd in sorted(ended, key=running.__getitem__):
                rank = running.pop(pidfd)
                os.close(pidfd)
                if code := workers[rank].wait(_BOOT_TIMEOUT_S):
                    failures.append(f"rank {rank} ({hostnames[rank]}) exited with {code}\n{workers[rank].stderr}")
            if failures:
                raise AssertionError("\n".join(failures))
    finally:
        for pidfd in running:
            os.close(pidfd)


def move_to(pid: int) -> None:
    """Have this process, of one thread, and its children live on the node of the process `pid`.

    Only of the node's process ids has this process none.
    """
    pidfd = os.pidfd_open(pid)
    _join(pidfd, _CLONE_NEWPID | _CLONE_ALL_BUT_PID)
    os.close(pidfd)


def fork_on(init_pid: int) -> int:
    """os.fork() whose child lives on the node with this first process; the parent stands there too (`move_to`)."""
    move_to(init_pid)
    child = os.fork()
    if child == 0 and _libc().prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        os._exit(1)
    return child


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


def _subnet(network: int) -> str:
    return f"10.{77 + network}.0"


def _address(index: int, network: int = 0) -> str:
    return f"{_subnet(network)}.{index + 1}"


def bridge_of(interface: str) -> str:
    """What carries the network of all interfaces of this name."""
    return f"switch-{interface}"


def _congestion_controls() -> list[str]:
    return Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()


def _read_all(file: IO[bytes]) -> str:
    # By position: the program on the other side writes through the same file offset.
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")
