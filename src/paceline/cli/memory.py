"""`paceline memory`: what devices would hold."""

from __future__ import annotations

from typing import Any

from paceline.cli.console import table_console
from paceline.cli.options import options_of
from paceline.workflows import memory as workflow


@options_of(workflow.memory, micro_batch_size={"names": ("--micro-batch", "--micro-batch-size"), "metavar": "SAMPLES"})
def memory(**options: Any) -> None:
    """Say how much memory each device would need under each strategy; needs no devices."""
    table_console(120).print(workflow.memory(**options).table())
