"""The heartbeat thread of a worker: it shows that the interpreter runs, and which collective torch is in."""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from paceline.heartbeat import Heartbeat

INTERVAL_S = 0.25


def start_heartbeats(path: Path) -> None:
    """Write heartbeats until the program ends."""
    heartbeat, ended = Heartbeat(path), threading.Event()
    heartbeat.beat()  # from now on the launcher passes requests to save on
    began_at = BeganAt()

    def run() -> None:
        while not ended.wait(INTERVAL_S):
            heartbeat.beat()
            _show_collective(heartbeat, began_at)

    thread = threading.Thread(target=run, name="paceline-heartbeat", daemon=True)
    thread.start()

    # An interpreter that ends while a thread of it is in torch may abort the process.
    def stop() -> None:
        ended.set()
        thread.join(1.0)
        heartbeat.leave("torch")  # the last heartbeat may show a collective that has completed since

    atexit.register(stop)


class BeganAt:
    """When the first unfinished collective began, on the monotonic clock, whatever happens to the clock on the wall.

    Torch's recorder knows only the time on the wall, which may jump by years.
    """

    def __init__(self) -> None:
        self._key: object = None
        self._began_at = 0.0
        self._looked_at = time.monotonic()

    def of(self, key: object, created_s: float) -> float:
        """
        Args:
            key: identifies the collective.
            created_s: when it began, in seconds since the epoch.
        """
        now = time.monotonic()
        if key != self._key:  # it was not the first unfinished one at the last look
            self._key = key
            self._began_at = min(now, max(self._looked_at, now - (time.time() - created_s)))
        self._looked_at = now
        return self._began_at

    def nothing(self) -> None:
        """There is no unfinished collective."""
        self._key, self._looked_at = None, time.monotonic()


def _show_collective(heartbeat: Heartbeat, began_at: BeganAt) -> None:
    """The last collectives in torch's flight recorder. It does not record point-to-point messages on Gloo."""
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is None or not getattr(torch_distributed, "is_initialized", bool)():
        return
    recorder: Any = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(recorder, "_dump_fr_trace_json", None)
    if dump is None:
        return
    entries = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    unfinished = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
    if unfinished:
        first = unfinished[0]
        since = began_at.of((first["record_id"], first["time_created_ns"]), first["time_created_ns"] / 1e9)
        heartbeat.enter("torch", describe(first), since=since)
        return
    began_at.nothing()
    if entries:
        heartbeat.enter("torch", describe(entries[-1]))
        heartbeat.leave("torch")


def describe(entry: dict[str, Any]) -> str:
    """An entry of the flight recorder as text, such as "all_reduce number 12 of group default_pg (25600 Float)"."""
    operation = str(entry["profiling_name"]).rpartition(":")[2]
    shapes = ", ".join(
        f"{'x'.join(map(str, size)) or 'one'} {dtype}"
        for size, dtype in zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
    )
    number_of_group, description = entry["process_group"]
    group = description if description not in ("", "undefined") else number_of_group
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    return f"{operation} number {number} of group {group}" + (f" ({shapes})" if shapes else "")
