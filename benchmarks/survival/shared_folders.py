"""What becomes of a run on two nodes whose folder lies on a file server that is slow, forgetful, or refuses things.

    python -m benchmarks.survival.shared_folders [--only NAME,…] [--out DIR] [--python PATH]

Each node has a view of the folder of its own (`tests/old/hosts/folder_view.py`), as clients of NFS have; the launcher
is on one node, rank 0 on the other. Where the trouble begins in the middle, it does with the first complete
checkpoint. Then everything is as it should be again, and the run is started once more: it has to end with the weights
of one worker that nobody disturbed. The exit code says whether that holds, whether there was a good checkpoint all
the time, and whether a run that did not end well said so in a sentence. Needs root, sshd and /dev/fuse.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.kit.nodes.cluster import Cluster
from tests.kit.nodes.sshd import ssh_between
from tests.old.hosts.folder_view import folder_seen_from

from paceline.checkpoint.load import newest_good
from paceline.checkpoint.storage import open_storage
from paceline.spec import RunRecord

_SETTINGS = ("model=mlp", "epochs=3", "parity=bitwise", "virtual_shards=4", "checkpoint.every_steps=10")
_MAX_STEPS = 60
_VARIABLES = {"PACELINE_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
_END_S = 900.0
_IN_THE_MIDDLE = ("--when", "manifest.json")


@dataclass(frozen=True)
class Case:
    """A trouble."""

    options: Sequence[str]
    """Of the views of both nodes."""
    keeps: bool = True
    """Whether checkpoints survive it."""


CASES = {
    "none": Case(()),
    "20 ms late": Case(("--late", "0.02")),
    "remembered for 30 s": Case(("--remember", "30")),
    "no replacing": Case(("--refuse", "replace=EEXIST")),
    "no links or locks": Case(("--refuse", "link=EPERM,lock=ENOLCK")),
    "quota in the middle": Case((*_IN_THE_MIDDLE, "--refuse", "write=EDQUOT,mkdir=EDQUOT,link=EDQUOT")),
    "no renaming in the middle": Case((*_IN_THE_MIDDLE, "--refuse", "rename=EACCES")),
    "deleted in the middle": Case((*_IN_THE_MIDDLE, "--run", "rm -rf run"), keeps=False),
    "server lost in the middle": Case((*_IN_THE_MIDDLE, "--run", "kill -9 $PPID")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases, separated by commas; all")
    parser.add_argument("--out", type=Path, default=None, help="folder of the runs; a temporary one")
    parser.add_argument("--python", default=sys.executable, help="of the agents and workers; this one")
    arguments = parser.parse_args()
    out = (arguments.out or Path(tempfile.mkdtemp(prefix="paceline-shared-folders-"))).resolve()
    alone = subprocess.run(_command(out / "alone", "-n", "1"), check=True, capture_output=True, timeout=_END_S)
    assert not alone.returncode
    digest = RunRecord.load(out / "alone" / "record.json").weights_sha256
    print("| trouble | run | what it said | good checkpoint | after going on |\n|---|---|---|---|---|", flush=True)
    problems = 0
    (out / "ssh").mkdir()
    with Cluster(num_nodes=2, rate_bits_per_s=1e9) as cluster, ssh_between(cluster.nodes, out / "ssh"):
        for number, name in enumerate([name for name in arguments.only.split(",") if name] or CASES):
            problems += not _tried(name, CASES[name], cluster, out / str(number), digest, arguments.python)
    raise SystemExit(bool(problems))


def _tried(name: str, case: Case, cluster: Cluster, folder: Path, digest: str, python: str) -> bool:
    """Print a row; whether all is well."""
    server, place = folder / "server", folder / "place"
    server.mkdir(parents=True)
    place.mkdir()
    exit_code, said = _run(cluster, server, place, python, *case.options)
    found, _ = newest_good(open_storage(server / "run" / "checkpoints"))
    record = server / "run" / "record.json"
    has_ended = exit_code == 0 and record.exists()
    resumed, said_then = (0, "") if has_ended else _run(cluster, server, place, python)
    equal = resumed == 0 and RunRecord.load(record).weights_sha256 == digest
    lines = [line for line in said.splitlines() if "could not" in line or "cannot" in line or "paceline: " in line]
    told = (lines[-1] if lines else "")[:160].replace("|", "/").replace(str(place), "PLACE")
    ended = "went on" if exit_code == 0 else f"exit code {exit_code}"
    left = "none" if found is None else f"step {found.manifest.step}"
    then = "equal" if equal else f"exit code {resumed}: {said_then[-300:]}"
    print(f"| {name} | {ended} | {told} | {left} | {then} |", flush=True)
    spoke = exit_code == 0 or "paceline: " in said
    return equal and spoke and "Traceback" not in said and (found is not None or not case.keeps)


def _run(cluster: Cluster, server: Path, place: Path, python: str, *options: str) -> tuple[int, str]:
    launcher, _ = cluster.nodes
    with folder_seen_from(cluster.nodes, server, place, *options):
        command = _command(place / "run", "--hosts", "node1:1,node0:1", "--python", python)
        # Results that the server does not take go to the working directory.
        training = launcher.exec(command, env=_VARIABLES, cwd=place.parent)
        try:
            return training.wait(_END_S), training.output
        finally:
            training.kill()


def _command(run_dir: Path, *where: str) -> list[str]:
    settings = [word for setting in _SETTINGS for word in ("--set", setting)]
    job = ("digits-lenet", *settings, "--max-steps", str(_MAX_STEPS), "--threads", "1")
    return [sys.executable, "-m", "paceline", "train", *job, "--out", str(run_dir), *where]


if __name__ == "__main__":
    main()
