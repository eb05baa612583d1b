"""`paceline memory`: what devices would hold."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.console import table_console
from paceline.cli.options import DataDir, JobArgument, Settings, parse_size
from paceline.workflows import memory as workflow


def memory(
    job: JobArgument,
    devices: Annotated[int, typer.Option(min=1, metavar="N", help="Number of devices.")] = 8,
    micro_batch_size: Annotated[
        int | None,
        typer.Option(
            "--micro-batch", min=1, metavar="SAMPLES", help="Samples in a forward pass (default: a virtual shard)."
        ),
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of a device, such as 80GB, to say what fits.")
    ] = None,
    data: DataDir = None,
    settings: Settings = None,
) -> None:
    """Say what each device would hold under each strategy, without devices."""
    found = workflow.memory(
        job,
        devices,
        micro_batch_size=micro_batch_size,
        device_bytes=None if device_memory is None else parse_size(device_memory, "--device-memory"),
        data=data,
        settings=settings or (),
    )
    table_console(120).print(found.table())
