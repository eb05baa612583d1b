"""Ends a worker whose program has ended, but whose exit handlers never return."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable

PATIENCE_S = 300.0
"""How long handlers may take; some send results over a network."""


def watch_exit_handlers(give_up: Callable[[str], None]) -> None:
    """Call when the program has ended: once its threads have ended too, its exit handlers have `PATIENCE_S`.

    Args:
        give_up: called with a sentence from another thread if they take longer; has to end the process.
    """
    main_thread = threading.main_thread().ident

    def look() -> None:
        frame = sys._current_frames().get(main_thread or 0)
        where = ""
        if frame is not None:
            where = f", and is in {frame.f_code.co_name} (line {frame.f_lineno} of {frame.f_code.co_filename})"
        give_up(
            f"The script has ended, but one of its exit handlers (atexit) has not returned within {PATIENCE_S:g} s"
            f"{where}; let it return, or call os._exit at the script's end."
        )

    def begin() -> None:
        timer = threading.Timer(PATIENCE_S, look)
        timer.daemon = True
        timer.start()

    atexit.register(begin)  # the last one that is registered is called first
