"""`paceline probe`: times real steps of a job on 1, 2, … N workers, for plans to be made from."""

from __future__ import annotations

import json
from typing import Any

from paceline.cli.console import print_table
from paceline.cli.options import AsJson, options_of
from paceline.spec import StepRow
from paceline.spec.codec import to_mapping
from paceline.words import duration
from paceline.workflows import probe as workflow


@options_of(workflow.probe, budget={"min": 1}, out={"metavar": "FILE"})
def probe(as_json: AsJson = False, **options: Any) -> None:
    """Time real steps of a job on 1, 2, 4, … workers; write them into cluster.json, for `paceline plan`."""
    timing = workflow.probe(**options)
    if as_json:
        print(json.dumps({"timing": to_mapping(timing), "cluster": str(options["out"])}))
        return
    print_table([_cells(row) for row in timing.steps], pipe_columns=100)
    print(f"{timing.job}: {timing.num_parameters:,} parameters on {timing.device}")
    print(options["out"])


def _cells(row: StepRow) -> dict[str, str]:
    assert row.step_time_s is not None
    parts = {"waits for gradients": row.sync_time_s, "waits for samples": row.loading_s}
    return {
        "nodes x workers": row.layout_name,
        "micro-batch": f"{row.num_passes} x {row.micro_batch_size}",
        "step": duration(row.step_time_s),
        "varies by": f"{100 * row.spread:.0f} %",
        "samples/s": f"{row.global_batch_size / row.step_time_s:,.0f}",
        **{name: "" if seconds is None else duration(seconds) for name, seconds in parts.items()},
        **({} if row.peak_memory_bytes is None else {"peak GiB": f"{row.peak_memory_bytes / 2**30:.2f}"}),
    }
