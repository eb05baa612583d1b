"""What other tests rely on when they say node, link, crash: separate nodes, slow links, no remains."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kit.nodes.cluster import Cluster, Node, NodeProcess, run_on_nodes

pytestmark = pytest.mark.hosts

RATE_BITS_PER_S = 200e6
BURST_BYTES = 66_000
TIMEOUT_S = 60.0

SERVE = """
import socket, sys
listener = socket.create_server(("", 5000))
print("listening", flush=True)
peers = []
for _ in range(int(sys.argv[1])):
    peers.append(listener.accept()[0])
"""

ECHO = (
    SERVE
    + """
while data := peers[0].recv(100):
    peers[0].sendall(data)
"""
)

RECEIVE = (
    SERVE
    + """
import select, time
start, total = None, 0
while peers:
    for peer in select.select(peers, [], [])[0]:
        start = start or time.monotonic()
        size = len(peer.recv(1 << 20))
        total += size
        if not size:
            peers.remove(peer)
print(total, time.monotonic() - start)
"""
)

# All connections are open before the first byte leaves; the bytes go to all peers in turn.
SEND = """
import socket, sys
peers = [socket.create_connection((name, 5000), timeout=10) for name in sys.argv[2:]]
left = int(sys.argv[1])
while left:
    size = min(left, 1 << 16)
    for peer in peers:
        peer.sendall(bytes(size))
    left -= size
"""

# Reads from a silent server, says what it notices: nothing, or the end.
WATCH = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 5000), timeout=10)
peer.settimeout(0.3)
print("connected", flush=True)
while True:
    try:
        peer.recv(1)
    except TimeoutError:
        print("nothing", flush=True)
    except ConnectionResetError:
        break
    else:
        break
print("noticed", flush=True)
"""

# Writes now and then, never reads.
DRIP = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 5000), timeout=10)
while True:
    peer.sendall(b".")
    print("sent", flush=True)
    time.sleep(0.02)
