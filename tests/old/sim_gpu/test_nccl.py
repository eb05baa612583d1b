"""The simulated NCCL: what it computes, and what it makes of programs that would hang or go wrong on GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.kit.sim_gpu.workers import run_on_gpus

pytestmark = pytest.mark.sim_gpu


def _join(timeout_s: float = 60, eager: bool = True) -> tuple[int, torch.device]:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl",
        init_method=os.environ["PACELINE_RENDEZVOUS"],
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout_s),
        device_id=device if eager else None,
    )
    return rank, device


def test_collectives_compute_what_they_say(simulated_gpu: Path) -> None:
    run_on_gpus(simulated_gpu, _collectives, 3)


def _collectives(native: Any) -> None:
    rank, device = _join()
    own = torch.arange(6.0, device=device) + rank

    def expect(value: Tensor, *numbers: float) -> None:
        assert value.tolist() == list(numbers)

    for op, expected in ((dist.ReduceOp.SUM, 3.0), (dist.ReduceOp.AVG, 1.0), (dist.ReduceOp.MAX, 2.0)):
        value = own[:1].clone()
        dist.all_reduce(value, op)
        expect(value, expected)
    value = own[:2].to(torch.bfloat16)
    dist.broadcast(value, src=2)
    expect(value, 2, 3)
    rows = [torch.empty(1, device=device) for _ in range(3)]
    dist.all_gather(rows, own[:1])
    expect(torch.cat(rows), 0, 1, 2)
    flat = torch.empty(3, device=device)
    flat[rank] = rank  # in place, as fully_shard does it
    dist.all_gather_into_tensor(flat, flat[rank : rank + 1])
    expect(flat, 0, 1, 2)
    part = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(part, own)
    expect(part, 3 + 6 * rank, 6 + 6 * rank)
    swapped = torch.empty(3, device=device)
    dist.all_to_all_single(swapped, own[:3].contiguous())
    expect(swapped, rank, rank + 1, rank + 2)
    gathered = [torch.empty(1, device=device) for _ in range(3)] if rank == 1 else None
    dist.gather(own[:1], gathered, dst=1)
    if gathered is not None:
        expect(torch.cat(gathered), 0, 1, 2)
    scattered = torch.empty(1, device=device)
    dist.scatter(scattered, list(own[:3].split(1)) if rank == 0 else None, src=0)
    expect(scattered, rank)
    arriving = torch.empty(6, device=device)
    ring = [dist.P2POp(dist.isend, own, (rank + 1) % 3), dist.P2POp(dist.irecv, arriving, (rank - 1) % 3)]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    assert arriving[0] == (rank - 1) % 3
    dist.barrier()
    half = dist.split_group(split_ranks=[[0, 2]])
    if half is not None and rank != 1:
        value = own[:1].clone()
        dist.all_reduce(value, group=half)
        expect(value, 2)
    future = dist.all_reduce(own, async_op=True).get_future()
    assert future.wait()[0][0].item() == 3


def test_what_nccl_refuses_or_would_silently_get_wrong(simulated_gpu: Path) -> None:
    run_on_gpus(simulated_gpu, _broken_rules, 2)


def _broken_rules(native: Any) -> None:
    rank, device = _join()
    other = dist.new_group([0, 1])
    value = torch.ones(4, device=device)

    def fails(act: Callable[[], Any], message: str) -> None:
        with pytest.raises(RuntimeError, match=message):
            act()

    fails(lambda: dist.all_reduce(torch.ones(2)), "No backend type associated with device type")
    fails(lambda: dist.all_reduce(value.to(torch.int16)), "Unconvertible NCCL type")
    fails(lambda: dist.all_reduce(torch.ones(4, 4, device=device)[:, ::2]), "contiguous")

    work = dist.all_reduce(value, async_op=True)
    assert value.isnan().all()  # whoever reads the result too early
    work.wait()
    assert value.tolist() == [2.0] * 4

    def reuses_result() -> None:
        work = dist.all_reduce(value, async_op=True)
        value.zero_()
        work.wait()

    def reuses_input() -> None:
        gathered = torch.empty(8, device=device)
        work = dist.all_gather_into_tensor(gathered, value, async_op=True)
        value.add_(1)
        work.wait()

    def other_shapes() -> None:
        dist.all_reduce(torch.ones(3 + rank, device=device))

    def other_orders() -> None:
        groups = [dist.group.WORLD, other]
        works = [dist.all_reduce(value, group=group, async_op=True) for group in groups[:: -1 if rank else 1]]
        for work in works:
            work.wait()

    fails(reuses_result, "written to while it was in flight")
    fails(reuses_input, "input was changed while it was in flight")
    fails(other_shapes, "launch different collectives")
    fails(other_orders, "two communicators in different orders")
    unwaited = torch.ones(1, device=device)
    dist.all_reduce(unwaited, async_op=True)  # its work is nobody's
    torch.cuda.synchronize()
    assert unwaited.item() == 2


def test_sends_wait_for_receives(simulated_gpu: Path) -> None:
    """Two workers that both send first wait for each other for ever where one queue serves both directions."""
    run_on_gpus(simulated_gpu, _both_send_first, 2)


def _both_send_first(native: Any) -> None:
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    rank, device = _join(timeout_s=5)
    value, arriving = torch.ones(1, device=device), torch.empty(1, device=device)
    sent = dist.isend(value, 1 - rank)
    received = dist.irecv(arriving, 1 - rank)
    assert sent is not None and received is not None
    with pytest.raises(dist.DistBackendError, match="timeout"):
        received.wait()


@pytest.mark.parametrize("end", ["watchdog", "abort", "blocking"])
def test_a_dead_peer_is_noticed_at_the_timeout_or_by_an_abort(simulated_gpu: Path, end: str) -> None:
    with pytest.raises(AssertionError) as raised:
        run_on_gpus(simulated_gpu, _outlives_its_peer, 2, end)
    text = str(raised.value)
    assert "died without a word" in text if end == "watchdog" else "survived" in text


def _outlives_its_peer(native: Any, end: str) -> None:
    if end == "blocking":
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    rank, device = _join(timeout_s=600 if end == "abort" else 5)
    dist.barrier()
    if rank == 1:
        return  # and its process ends
    work = dist.all_reduce(torch.ones(1, device=device), async_op=True)
    if end == "abort":
        assert dist.group.WORLD is not None
        dist.group.WORLD._get_backend(device).abort()
        work.wait()  # as a stream does, which goes on with what the kernel has left
        with pytest.raises(dist.DistBackendError, match="aborted"):
            dist.all_reduce(torch.ones(1, device=device))
    else:
        with pytest.raises(dist.DistBackendError, match="timeout"):
            work.wait()
    raise AssertionError("survived")
