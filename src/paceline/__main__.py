"""The command line as a program, `paceline` and `python -m paceline`; an interrupt ends it while modules are loaded."""

import signal

_when_loaded = signal.signal(signal.SIGINT, signal.SIG_DFL)
from paceline.cli.commands import main  # noqa: E402

signal.signal(signal.SIGINT, _when_loaded)

if __name__ == "__main__":
    main()
