"""Once workers are connected, nobody else can connect to the ports of their groups."""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist

from paceline import env
from paceline.private_groups import _own_sockets, _tcp_table
from paceline.spec import Plan
from paceline.train.process.process_group import join
from tests.kit.workers import run_ranks

CLOSED_S = 0.5


def _knock() -> list[bool]:
    """Whether each port at which this process listens answers."""
    before = set(_own_sockets())
    world = join(env.worker_facts(), Plan(world_size=2, timeout_s=60))
    own = _own_sockets()
    ports = [
        int(row.local.split(":")[1], 16)
        for row in _tcp_table({socket.AF_INET, socket.AF_INET6})
        if row.state == "0A" and row.inode in own and row.inode not in before
    ]
    found = []
    for port in ports:
        with socket.socket() as caller:
            caller.settimeout(CLOSED_S)
            found.append(caller.connect_ex(("127.0.0.1", port)) == 0)
    total = torch.ones(1)
    dist.all_reduce(total, group=world.group)
    assert total.item() == 2
    return found


def test_nobody_answers() -> None:
    for found in run_ranks(_knock, 2):
        assert found == [False] * len(found)
        assert found
