"""What a communication hook knows besides its bucket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist


def _ignore() -> None:
    return None


@dataclass
class HookState:
    """The group to aggregate over, and who wants to know when backward has produced its last gradient."""

    group: dist.ProcessGroup
    on_last_bucket: Callable[[], None] = _ignore
