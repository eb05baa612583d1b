"""The memory that workers of one node share, with real processes on both sides of it."""

from __future__ import annotations

import errno
import os
import random
import stat
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from paceline import env
from paceline.comm.shared_memory import DEPTH, SharedMemory, slot_bytes_for
from paceline.errors import LaunchError, PeerLost
from paceline.spec import Plan
from paceline.train.process.process_group import join, leave
from tests.kit.workers import run_ranks

MODULE = sys.modules["paceline.comm.shared_memory"]
SMALL_SLOT_BYTES = 4096
Nodes = tuple[tuple[int, ...], ...]


def _group() -> dist.ProcessGroup:
    facts = env.worker_facts()
    group = join(facts, Plan(world_size=facts.world_size, timeout_s=30)).group
    assert group is not None
    return group


def _open(group: dist.ProcessGroup, timeout_s: float = 30) -> SharedMemory:
    memory = SharedMemory.open(group, [range(dist.get_world_size(group))], timeout_s, SMALL_SLOT_BYTES)
    assert memory is not None
    return memory


def _values(rank: int, number: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * rank + number)
    return torch.randn(length, generator=generator, dtype=dtype)


def _sum_in_rank_order(summands: list[torch.Tensor]) -> torch.Tensor:
    total = summands[0].clone()
    for summand in summands[1:]:
        total += summand
    return total


def _collectives(cases: list[tuple[str, int, torch.dtype]]) -> list[tuple[int, str]]:
    """Run them one after the other without a barrier; which of them left other bits than they should."""
    group = _group()
    memory, rank, world_size = _open(group), dist.get_rank(group), dist.get_world_size(group)
    wrong = []
    for number, (name, length, dtype) in enumerate(cases):
        everybodys = [_values(other, number, length, dtype) for other in range(world_size)]
        values = everybodys[rank].clone()
        getattr(memory, name)(values)
        expected = {
            "all_reduce": _sum_in_rank_order(everybodys),
            "reduce": _sum_in_rank_order(everybodys) if rank == 0 else everybodys[rank],
            "broadcast": everybodys[0],
        }[name]
        if not torch.equal(values, expected):
            wrong.append((number, name))
    dist.barrier()
    leave()
    return wrong


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sums_have_the_bits_of_a_sum_in_rank_order_call_after_call(world_size: int) -> None:
    pick = random.Random(world_size)
    full = SMALL_SLOT_BYTES // 4
    edges = [0, 1, 2, 15, 16, 17, full - 1, full, full + 1, DEPTH * full, DEPTH * full + 1, 3 * DEPTH * full + 5]
    cases = [("all_reduce", length, torch.float32) for length in edges]
    names, dtypes = ["all_reduce", "reduce", "broadcast"], [torch.float32, torch.float64]
    cases += [(pick.choice(names), pick.randint(0, 6 * full), pick.choice(dtypes)) for _ in range(300)]
    assert run_ranks(_collectives, world_size, cases, timeout_s=90) == [[]] * world_size


@pytest.mark.slow
def test_a_thousand_calls_without_a_barrier_between_them() -> None:
    cases = [("all_reduce", (number * 7919) % 20_011, torch.float32) for number in range(1000)]
    assert run_ranks(_collectives, 2, cases, timeout_s=90) == [[], []]


def test_bits_do_not_depend_on_where_a_vector_is_cut() -> None:
    # Each value's sum is formed in one order, whichever worker forms it.
    assert run_ranks(_cut_and_whole, 3) == [True] * 3


def _cut_and_whole() -> bool:
    group = _group()
    memory = _open(group)
    whole = _values(dist.get_rank(group), 0, 5000, torch.float32)
    parts = [part.clone() for part in whole.split(777)]
    memory.all_reduce(whole)
    for part in parts:
        memory.all_reduce(part)
    dist.barrier()
    leave()
    return torch.equal(whole, torch.cat(parts))


def _wait_for_one_who_does_not_come() -> str:
    group = _group()
    rank = dist.get_rank(group)
    memory = _open(group, timeout_s=0.3)
    message = ""
    if rank != 1:
        with pytest.raises(PeerLost) as caught:
            memory.all_reduce(torch.ones(10))
        assert caught.value.rank == 1
        message = str(caught.value)
    dist.barrier()
    leave()
    return message


