"""What keeping a run's state costs and what it is worth: the figures of docs/results.md.

    python -m benchmarks.checkpoint [--parameters 30e6] [--rounds 5] [--scratch DIR]

Prints: the stall of a save beside a copy in memory, torch.save and DCP; the bytes that the process reads during a save
and after it; every flipped bit and every cut end of a small checkpoint, noticed or not, here and by DCP.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict_loader as dcp_loader
import torch.distributed.checkpoint.state_dict_saver as dcp_saver
from torch import Tensor

from paceline.checkpoint.format import Storage, folder_name
from paceline.checkpoint.load import newest_that, verify_checkpoint
from paceline.checkpoint.save import Saver, Snapshot
from paceline.errors import CheckpointError
from paceline.spec.job import CheckpointSpec

_LAYER = 2048 * 2048
"""Parameters of a layer."""


def trained_state(num_parameters: int) -> dict[str, Tensor]:
    """A model's parameters and Adam's state: three float32 numbers a parameter."""
    sizes = [min(_LAYER, num_parameters - start) for start in range(0, num_parameters, _LAYER)]
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    return {f"{kind}/{number}": torch.randn(size) for number, size in enumerate(sizes) for kind in kinds}


def seconds(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def num_bytes_read() -> int:
    """What this process has read from files, of the page cache too (Linux)."""
    (line,) = (line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar"))
    return int(line.split()[1])


def stalls(num_parameters: int, rounds: int, scratch: Path) -> None:
    state = trained_state(num_parameters)
    copies = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    saver = Saver(Storage(scratch / "paceline"), CheckpointSpec(keep_last=1), None, print)
    took: dict[str, list[float]] = {}
    reads = []
    for step in range(rounds + 1):
        times = {"copy": seconds(lambda: [copies[name].copy_(tensor) for name, tensor in state.items()])}
        before = num_bytes_read()
        own, before = num_bytes_read() - before, num_bytes_read()  # own: of the look itself
        snapshot = Snapshot(step, {}, state, {})
        times["stall"] = seconds(lambda: saver.begin(snapshot))  # noqa: B023 - called at once
        saver.wait()
        time.sleep(0.5)
        reads.append(num_bytes_read() - before - own)
        times["torch.save"] = seconds(lambda: torch.save(state, scratch / "torch.pt"))
        times["DCP save"] = seconds(lambda: dcp_saver.save(state, checkpoint_id=scratch / "dcp"))
        for name, value in times.items():
            took.setdefault(name, []).append(value)
    size = sum(tensor.nbytes for tensor in state.values())
    print(f"{size / 1e6:,.0f} MB, median of {rounds} rounds after the first:")
    for name, values in took.items():
        print(f"  {name}: {statistics.median(values[1:]):.3f} s (the first time {values[0]:.3f} s)")
    ratios = [mine / copy for mine, copy in zip(took["stall"][1:], took["copy"][1:], strict=True)]
    print(f"  stall / copy in memory: {statistics.median(ratios):.2f}")
    print(f"  bytes read during a save and half a second after it, the umask in /proc/self/status included: {reads}")


def damages(content: bytes) -> Iterator[bytes]:
    """Every flipped bit of a file, and every length that it could be cut to."""
    for place in range(len(content)):
        for bit in range(8):
            yield content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]
    for length in range(len(content)):
        yield content[:length]


def noticed(folder: Path, is_good: Callable[[], bool]) -> str:
    """How many damages of the files in a folder are noticed."""
    num_noticed = num_all = 0
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        whole = path.read_bytes()
        for damaged in damages(whole):
            path.write_bytes(damaged)
            num_all += 1
            num_noticed += not is_good()
        path.write_bytes(whole)
    assert is_good()
    return f"{num_noticed:,} of {num_all:,} flipped bits and cut ends noticed"


def integrity(scratch: Path) -> None:
    tensors = torch.randn(3, 5), torch.zeros(5), torch.tensor(7), torch.ones(4).half()
    state = dict(zip(("weight", "bias", "count", "half"), tensors, strict=True))
    storage = Storage(scratch / "small")
    saver = Saver(storage, CheckpointSpec(), None, print)
    for step in (1, 2):
        saver.begin(Snapshot(step, {"seed": 0}, state, {}))
        saver.wait()

    def is_good() -> bool:
        try:
            verify_checkpoint(storage, folder_name(2))
        except CheckpointError:
            return False
        return True

    newest = scratch / "small" / folder_name(2)
    print(f"  Paceline: {noticed(newest, is_good)}")
    (file,) = newest.glob("worker-*")
    file.write_bytes(file.read_bytes()[:-1])
    print(f"  damaged newest: {newest_that(lambda name: verify_checkpoint(storage, name).step, storage)}")
    dcp_saver.save(state, checkpoint_id=scratch / "dcp-small")

    def loads() -> bool:
        loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        try:
            dcp_loader.load(loaded, checkpoint_id=scratch / "dcp-small")
        except BaseException:  # torch's CheckpointException is no Exception
            return False
        return True

    (data,) = (scratch / "dcp-small").glob("*.distcp")
    whole = data.read_bytes()
    some, silent = list(damages(whole))[::97], 0
    for damaged in some:
        data.write_bytes(damaged)
        silent += loads()
    print(f"  DCP: {silent:,} of {len(some):,} damages of its data file load silently")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--parameters", type=float, default=30e6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scratch", type=Path, help="where checkpoints go; else with temporary files")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # DCP's, of a process that is alone
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        stalls(int(arguments.parameters), arguments.rounds, Path(scratch))
        integrity(Path(scratch))


if __name__ == "__main__":
    main()
