"""Tables of measured steps, and what is forecast from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import paceline
from paceline.spec.forecast import Forecast, ForecastRow

HEAD = ("num_nodes", "devices_per_node", "micro_batch_size")
"""The columns of a question; a measured row has `step_time_s` behind them."""


@dataclass(frozen=True)
class Answer:
    """A forecast; `rows` are in the order of the questions."""

    forecast: Forecast
    rows: tuple[ForecastRow, ...]
    page: str

    @property
    def said(self) -> str:
        """All that it says of what was not measured or looks wrong."""
        return " ".join(self.forecast.assumptions)


@dataclass(frozen=True)
class Tables:
    """Writes tables into a folder of its own and asks for forecasts."""

    folder: Path

    def text(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def answer(
        self,
        measured: Iterable[Sequence[object]],
        asked: Sequence[Sequence[object]],
        *,
        more: Sequence[str] = (),
        price: str | float | None = None,
    ) -> Answer:
        """Forecasts of the rows `asked` from the rows `measured`, whose times stand before the columns `more`."""
        questions = [(*row[:3], "", *row[3:]) for row in asked]
        lines = [",".join(map(str, row)) for row in ((*HEAD, "step_time_s", *more), *measured, *questions)]
        planned = paceline.plan(self.text("steps.csv", "\n".join(lines) + "\n"), price=price)
        # Rows are in ascending order; the first one may be one that was not asked for, to which speed-ups refer.
        different = list(dict.fromkeys(map(tuple, asked)))
        order = sorted(different, key=lambda row: (int(str(row[0])) * int(str(row[1])), int(str(row[0]))))
        rows = planned.forecast.rows[len(planned.forecast.rows) - len(order) :]
        row_of = dict(zip(order, rows, strict=True))
        return Answer(planned.forecast, tuple(row_of[tuple(row)] for row in asked), planned.page())