def test_a_timeout_names_the_worker_that_did_not_come() -> None:
    first, _, third = run_ranks(_wait_for_one_who_does_not_come, 3)
    assert "Rank 1 did not" in first and "within 0.3 s" in first and "timeout_s" in first
    assert "Rank 1 did not" in third


def _wait_for_one_who_has_ended() -> str:
    group = _group()
    memory = _open(group, timeout_s=600)
    memory.all_reduce(torch.ones(10))
    if dist.get_rank(group) == 1:
        return ""
    with pytest.raises(PeerLost, match="Rank 1 ended") as caught:
        memory.all_reduce(torch.ones(10))
    assert caught.value.rank == 1
    return str(caught.value)


def test_a_worker_that_has_ended_is_noticed_long_before_the_timeout() -> None:
    assert "look for its own error" in run_ranks(_wait_for_one_who_has_ended, 2, timeout_s=30)[0]


def _files(folder: str, nodes: Nodes) -> tuple[bool, list[str], list[tuple[int, int]]]:
    """Whether there is a memory here, which files have names, and mode and bytes of what this process holds open."""
    group = _group()
    with mock.patch.object(MODULE, "FOLDER", Path(folder)):
        memory = SharedMemory.open(group, nodes, 30)
    dist.barrier()
    named = [path.name for path in Path(folder).iterdir()]
    held = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            if str(link.readlink()).startswith(folder):
                held.append((stat.S_IMODE(link.stat().st_mode), link.stat().st_blocks * 512))
        except FileNotFoundError:  # the descriptor that lists the others
            continue
    dist.barrier()
    leave()
    return memory is not None, named, held


def test_the_file_has_no_name_once_it_is_open_and_is_for_this_user_alone(tmp_path: Path) -> None:
    *together, alone = run_ranks(_files, 3, str(tmp_path), ((0, 1), (2,)))
    assert alone == (False, [], [])
    for there, named, held in together:
        assert there and named == []
        assert held and all(mode == 0o600 for mode, _ in held)
        # All of it is there, not promised.
        assert all(num_bytes >= DEPTH * 2 * slot_bytes_for(2) for _, num_bytes in held)
    assert list(tmp_path.iterdir()) == []


def _open_where_it_fails(folder: str, failing_rank: int, call: str, code: int) -> str:
    group = _group()
    failing: Any = mock.DEFAULT
    if dist.get_rank(group) == failing_rank:
        failing = mock.patch(call, side_effect=OSError(code, os.strerror(code)))
    else:
        failing = mock.patch.object(MODULE, "MAX_BYTES", MODULE.MAX_BYTES)
    with mock.patch.object(MODULE, "FOLDER", Path(folder)), failing, pytest.raises(LaunchError) as caught:
        SharedMemory.open(group, ((0,), (1, 2)), 30)
    dist.barrier()
    leave()
    return str(caught.value)


def test_too_little_memory_is_one_sentence_for_every_worker(tmp_path: Path) -> None:
    said = run_ranks(_open_where_it_fails, 3, str(tmp_path), 1, "os.posix_fallocate", errno.ENOSPC)
    assert len(set(said)) == 1
    assert "on the node of rank 1 has no room for the 5 MB that its 2 workers share" in said[0]
    assert "--shm-size=64m" in said[0]
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_may_not_open_the_file_says_so_to_all(tmp_path: Path) -> None:
    said = run_ranks(_open_where_it_fails, 3, str(tmp_path), 2, "fcntl.lockf", errno.EACCES)
    assert len(set(said)) == 1
    assert "Rank 2 cannot use" in said[0] and "Permission denied" in said[0]
    assert list(tmp_path.iterdir()) == []


def test_slots_fit_a_containers_memory_on_any_node() -> None:
    for num_workers in range(2, 129):
        slot_bytes = slot_bytes_for(num_workers)
        assert slot_bytes >= 64 * 1024 or num_workers > 64
        assert DEPTH * num_workers * slot_bytes <= 32 * 1024 * 1024
