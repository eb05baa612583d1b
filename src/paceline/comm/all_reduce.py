"""The backend's own all-reduce: the reference that the other algorithms are tested against."""

from __future__ import annotations

from torch import Tensor

from paceline.comm.links import Links
from paceline.comm.parameter_server import sum_at_servers


def all_reduce(values: Tensor, links: Links) -> None:
    """One call of the backend.

    The backend adds in the format that it is given. So values in a lossy format go by a reduce-scatter and an
    all-gather of direct messages, which add in the dtype of the values.
    """
    if links.wire.is_exact:
        links.all_reduce(values)
    else:
        sum_at_servers(values, links, workers=links.ring, servers=links.ring)
