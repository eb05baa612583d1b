"""`paceline.watch`: runs in the terminal, while they train."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

from paceline.errors import PacelineError
from paceline.workflows.arguments import checked

INTERVAL_S = 1.0
"""How often the tables are brought up to date."""


@checked
def watch(runs: Iterable[Path | str] | Path | str) -> None:
    """Show runs side by side in the terminal, and keep the tables up to date until all have ended, or Ctrl-C.

    Loss, throughput, where a step's time goes, evaluations, what every worker does, events, and how
    the jobs of the runs differ. Where standard output is no terminal, the tables are printed once.

    Example: `paceline.watch("runs/mnist-lenet")`.

    Args:
        runs: run folders, or one of them; runs of different jobs too.

    Raises:
        PacelineError: no such folder.
    """
    from rich.console import Console
    from rich.live import Live

    from paceline.hardware.nvml import gpu_use
    from paceline.report.watch import read_run, watch_table

    folders = [Path(run) for run in ([runs] if isinstance(runs, Path | str) else runs)]
    if not folders:
        raise PacelineError("watch needs at least one run folder, such as runs/mnist-lenet.")
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=160)
    with Live(console=console, auto_refresh=False) as shown, contextlib.suppress(KeyboardInterrupt):
        while True:
            found = [read_run(folder) for folder in folders]
            shown.update(watch_table(found, gpu_use()), refresh=console.is_terminal)
            if not console.is_terminal or all(run.state in ("finished", "failed", "silent") for run in found):
                break
            time.sleep(INTERVAL_S)
