"""The command line as a program: `paceline`, `python -m paceline`."""

from __future__ import annotations

import signal
import sys
from types import FrameType


def main() -> None:
    """Run a command; a signal before workers are started, or after they have ended, is one sentence too."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # while workers run, the launcher heeds them
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)
    try:
        from paceline.cli import main as command_line

        command_line()
    except KeyboardInterrupt:  # while modules are loaded; later the command line heeds it
        print("paceline: interrupted; nothing was started.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def _end(number: int, _frame: FrameType | None) -> None:
    print(f"paceline: ended by {signal.Signals(number).name}.", file=sys.stderr)
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
