"""What the host does on a simulated GPU: launches, waits and copies, with the project's line that made it."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

_PROJECT = "/src/paceline/"


class Act(NamedTuple):
    """One thing that the host did."""

    kind: str
    """launch, synchronisation, host_to_device, device_to_host, device_to_device, nccl, nondeterministic or
    record_stream."""
    detail: str
    """The operator, or "pinned" or "pageable"."""
    where: str
    """file:line function of the project, innermost; empty: no line of the project's."""


class Observer:
    """`with Observer(native) as seen:` counts what all threads of this process do."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self.acts: Counter[Act] = Counter()

    def __enter__(self) -> Self:
        self._native.set_observer(self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._native.set_observer(None)

    def _note(self, kind: str, detail: str) -> None:
        where = "" if kind == "launch" else line_of_project()  # looking costs more than launching
        self.acts[Act(kind, detail, where)] += 1

    def count(self, kind: str, detail: str | None = None) -> int:
        """How often that was done."""
        return sum(number for act, number in self.acts.items() if act.kind == kind and detail in (None, act.detail))

    def table(self, *kinds: str) -> str:
        """The acts of these kinds, the most frequent first."""
        rows = [(act, number) for act, number in self.acts.most_common() if act.kind in kinds]
        return "\n".join(f"{number:6d} {act.kind:16s} {act.detail:50s} {act.where}" for act, number in rows)


def line_of_project() -> str:
    """file:line function of the project, innermost; empty: no line of the project's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        _, found, path = frame.f_code.co_filename.rpartition(_PROJECT)
        if found:
            return f"{path}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
