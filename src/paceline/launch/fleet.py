"""The nodes of an elastic run: those in use, lost ones, which are probed again, and slots that are left out."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.errors import LaunchError
from paceline.launch.remote_team import RemoteTeam, check_versions
from paceline.spec import Cluster, Node, Plan

RETRY_S = 3.0
"""Seconds between two attempts to reach a lost node; doubled each time that it is lost again."""
LONGEST_RETRY_S = 60.0
LEFT_OUT_S = 60.0
"""Seconds until a slot that was left out is tried again; doubled each time that it is left out again."""
LONGEST_LEFT_OUT_S = 3600.0
LOOK_S = 0.05
"""How often to check the results of other threads."""

Describe = Callable[[RemoteTeam], Node]
"""Makes the part of a node that the run may use from its agent's first message."""


@dataclass(frozen=True)
class WorkerSlot:
    """A place for one worker."""

    hostname: str
    """The name of the node as in the plan: empty for this node."""
    device: int
    """The index of the GPU; on CPU the local rank."""


def slots(plan: Plan) -> list[WorkerSlot]:
    """The slot of every rank."""
    return [
        WorkerSlot(share.hostname, share.devices[number] if share.devices else number)
        for share in plan.placements
        for number in range(share.num_workers)
    ]


class Fleet:
    """Keeps the nodes that can be used now; owns the agents of nodes that it reaches again."""

    def __init__(self, cluster: Cluster, teams: Sequence[RemoteTeam] = (), describe: Describe | None = None) -> None:
        """Start with all nodes of `cluster`, which `teams` reach; without `describe` no lost node is probed again."""
        self._whole = cluster
        self._describe = describe
        self._nodes = {_name(node): node for node in cluster.nodes}
        self._teams = {team.hostname: team for team in teams}
        self._num_losses: Counter[str] = Counter()
        self._left_out: list[tuple[WorkerSlot, float]] = []
        """Slots that are not used, and until when, on the monotonic clock in seconds."""
        self._num_left_out: Counter[WorkerSlot] = Counter()
        self._is_closing = threading.Event()
        self._lock = threading.Lock()
        self._first_retries: set[str] = set()
        """Lost nodes whose first probe has not ended."""
        self._returned: list[RemoteTeam] = []
        self._reopened: set[RemoteTeam] = set()
        """Agents that answer, or may, on nodes that were lost."""
        self._threads: list[threading.Thread] = []

    @property
    def cluster(self) -> Cluster:
        """The cluster of usable nodes, in the original order."""
        there = (self._usable(name) for name in map(_name, self._whole.nodes) if name in self._nodes)
        return replace(self._whole, nodes=tuple(node for node in there if node.devices))

    @property
    def teams(self) -> list[RemoteTeam]:
        return list(self._teams.values())

    @property
    def num_slots(self) -> int:
        return sum(not device.busy for device in self.cluster.devices)

    @property
    def has_returned(self) -> bool:
        """Whether a lost node, or a slot that was left out, can be used again."""
        if any(until <= time.monotonic() for _, until in self._left_out):
            return True
        with self._lock:
            return any(not team.is_gone for team in self._returned)

    @property
    def awaits_first_retry(self) -> bool:
        """Whether a node that was just lost may turn out to be up."""
        with self._lock:
            return bool(self._first_retries)

    def lose(self, hostname: str) -> None:
        """Mark a node as lost: it, or its agent, does not answer; from now on it is probed again."""
        team = self._teams.pop(hostname, None)
        if team is None:
            return
        del self._nodes[hostname]
        self._left_out = [one for one in self._left_out if one[0].hostname != hostname]
        team.close()
        self._try_again(team)

    def lose_unusable(self, newcomers: Sequence[str], wait_s: float) -> list[str]:
        """After a failed start, mark the unreachable nodes as lost; returns their names.

        Waits up to `wait_s` for one to be detected; if none is, the `newcomers` are marked.
        """
        deadline = time.monotonic() + wait_s
        while not (gone := [name for name, team in self._teams.items() if team.is_gone]):
            if time.monotonic() >= deadline:
                gone = [name for name in newcomers if name in self._teams]
                break
            time.sleep(LOOK_S)
        for name in gone:
            self.lose(name)
        return gone

    def leave_out(self, slot: WorkerSlot, for_good: bool = False) -> None:
        """Exclude a slot for a while, or for as long as its node stays in use."""
        if slot.hostname not in self._nodes:
            return
        pause_s = min(LEFT_OUT_S * 2 ** self._num_left_out[slot], LONGEST_LEFT_OUT_S)
        self._num_left_out[slot] += 1
        self._left_out.append((slot, math.inf if for_good else time.monotonic() + pause_s))

    def take_back(self) -> list[str]:
        """Use returned nodes again, and slots that were left out for long enough; returns the nodes' names."""
        self._left_out = [one for one in self._left_out if one[1] > time.monotonic()]
        with self._lock:
            returned, self._returned = self._returned, []
        names = []
        for team in returned:
            if team.is_gone:
                self._try_again(team)
                continue
            assert self._describe is not None
            self._teams[team.hostname] = team
            self._nodes[team.hostname] = self._describe(team)
            names.append(team.hostname)
        return names

    def close(self) -> None:
        self._is_closing.set()
        with self._lock:
            reopened = tuple(self._reopened)
        for team in reopened:
            team.close()  # ends a wait for its answer
        for thread in self._threads:
            thread.join()

    def _usable(self, name: str) -> Node:
        """The node without the slots that are left out."""
        node = self._nodes[name]
        left_out = [slot.device for slot, _ in self._left_out if slot.hostname == name]
        if node.device_kind == "cuda":
            devices = tuple(device for device in node.devices if device.index not in left_out)
        else:
            devices = node.devices[: max(0, len(node.devices) - len(left_out))]  # CPU devices are interchangeable
        return replace(node, devices=devices)

    def _try_again(self, lost: RemoteTeam) -> None:
        if self._describe is None:
            return
        name = lost.hostname
        self._num_losses[name] += 1
        pause_s = min(RETRY_S * 2 ** (self._num_losses[name] - 1), LONGEST_RETRY_S)
        self._first_retries.add(name)
        thread = threading.Thread(target=self._reach, args=(lost, pause_s), name=f"{name}-again", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _reach(self, lost: RemoteTeam, pause_s: float) -> None:
        lost.close()
        while not self._is_closing.is_set():
            reached = self._reached(lost)
            with self._lock:
                if reached is not None:
                    self._returned.append(reached)
                self._first_retries.discard(lost.hostname)
            if reached is not None or self._is_closing.wait(pause_s):
                return

    def _reached(self, lost: RemoteTeam) -> RemoteTeam | None:
        """A new agent on the node of `lost`; None if there can be none now."""
        try:
            team = RemoteTeam(lost.access)
        except LaunchError:
            return None
        with self._lock:
            self._reopened.add(team)
        if not self._is_closing.is_set():
            with contextlib.suppress(LaunchError):
                team.greet()
                check_versions(lost, team)
                return team
        team.close()
        with self._lock:
            self._reopened.discard(team)
        return None


def _name(node: Node) -> str:
    """The node's name as in plans."""
    return node.hostname if node.is_remote else ""
