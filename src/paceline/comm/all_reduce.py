"""The backend's own all-reduce: the oracle of the other algorithms."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from paceline.comm.links import SMALLEST_CUT_BYTES, Links
from paceline.comm.servers import sum_at_servers


def all_reduce(values: Tensor, links: Links) -> None:
    """One call of the backend.

    The backend adds in the format that it is given. So values in a lossy format go by a reduce-scatter and an
    all-gather of direct messages, which add in the dtype of the values.
    """
    if links.wire.is_exact:
        # Gloo sends one call over one network interface, and the next call over the next.
        num_calls = links.num_interfaces if len(links.nodes) > 1 and values.nbytes >= SMALLEST_CUT_BYTES else 1
        works = [dist.all_reduce(part, group=links.group, async_op=True) for part in values.tensor_split(num_calls)]
        for work in works:
            assert work is not None
            work.wait()
    else:
        sum_at_servers(values, links, workers=links.ring, servers=links.ring)
