"""The program of one worker that times checkpoints: `python -m paceline.measure.checkpoint_bench REQUEST.json OUT`.

Started by `paceline bench checkpoint`, torchrun, srun or mpirun alike. REQUEST.json holds a `CheckpointRequest`. Rank 0
writes a `CheckpointTimings` to OUT/timings.json and removes the checkpoints.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from paceline import env
from paceline.checkpoint import Saver, Snapshot, open_storage, read_checkpoint
from paceline.checkpoint.load import folder_name
from paceline.checkpoint.share import divide
from paceline.errors import CheckpointError, JobError
from paceline.spec import CheckpointSpec, Plan
from paceline.spec.checkpoint_timing import CheckpointRequest, CheckpointTimings
from paceline.spec.comm_timing import TIMINGS_FILE
from paceline.train.environment import describe_environment
from paceline.train.process_group import join
from paceline.train.progress import Report, bar
from paceline.train.timing import settle

LARGEST_LAYER = 2048 * 2048
"""Parameters of one tensor at most, about what a layer of a model of 100 million has."""


def trained_state(num_parameters: int, device: torch.device) -> dict[str, Tensor]:
    """Tensors such as a model and Adam hold of it, by name; three float32 numbers a parameter."""
    bounds = [*range(0, num_parameters, LARGEST_LAYER), num_parameters]
    sizes = [end - begin for begin, end in pairwise(bounds)]
    return {
        f"{kind}/layer{number}": torch.randn(size, device=device)
        for number, size in enumerate(sizes)
        for kind in ("weight", "exp_avg", "exp_avg_sq")
    }


def time_saves(
    request: CheckpointRequest,
    device: torch.device,
    group: dist.ProcessGroup | None,
    report: Report = lambda _doing, _done: None,
) -> CheckpointTimings:
    """Save the state again and again; a common act of all workers of `group`, with one result for all of them.

    Every round copies it first, as far as this worker has to write it, so that both are measured on the same machine.

    Raises:
        CheckpointError: the storage cannot take it, on any worker; says why.
    """
    said: list[str] = []
    storage = open_storage(request.address)
    # Nothing is pruned while the clock runs.
    saver = Saver(storage, CheckpointSpec(keep_last=request.num_rounds + 1), group, said.append)
    is_first = group is None or dist.get_rank(group) == 0
    state = trained_state(request.num_parameters, device)
    mine = list(divide(state, group).share(state).values())
    warm = [torch.zeros(tensor.shape, pin_memory=device.type == "cuda") for tensor in mine]
    stalls_s, copies_s, completes_s, reads_s = [], [], [], []
    num_bytes = 0.0
    for step in range(request.num_rounds + 1):
        report(f"checkpoint {step + 1} of {request.num_rounds + 1}", step / (request.num_rounds + 1))
        copies_s.append(_largest(_copy_s(mine, warm, device), group))

        began = time.perf_counter()
        saver.begin(Snapshot(step, {}, state, {}))
        stalls_s.append(_largest(time.perf_counter() - began, group))
        saver.wait()
        complete_s = time.perf_counter() - began
        if _largest(saver.failed, group):
            saver.give_up()
            raise CheckpointError(said[0].partition(". ")[0] + "." if said else "Another worker could not write.")
        completes_s.append(_largest(complete_s, group))

        read_s = 0.0
        if is_first:
            began = time.perf_counter()
            checkpoint = read_checkpoint(storage, folder_name(step))
            read_s = time.perf_counter() - began
            num_bytes = sum(file.num_bytes for file in checkpoint.manifest.files)
            del checkpoint
            storage.remove(folder_name(step))
        reads_s.append(_largest(read_s, group))
    return CheckpointTimings(
        request=request,
        world_size=1 if group is None else dist.get_world_size(group),
        device_kind="cuda" if device.type == "cuda" else "cpu",
        num_bytes=int(_largest(num_bytes, group)),
        first_stall_s=stalls_s[0],
        stalls_s=tuple(stalls_s[1:]),
        copies_s=tuple(copies_s[1:]),
        completes_s=tuple(completes_s[1:]),
        reads_s=tuple(reads_s[1:]),
    )


def _copy_s(tensors: Sequence[Tensor], places: Sequence[Tensor], device: torch.device) -> float:
    settle(device)
    began = time.perf_counter()
    for tensor, place in zip(tensors, places, strict=True):
        place.copy_(tensor, non_blocking=True)
    settle(device)
    return time.perf_counter() - began


def _largest(value: float, group: dist.ProcessGroup | None) -> float:
    """Of all workers, for all of them; who hears it knows that all have come here."""
    if group is None:
        return float(value)
    values = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    return float(values)


def run(request: CheckpointRequest, out: Path, *, quiet: bool) -> None:
    """Meet the other workers, time what is asked for, and leave the file; rank 0 shows how far it is."""
    facts = env.worker_facts()
    kind = request.device_kind or env.device_kind() or ("cuda" if torch.cuda.is_available() else "cpu")
    plan = Plan(
        world_size=facts.world_size, device_kind="cuda" if kind == "cuda" else "cpu", timeout_s=request.timeout_s
    )
    torch.set_num_threads(env.thread_limit() or max(1, torch.get_num_threads() // facts.local_world_size))
    world = join(facts, plan)
    timeout = timedelta(seconds=plan.timeout_s)
    group = None if world.group is None else dist.new_group(backend="gloo", timeout=timeout)
    try:
        with bar("", is_shown=world.rank == 0 and not quiet, has_percent=True) as report:
            timings = time_saves(request, world.device, group, report)
    except BaseException:
        if world.rank == 0:
            with contextlib.suppress(CheckpointError):  # there is another one to be told of
                _remove(request.address)
        raise
    if world.rank == 0:
        _remove(request.address)
        out.mkdir(parents=True, exist_ok=True)
        described = CheckpointTimings(**{**vars(timings), "environment": describe_environment(world)})
        described.save(out / TIMINGS_FILE)


def _remove(address: str) -> None:
    """The folder with all checkpoints that are left in it."""
    parent, _, name = address.rstrip("/").rpartition("/")
    try:
        open_storage(parent or "/").remove(name)
    except OSError as problem:
        raise CheckpointError(f"The benchmark's checkpoints in {address} cannot be removed: {problem}.") from None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paceline.measure.checkpoint_bench", description=__doc__)
    parser.add_argument("request", type=Path, help="JSON file with what to save, and where")
    parser.add_argument("out", type=Path, help="folder for timings.json")
    parser.add_argument("--quiet", action="store_true", help="say nothing")
    arguments = parser.parse_args()
    try:
        plain = json.loads(arguments.request.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise JobError(f"The request {arguments.request} cannot be read: {problem}.") from None
    run(CheckpointRequest.from_mapping(plain), arguments.out, quiet=arguments.quiet)


if __name__ == "__main__":
    main()
