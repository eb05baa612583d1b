"""All-to-one: every worker sends its vector to rank 0, which adds them and sends the sum back."""

from __future__ import annotations

from torch import Tensor

from paceline.comm.links import Links
from paceline.comm.servers import sum_at_servers


def all_to_one(values: Tensor, links: Links) -> None:
    """Rank 0 receives and sends (n - 1) times the whole vector, one after the other over its one link."""
    sum_at_servers(values, links, workers=links.ring, servers=(0,))
