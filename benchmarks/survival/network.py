"""A network that does not do as it should: a run on two nodes, and a relay in the cable of one of them.

    python -m benchmarks.survival.network [--only NAME,…] [--out DIR]

The trouble begins when the run has made a step, or before it starts, and lasts. Either the run ends with the weights of
one that nobody disturbed, bit for bit, or it ends within a bound of seconds with a named cause; started again without
trouble, it then ends with those weights. The exit code says whether that holds. Needs root and sshd.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.kit.nodes.cluster import Cluster, Node, NodeProcess
from tests.old.hosts.relay import NO_TROUBLE, Trouble, relay_at

from paceline.spec import RunRecord

from .runs import OnNode, SeveralNodes, train_for, wait_for_end, wait_for_steps

HANG_TIMEOUT = ("--hang-timeout", "20")
FAILURE_S = 90.0
"""A run that ends because of the trouble has ended so long after it began."""

SETTINGS = ("epochs=4", "eval_every_epochs=4")

_STRANGER = """
import random, socket, struct, sys, time
chance, until = random.Random(0), time.monotonic() + float(sys.argv[2])
key = b"default_pg/0//cpu//0/rank_0"
frames = [b"", chance.randbytes(64), b"GET / HTTP/1.0\\r\\n\\r\\n",
    b"\\0" + struct.pack("<I", 0x3C85F7CE) + b"\\1" + struct.pack("<Q", len(key)) + key + struct.pack("<Q", 3) + b"bad"]
while time.monotonic() < until:
    for port in range(32768, 61000):
        try:
            with socket.create_connection((sys.argv[1], port), timeout=1) as one:
                one.sendall(chance.choice(frames))
                print(port, flush=True)
        except OSError:
            pass
"""
"""Looks for ports of a node all the time, and sends to them noise and changes of a TCPStore."""

_JUMPING_CLOCK = """
import time
real, real_ns = time.time, time.time_ns
def offset_s():
    return (-1) ** int(time.monotonic() / 2) * 5 * 365 * 86400
time.time = lambda: real() + offset_s()
time.time_ns = lambda: real_ns() + offset_s() * 10**9
"""
"""A sitecustomize: every two seconds the clock on the wall goes ten years forward or back."""

_PYTHON = """\
#!/bin/sh
if [ "$(hostname)" != {hostname} ]; then exec {python} "$@"; fi
export PYTHONPATH={folder}:$PYTHONPATH
exec unshare --time --monotonic 90000000 --boottime 90000000 --fork --kill-child {python} "$@"
"""
"""An interpreter that on one node has clocks of its own; the monotonic one began years earlier."""


@dataclass(frozen=True)
class Case:
    """A way of the network, or of the clock of a node."""

    trouble: Trouble = NO_TROUBLE
    at_start: bool = False
    """Whether the trouble is there before the run, while nodes are reached and workers connect."""
    has_stranger: bool = False
    has_clock: bool = False


CASES = {
    "nothing": Case(),
    "1 % lost": Case(Trouble(loss=0.01), at_start=True),
    "10 % duplicated": Case(Trouble(duplicates=0.1), at_start=True),
    "10 % late by 20 ms and so reordered": Case(Trouble(late=0.1), at_start=True),
    "all late by 50 ms": Case(Trouble(late=1.0, delay_s=0.05), at_start=True),
    "lost and duplicated and reordered": Case(Trouble(loss=0.01, duplicates=0.05, late=0.05), at_start=True),
    "nothing arrives from a node": Case(Trouble(drops_from_node=True)),
    "nothing arrives at a node": Case(Trouble(drops_to_node=True)),
    "a stranger on the network": Case(at_start=True, has_stranger=True),
    "a clock that jumps": Case(has_clock=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases, such as '1 % lost'; all")
    parser.add_argument("--out", type=Path, default=None, help="folder of the runs; a temporary one")
    arguments = parser.parse_args()
    out = (arguments.out or Path(tempfile.mkdtemp(prefix="paceline-network-"))).resolve()
    undisturbed = train_for(out / "undisturbed", SETTINGS)
    print("| case | run | seconds | after going on |\n|---|---|---|---|", flush=True)
    are_good = [
        _tried(name, CASES[name], out / f"run{number}", undisturbed)
        for number, name in enumerate(arguments.only.split(",") if arguments.only else CASES)
    ]
    raise SystemExit(not all(are_good))


def _tried(name: str, case: Case, folder: Path, undisturbed: str) -> bool:
    """Print a row; whether all is well."""
    record = folder / "record.json"
    with SeveralNodes.open() as place, relay_at(place.cluster, place.nodes[1]) as relay:
        began = time.monotonic()
        words = ("--python", str(_with_clock(folder, place.nodes[1]))) if case.has_clock else ()
        with contextlib.ExitStack() as strangers:
            if case.at_start:
                relay.behave(case.trouble)
            if case.has_stranger:
                strangers.enter_context(_stranger(place.cluster, place.nodes[0]))
            launcher = place.start(folder, 1, random.Random(0), SETTINGS, *HANG_TIMEOUT, *words)
            wait_for_steps(folder, launcher)
            if not case.at_start:
                relay.behave(case.trouble)
                began = time.monotonic()
            is_cut = case.trouble.drops_from_node or case.trouble.drops_to_node
            wait_for_end(folder, launcher, FAILURE_S if is_cut else 10 * FAILURE_S)
        seconds = time.monotonic() - began
        relay.behave()
        ended, is_named = _ending(folder, launcher)
        if not record.exists():
            wait_for_end(folder, place.start(folder, 1, random.Random(0), SETTINGS, *HANG_TIMEOUT), 10 * FAILURE_S)
    equal = record.exists() and RunRecord.load(record).weights_sha256 == undisturbed
    bits = "equal" if equal else "other weights" if record.exists() else "no end"
    print(f"| {name} | {ended} | {seconds:.0f} | {bits} |", flush=True)
    return equal and is_named


def _ending(folder: Path, launcher: OnNode) -> tuple[str, bool]:
    """How a run has ended, in words, and whether that is known."""
    report = folder / "failure.json"
    if (folder / "record.json").exists():
        return "went on", True
    if report.exists():
        failure = json.loads(report.read_text())
        return f"{failure['cause']}: {failure['sentence']}".replace("|", "/")[:200], failure["cause"] != "unknown"
    sentences = [line for line in launcher.output.splitlines() if line.startswith("paceline: ")]
    return "".join(sentences)[:200] or launcher.output[-200:], len(sentences) == 1


@contextlib.contextmanager
def _stranger(cluster: Cluster, target: Node) -> Iterator[NodeProcess]:
    """On the launcher's node, as on any machine that reaches the ports of the others."""
    stranger = cluster.nodes[0].exec([sys.executable, "-c", _STRANGER, target.address, "600"])
    try:
        yield stranger
    finally:
        stranger.kill()
        print(f"The stranger reached {len(stranger.stdout.splitlines())} ports.", file=sys.stderr)


def _with_clock(folder: Path, node: Node) -> Path:
    """An interpreter whose clocks are others on this node."""
    clock = folder.with_suffix(".clock")
    clock.mkdir(parents=True)
    (clock / "sitecustomize.py").write_text(_JUMPING_CLOCK)
    python = clock / "python"
    python.write_text(_PYTHON.format(hostname=node.hostname, python=sys.executable, folder=clock))
    python.chmod(0o755)
    return python


if __name__ == "__main__":
    main()
