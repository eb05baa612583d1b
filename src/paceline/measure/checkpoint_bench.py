"""The program that times checkpoints, one process a worker: `python -m paceline.measure.checkpoint_bench`.

It reads a `CheckpointRequest`; the first worker leaves a `CheckpointTimings`, and removes the checkpoints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint import Saver, Snapshot, open_storage, verify_checkpoint
from paceline.checkpoint.load import folder_name
from paceline.checkpoint.write_plan import plan_writes
from paceline.errors import CheckpointError, reason_of
from paceline.measure.program import Report, run_program, unreported
from paceline.measure.stopwatch import Stopwatch, seconds_of
from paceline.measure.timing import largest
from paceline.measure.workers import join_workers
from paceline.process_groups import open_host_group
from paceline.spec import CheckpointSpec
from paceline.spec.checkpoint_timing import CheckpointRequest, CheckpointTimings
from paceline.spec.comm_timing import TIMINGS_FILE
from paceline.train.records.environment import describe_environment

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
    request: CheckpointRequest, device: torch.device, group: dist.ProcessGroup | None, report: Report = unreported
) -> CheckpointTimings:
    """Save the state again and again; a collective of all workers of `group`, with one result for all of them.

    Every round copies it first, as far as this worker has to write it, so that both are measured on the same machine.

    Raises:
        CheckpointError: the storage cannot take it, on any worker; says why.
    """
    messages: list[str] = []
    storage = open_storage(request.address)
    # Nothing is pruned while the clock runs.
    saver = Saver(storage, CheckpointSpec(keep_last=request.num_rounds + 1), group, messages.append)
    is_first = group is None or dist.get_rank(group) == 0
    state = trained_state(request.num_parameters, device)
    mine = list(plan_writes(state, group).tensors_to_write(state).values())
    warm = [torch.zeros(tensor.shape, pin_memory=device.type == "cuda") for tensor in mine]
    stalls_s, copies_s, completes_s, reads_s = [], [], [], []
    num_bytes = 0.0
    for step in range(request.num_rounds + 1):
        report(f"checkpoint {step + 1} of {request.num_rounds + 1}", step / (request.num_rounds + 1))
        copies_s.append(largest(seconds_of(lambda: _copy(mine, warm), device), group))

        clock = Stopwatch()
        saver.begin(Snapshot(step, {}, state, {}))
        stalls_s.append(largest(clock.spent_s, group))
        saver.wait()
        complete_s = clock.spent_s
        if largest(saver.failed, group):
            saver.give_up()
            raise CheckpointError(
                messages[0].partition(". ")[0] + "." if messages else "Another worker could not write."
            )
        completes_s.append(largest(complete_s, group))

        read_s = 0.0
        if is_first:
            clock = Stopwatch()
            manifest = verify_checkpoint(storage, folder_name(step))
            read_s = clock.spent_s
            num_bytes = sum(file.num_bytes for file in manifest.files)
            storage.remove(folder_name(step))
        reads_s.append(largest(read_s, group))
    return CheckpointTimings(
        request=request,
        world_size=1 if group is None else dist.get_world_size(group),
        device_kind="cuda" if device.type == "cuda" else "cpu",
        num_bytes=int(largest(num_bytes, group)),
        first_stall_s=stalls_s[0],
        stalls_s=tuple(stalls_s[1:]),
        copies_s=tuple(copies_s[1:]),
        completes_s=tuple(completes_s[1:]),
        reads_s=tuple(reads_s[1:]),
    )


def _copy(tensors: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    for tensor, place in zip(tensors, places, strict=True):
        place.copy_(tensor, non_blocking=True)


def bench_checkpoints(request: CheckpointRequest, report: Report = unreported) -> CheckpointTimings | None:
    """Join the other workers and time checkpoints, of which none is left; None on all workers but the first."""
    world = join_workers(request.device_kind, request.timeout_s)
    group = None if world.group is None else open_host_group(request.timeout_s)
    try:
        timings = time_saves(request, world.device, group, report)
    except BaseException:
        if world.rank == 0:
            with contextlib.suppress(CheckpointError):  # the first problem is the one to report
                _remove(request.address)
        raise
    if world.rank != 0:
        return None
    _remove(request.address)
    return replace(timings, environment=describe_environment(world))


def _remove(address: str) -> None:
    """The folder with all checkpoints that are left in it."""
    parent, _, name = address.rstrip("/").rpartition("/")
    try:
        open_storage(parent or "/").remove(name)
    except OSError as problem:
        raise CheckpointError(
            f"The benchmark's checkpoints in {address} cannot be removed: {reason_of(problem)}."
        ) from None


if __name__ == "__main__":
    run_program(__doc__, CheckpointRequest, bench_checkpoints, TIMINGS_FILE)
