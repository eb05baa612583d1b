"""A forecast as one HTML page that needs nothing but a browser."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.report import formats
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
        meaning=_meaning(forecast),
    )


def _meaning(forecast: Forecast) -> Sequence[tuple[str, str]]:
    """(term, sentence): what the numbers of this page are, and what they cannot say."""
    terms = [
        (
            "Forecast",
            "Nothing on this page was trained. It follows from what paceline probe measured: passes of the model by "
            "micro-batch, the loader, and the links between devices and nodes.",
        ),
        (
            "Step",
            "Compute, then what compute does not hide of summing gradients, then the optimizer and the wait for the "
            "slowest worker; or the loader, if it takes longer than all of that.",
        ),
        (
            "Interval",
            "The 90 % prediction interval of a measured step. It widens with the share of communication in a step, and "
            "with every doubling beyond the devices that were measured.",
        ),
        (
            "Speed-up and efficiency",
            "Throughput over that of one device, and the same by device."
            + (
                " The batch of a device stays the same."
                if forecast.grow == "batch"
                else " The global batch stays the same."
            ),
        ),
    ]
    if forecast.noise_scale is not None:
        terms.append(
            (
                "Useful",
                "Efficiency with samples counted for what they are worth: beyond the noise scale of "
                f"{formats.quantity(forecast.noise_scale)} a larger batch brings hardly more (McCandlish et al. 2018). "
                "Against one device with the best batch for it.",
            )
        )
    return terms
