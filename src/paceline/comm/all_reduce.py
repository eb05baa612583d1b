"""The backend's own all-reduce: the reference that the other algorithms are tested against."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from paceline.comm.links import Links
from paceline.comm.servers import sum_at_servers


def all_reduce(values: Tensor, links: Links) -> None:
    """One call of the backend.

    The backend adds in the format that it is given. So values in a lossy format go by a reduce-scatter and an
    all-gather of direct messages, which add in the dtype of the values.
    """
    if links.wire.is_exact:
        # Gloo sends one call over one network interface, and the next call over the next.
        works = [dist.all_reduce(part, group=links.group, async_op=True) for part in links.parts(values)]
        for work in works:
            assert work is not None
            work.wait()
    else:
        sum_at_servers(values, links, workers=links.ring, servers=links.ring)
