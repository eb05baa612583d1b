"""The device from which a group's backend sends, and groups that send from host memory."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where a tensor has to be for the backend of `group` to send it: host memory wherever the backend can."""
    kinds = [one.partition(":")[0] for one in dist.get_backend_config(group).split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


def open_host_group(timeout_s: float) -> dist.ProcessGroup:
    """Open a further group of all workers, for tensors in host memory; a collective of them."""
    opened: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return opened
