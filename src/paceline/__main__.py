"""The command line as a program: `paceline`, `python -m paceline`."""

from __future__ import annotations

import signal
import sys
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that end a process without a word unless it heeds them; while workers run, the launcher does."""


class _Ended(SystemExit):
    """A signal came while no workers ran."""


def main() -> None:
    """Run a command; a signal before workers are started, or after they have ended, is one sentence too."""
    if sys.argv[1:2] != ["agent"]:  # which ends at once, and its workers with it
        for number in _ENDING:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _end)
    try:
        from paceline.cli import main as command_line

        command_line()
    except _Ended as end:
        name = signal.Signals(int(end.code or 0) - 128).name
        print(f"paceline: ended by {name}.", file=sys.stderr)
        raise
    except KeyboardInterrupt:  # while modules are loaded; later the command line heeds it
        print("paceline: interrupted; nothing was started.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def _end(number: int, _frame: FrameType | None) -> None:
    raise _Ended(128 + number)


if __name__ == "__main__":
    main()