"""

# Sends a byte and hopes for its echo, again and again.
PING = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 5000), timeout=10)
peer.settimeout(0.3)
while True:
    try:
        peer.sendall(b".")
        peer.recv(1)
    except TimeoutError:
        print("silence", flush=True)
    else:
        print("answer", flush=True)
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(num_nodes=3, rate_bits_per_s=RATE_BITS_PER_S) as nodes:
        yield nodes


def python(node: Node, source: str, *args: str) -> NodeProcess:
    return node.exec([sys.executable, "-I", "-S", "-c", source, *args])


def serve(node: Node, source: str, num_peers: int = 1) -> NodeProcess:
    server = python(node, source, str(num_peers))
    server.expect("listening", TIMEOUT_S)
    return server


def shell(node: Node, command: str) -> str:
    process = node.exec(["sh", "-c", command])
    assert process.wait(TIMEOUT_S) == 0, process.output
    return process.stdout


# Separate machines


def test_nodes_have_their_own_name_memory_processes_and_interfaces(cluster: Cluster) -> None:
    assert [shell(node, "cat /proc/sys/kernel/hostname").strip() for node in cluster.nodes] == [
        "node0",
        "node1",
        "node2",
    ]
    shell(cluster.nodes[0], "echo mine > /dev/shm/paceline-hosts-test")
    assert [shell(node, "ls /dev/shm").split() for node in cluster.nodes] == [["paceline-hosts-test"], [], []]
    assert not Path("/dev/shm/paceline-hosts-test").exists()
    assert shell(cluster.nodes[1], "ls /sys/class/net").split() == ["eth0", "lo"]
    assert shell(cluster.nodes[1], "cat /proc/1/comm").strip() == "cat"
    assert not Path(f"/proc/{cluster.nodes[1].init_pid}/root/proc/{os.getpid()}").exists()


def test_environment_and_folder_reach_the_program(cluster: Cluster, tmp_path: Path) -> None:
    process = cluster.nodes[0].exec(["sh", "-c", "echo $ANSWER; pwd; exit 7"], env={"ANSWER": "42"}, cwd=tmp_path)
    assert process.wait(TIMEOUT_S) == 7
    assert process.stdout.split() == ["42", str(tmp_path)]


def test_unknown_program_fails_at_once(cluster: Cluster) -> None:
    with pytest.raises(FileNotFoundError):
        cluster.nodes[0].exec(["paceline-no-such-program"])


@pytest.mark.skipif(not Path("/etc/resolv.conf").exists(), reason="nothing to lay a name server's address over")
def test_unknown_name_asks_no_name_server(cluster: Cluster) -> None:
    node = cluster.nodes[2]
    shell(node, "echo nameserver 10.77.0.250 > /run/resolv.conf; mount --bind /run/resolv.conf /etc/resolv.conf")
    lookup = python(
        node,
        "import socket, time\n"
        "start = time.monotonic()\n"
        "try: socket.getaddrinfo('no-such-node.example', 1)\n"
        "except socket.gaierror: print(time.monotonic() - start)\n",
    )
    assert lookup.wait(3 * TIMEOUT_S) == 0, lookup.output
    assert float(lookup.stdout) < 2  # a name server that nobody reaches costs 3 at least


def test_nodes_reach_each_other_by_name(cluster: Cluster) -> None:
    for server, client in zip(cluster.nodes, [*cluster.nodes[1:], cluster.nodes[0]], strict=True):
        echo = serve(server, ECHO)
        ping = python(client, PING, server.hostname)
        ping.expect("answer", TIMEOUT_S)
        ping.kill()
        assert echo.wait(TIMEOUT_S) == 0


def test_signals_reach_the_program(cluster: Cluster) -> None:
    ticker = python(cluster.nodes[0], "import time\nwhile True:\n    print('tick', flush=True)\n    time.sleep(0.01)\n")
    ticker.expect("tick", TIMEOUT_S)
    ticker.signal(signal.SIGSTOP)
    os.waitid(os.P_PID, ticker.pid, os.WSTOPPED | os.WNOWAIT)
    stopped_at = ticker.stdout
    with pytest.raises(TimeoutError):
        ticker.wait(0.2)
    assert ticker.stdout == stopped_at
    ticker.signal(signal.SIGCONT)
    while ticker.stdout == stopped_at:
        ticker.expect("tick", TIMEOUT_S)
    ticker.signal(signal.SIGTERM)
    assert ticker.wait(TIMEOUT_S) == -signal.SIGTERM


# Links


def test_transfer_moves_its_bytes_over_both_links_no_faster_than_the_rate(cluster: Cluster) -> None:
    sender, receiver, _ = cluster.nodes
    num_bytes = 20_000_000
    before = [(node.bytes_sent(), node.bytes_received()) for node in cluster.nodes]
    seconds = transfer([sender], [receiver], num_bytes)
    (sent, _), (_, received), idle = (
        (node.bytes_sent() - was_sent, node.bytes_received() - was_received)
        for node, (was_sent, was_received) in zip(cluster.nodes, before, strict=True)
    )
    assert num_bytes <= sent <= 1.07 * num_bytes
    assert num_bytes <= received <= 1.07 * num_bytes
    assert max(idle) < 0.01 * num_bytes
    assert seconds >= fastest_s(num_bytes, RATE_BITS_PER_S)


def test_each_direction_of_a_link_has_its_own_limit(cluster: Cluster) -> None:
    first, second, third = cluster.nodes
    # One link carries twice what each of the two others do.
    assert transfer([first], [second, third], 5_000_000) >= fastest_s(10_000_000, RATE_BITS_PER_S)
    assert transfer([second, third], [first], 5_000_000) >= fastest_s(10_000_000, RATE_BITS_PER_S)


def test_rate_can_be_changed(cluster: Cluster) -> None:
    first, second, _ = cluster.nodes
    cluster.set_rate(RATE_BITS_PER_S / 4)
    slowly_s = fastest_s(5_000_000, RATE_BITS_PER_S / 4)
    try:
        assert transfer([first], [second], 5_000_000) >= slowly_s
    finally:
        cluster.set_rate(RATE_BITS_PER_S)
    # On a busy machine programs take their time too, but not each time.
    assert min(transfer([first], [second], 5_000_000) for _ in range(3)) < slowly_s


def transfer(senders: list[Node], receivers: list[Node], num_bytes: int) -> float:
    """Seconds until `num_bytes` have arrived on every connection between senders and receivers: the last one's."""
    servers = [serve(node, RECEIVE, len(senders)) for node in receivers]
    for node in senders:
        python(node, SEND, str(num_bytes), *(receiver.hostname for receiver in receivers))
    for server in servers:
        assert server.wait(3 * TIMEOUT_S) == 0, server.output
    totals, seconds = zip(*(server.stdout.split()[1:] for server in servers), strict=True)
    assert [int(total) for total in totals] == [num_bytes * len(senders)] * len(receivers)
    return max(map(float, seconds))


