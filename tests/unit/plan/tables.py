"""Tables of measured steps, and what is forecast from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import paceline
from paceline.workflows.step_times import FittedSteps

HEAD = ("num_nodes", "devices_per_node", "micro_batch_size")
"""The columns of a question; a measured row has `step_time_s` behind them."""


@dataclass(frozen=True)
class Tables:
    """Writes tables into a folder of its own and asks for forecasts."""

    folder: Path

    def write(self, name: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
        lines = [",".join(map(str, row)) for row in (head, *rows)]
        return self.text(name, "\n".join(lines) + "\n")

    def text(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def fitted(
        self,
        measured: Iterable[Sequence[object]],
        asked: Iterable[Sequence[object]],
        *,
        more: Sequence[str] = (),
        price: str | float | None = None,
        efficiency_floor: float = 0.5,
    ) -> FittedSteps:
        """Forecasts of the rows `asked` from the rows `measured`, whose times stand before the columns `more`."""
        observed = self.write("observed.csv", (*HEAD, "step_time_s", *more), measured)
        questions = self.write("asked.csv", (*HEAD, *more), asked)
        return paceline.fit_step_times(observed, questions, price=price, efficiency_floor=efficiency_floor)
