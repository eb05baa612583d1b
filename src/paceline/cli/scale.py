"""`paceline scale`: the scaling study, devices x time x accuracy."""

from __future__ import annotations

import json
from typing import Any

from paceline.cli.options import AsJson, options_of, to_stderr
from paceline.workflows import scale as workflow
from paceline.workflows.jobs import resolve_job
from paceline.workflows.run_folder import new_run_dir


@options_of(
    workflow.scale,
    devices={
        "metavar": "COUNTS",
        "default": "1,2",
        "help": "The numbers of devices, one worker each, such as 1,2,4 or 1..4.",
    },
)
def scale(as_json: AsJson = False, **options: Any) -> None:
    """Train a job on 1, 2, … N devices and write the study: scaling.json, scaling.csv, report.html."""
    from rich.console import Console

    job = resolve_job(options.pop("job"), options.pop("settings", ()), options.pop("data", None))
    study_dir = new_run_dir(options.pop("out", None), f"{job.name}-scaling")
    study = workflow.scale(job, out=study_dir, say=to_stderr, **options)
    if as_json:
        print(json.dumps(json.loads((study_dir / "scaling.json").read_text(encoding="utf-8"))))
    else:
        from paceline.report.study_page import study_table

        Console(markup=False).print(study_table(study))
        print(study_dir / "report.html")