def fastest_s(num_bytes: int, rate_bits_per_s: float) -> float:
    """No transfer through a link takes less; what a full token bucket lets through at once comes on top."""
    return (num_bytes - 2 * BURST_BYTES) * 8 / rate_bits_per_s


def test_cut_link_is_silent_and_goes_on_when_restored(cluster: Cluster) -> None:
    server, client, _ = cluster.nodes
    serve(server, ECHO)
    ping = python(client, PING, server.hostname)
    ping.expect("answer", TIMEOUT_S)
    server.link_down()
    ping.expect("silence", TIMEOUT_S)
    server.link_up()
    ping.expect("answer", TIMEOUT_S)
    ping.kill()


# Faults


def test_crash_is_noticed_and_power_off_is_not() -> None:
    with Cluster(num_nodes=3, rate_bits_per_s=RATE_BITS_PER_S) as cluster:
        crashing, fading, watcher = cluster.nodes
        servers = [serve(crashing, SERVE + "listener.accept()"), serve(fading, SERVE + "listener.accept()")]
        of_crash, of_fading = (python(watcher, WATCH, node.hostname) for node in (crashing, fading))
        of_crash.expect("connected", TIMEOUT_S)
        of_fading.expect("connected", TIMEOUT_S)

        crashing.crash()
        fading.power_off()
        assert not any(server.is_running for server in servers)
        of_crash.expect("noticed", TIMEOUT_S)
        # The first may have begun before the fault; a second one is a wait with the node gone.
        for _ in range(2):
            of_fading.expect("nothing", TIMEOUT_S)
        assert "noticed" not in of_fading.stdout
        assert [node.is_up for node in cluster.nodes] == [False, False, True]
        with pytest.raises(RuntimeError, match="node0 is off"):
            crashing.exec(["true"])

        for node in (crashing, fading):
            node.boot()
            assert node.bytes_sent() < 10_000
            assert shell(node, "cat /proc/sys/kernel/hostname").strip() == node.hostname
            serve(node, ECHO)
            python(watcher, PING, node.hostname).expect("answer", TIMEOUT_S)


def test_writers_notice_a_crash_too() -> None:
    with Cluster(num_nodes=2, rate_bits_per_s=RATE_BITS_PER_S) as cluster:
        receiver, sender = cluster.nodes
        serve(receiver, RECEIVE)
        writer = python(sender, DRIP, receiver.hostname)
        writer.expect("sent", TIMEOUT_S)
        receiver.crash()
        assert writer.wait(TIMEOUT_S) == 1
        assert "ConnectionResetError" in writer.stderr or "BrokenPipeError" in writer.stderr


# Workers


def test_workers_of_uneven_nodes_are_one_group(cluster: Cluster) -> None:
    program = """
import datetime, socket, torch, torch.distributed as dist
from paceline.env import worker_facts
facts = worker_facts()
dist.init_process_group(
    "gloo",
    init_method=facts.init_method,
    rank=facts.rank,
    world_size=facts.world_size,
    timeout=datetime.timedelta(seconds=30),
)
total = torch.tensor(10.0 ** facts.rank)
dist.all_reduce(total)
print(socket.gethostname(), facts.local_rank, facts.local_world_size, int(total))
dist.destroy_process_group()
"""
    outputs = run_on_nodes(cluster, [2, 0, 1], ["-c", program], timeout_s=60)
    assert [output.split() for output in outputs] == [
        ["node0", "0", "2", "111"],
        ["node0", "1", "2", "111"],
        ["node2", "0", "1", "111"],
    ]


