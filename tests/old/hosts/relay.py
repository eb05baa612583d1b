"""A cable that loses, repeats, delays and reorders packets, or carries them one way only.

    with relay_at(cluster, cluster.nodes[1]) as relay:
        relay.behave(loss=0.01)

It takes the place of the cable between a node and the switch: a process beside the switch copies frames from a packet
socket at one end to one at the other, in user space, because not every kernel has `tc netem`.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import random
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.kit.nodes.cluster import INTERFACE, Cluster, Node, bridge_of

_NODE_END, _SWITCH_END = "cable", "plug"
_ALL_PROTOCOLS = 0x0003
# linux/if_packet.h. With the header of virtio, checksums and segments that a sender left to its card stay left to it.
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_LONGEST_FRAME = 2**17
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Trouble:
    """What happens to frames; fractions of all of them."""

    loss: float = 0.0
    duplicates: float = 0.0
    late: float = 0.0
    """Those that arrive `delay_s` later than the others, and so in another order."""
    delay_s: float = 0.02
    drops_from_node: bool = False
    """Nothing that the node sends arrives; what is sent to it does."""
    drops_to_node: bool = False


NO_TROUBLE = Trouble()


class Relay:
    """A relay that runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def behave(self, trouble: Trouble = NO_TROUBLE) -> None:
        """From when this returns on, frames fare so; without an argument, all arrive."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(trouble)) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer == "changed\n", answer


@contextlib.contextmanager
def relay_at(cluster: Cluster, node: Node) -> Iterator[Relay]:
    """Put a relay into the cable of `node`, until the end."""
    switch = cluster.switch
    # One packet a frame, so that a fraction of the frames is one of the packets.
    node.limit_segments()
    switch.configure(
        "ip",
        [
            f"link add {_NODE_END} type veth peer name {_SWITCH_END}",
            f"link set dev {_SWITCH_END} master {bridge_of(INTERFACE)} gso_max_segs 1 up",
            f"link set dev {_NODE_END} up",
            f"link set dev {node.port} nomaster",
        ],
    )
    command = ["nsenter", f"--net=/proc/{switch.pid}/ns/net", sys.executable, "-m", __name__, node.port, _NODE_END]
    root = Path(__file__).parents[3]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
    try:
        relay = Relay(process)
        relay.behave()
        yield relay
    finally:
        process.kill()
        process.communicate(timeout=_TIMEOUT_S)
        switch.configure(
            "ip", [f"link set dev {node.port} master {bridge_of(INTERFACE)}", f"link delete dev {_NODE_END}"]
        )


def _copy(node_end: str, switch_end: str) -> None:
    """Copy frames in both directions until standard input ends; each line of it is a `Trouble`."""
    ends = [_open(node_end), _open(switch_end)]
    chance, trouble = random.Random(0), NO_TROUBLE
    waiting: list[tuple[float, int, int, bytes]] = []  # (when, a number, to which end, the frame)
    number = 0
    while True:
        wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([sys.stdin, *ends], [], [], wait_s)
        if sys.stdin in ready:
            line = sys.stdin.readline()
            if not line:
                return
            trouble = Trouble(**json.loads(line))
            print("changed", flush=True)
        for source, end in enumerate(ends):
            if end not in ready:
                continue
            frame = end.recv(_LONGEST_FRAME)
            if (trouble.drops_from_node, trouble.drops_to_node)[source] or chance.random() < trouble.loss:
                continue
            for _ in range(1 + (chance.random() < trouble.duplicates)):
                number += 1
                delay_s = trouble.delay_s if chance.random() < trouble.late else 0.0
                heapq.heappush(waiting, (time.monotonic() + delay_s, number, 1 - source, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # a link that is down, or a queue that is full, loses the frame
                ends[target].send(frame)


def _open(interface: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    end.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    end.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**24)
    end.bind((interface, _ALL_PROTOCOLS))
    return end


if __name__ == "__main__":
    _copy(*sys.argv[1:])
