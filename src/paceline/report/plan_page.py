"""A forecast as one HTML page that needs nothing but a browser."""

from __future__ import annotations

from paceline.report.plan_plots import plan_plots
from paceline.report.plan_table import columns, cost_text
from paceline.report.templates import render
from paceline.spec.forecast import Forecast


def render_plan_page(forecast: Forecast) -> str:
    """The whole page."""
    return render(
        "plan_page.html",
        forecast=forecast,
        best=forecast.recommended,
        cost_text=cost_text,
        columns=columns(forecast),
        has_objections=any(row.objection for row in forecast.rows),
        plots=plan_plots(forecast),
    )
