"""The command line as a program: `paceline`, `python -m paceline`."""

from __future__ import annotations

import signal
import sys

from paceline.cli.commands import main as command_line


def main() -> None:
    """Run a command; one that a signal ends cleans up."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # while workers run, the launcher heeds them
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    command_line()


if __name__ == "__main__":
    main()