def test_failure_of_a_worker_is_told_and_ends_the_others(cluster: Cluster) -> None:
    program = "import os, time\nif os.environ['RANK'] == '1': raise ValueError('the reason')\ntime.sleep(1000)\n"
    with pytest.raises(AssertionError, match=r"(?s)^rank 1 \(node1\) exited with 1\n.*ValueError: the reason"):
        run_on_nodes(cluster, [1, 1], ["-S", "-c", program], timeout_s=TIMEOUT_S)
    assert num_running(cluster, program) == 0


def test_workers_are_killed_at_the_timeout(cluster: Cluster) -> None:
    program = "import os, time\nif os.environ['RANK'] != '0': time.sleep(1000)\n"
    with pytest.raises(TimeoutError, match=r"(?s)^no end of .*rank 1 \(node1\)"):
        run_on_nodes(cluster, [1, 1], ["-S", "-c", program], timeout_s=0.5)
    assert num_running(cluster, program) == 0


def num_running(cluster: Cluster, program: str) -> int:
    return sum(shell(node, "cat /proc/[0-9]*/cmdline").count(program) for node in cluster.nodes)


# Nothing left behind


def test_nothing_is_left_of_a_cluster() -> None:
    interfaces, children = interfaces_here(), own_children()
    at_end = ExitStack()
    with Cluster(num_nodes=3, rate_bits_per_s=RATE_BITS_PER_S) as cluster:
        namespaces = namespaces_of(node.init_pid for node in cluster.nodes)
        assert len(namespaces) == 3 * 5
        for node in cluster.nodes:  # or another test's new node may get the same numbers
            for link in Path(f"/proc/{node.init_pid}/ns").iterdir():
                at_end.enter_context(link.open())
        for node in cluster.nodes:
            serve(node, SERVE)
        # One in a session of its own with an orphan, one stopped: none escapes.
        cluster.nodes[0].exec(["setsid", "sh", "-c", "sleep 1000 & sleep 1000"])
        python(cluster.nodes[1], "while True: pass").signal(signal.SIGSTOP)
        cluster.nodes[2].crash()
        assert own_children() > children
        assert interfaces_here() == interfaces
        assert used_namespaces() & namespaces
    with at_end:
        assert own_children() == children
        assert interfaces_here() == interfaces
        assert not used_namespaces() & namespaces


def test_nothing_is_left_of_a_killed_owner() -> None:
    owner_source = """
import sys
from tests.kit.nodes.cluster import Cluster
with Cluster(num_nodes=2, rate_bits_per_s=200e6) as cluster:
    programs = [node.exec(["sh", "-c", "setsid sleep 1000 & exec sleep 1000"]) for node in cluster.nodes]
    firsts = [node.init_pid for node in cluster.nodes] + [cluster.switch.pid]
    print(*firsts, *(program.pid for program in programs), flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", owner_source],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        pidfds = []
        try:
            assert owner.stdout is not None
            pids = [int(word) for word in owner.stdout.readline().split()]
            assert len(pids) == 5
            namespaces = namespaces_of(pids[:2])
            pidfds = [os.pidfd_open(pid) for pid in [*pids, *map(parent_of, pids[:3])]]
            assert not select.select(pidfds, [], [], 0)[0]  # all alive
            owner.kill()
            for pidfd in pidfds:
                assert select.select([pidfd], [], [], TIMEOUT_S)[0]
            assert not used_namespaces() & namespaces
        finally:
            owner.kill()
            for pidfd in pidfds:
                os.close(pidfd)


def namespaces_of(pids: Iterator[int] | list[int]) -> set[str]:
    return {
        str(Path(f"/proc/{pid}/ns/{kind}").readlink()) for pid in pids for kind in ("net", "uts", "mnt", "pid", "ipc")
    }


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def used_namespaces() -> set[str]:
    """What the processes of this machine live in."""
    used = set()
    for link in Path("/proc").glob("[0-9]*/ns/*"):
        try:
            used.add(str(link.readlink()))
        except OSError:
            continue  # ended meanwhile, or a zombie
    return used


def interfaces_here() -> set[str]:
    return {interface.name for interface in Path("/sys/class/net").iterdir()}


def own_children() -> set[str]:
    """The processes that threads of this one have started, by id."""
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}
