from __future__ import annotations

from tests.old.unit.threads import one_thread

__all__ = ["one_thread"]
