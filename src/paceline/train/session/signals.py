"""Signals that ask a run to save."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from paceline.train.session.status_exchange import Request


class SaveSignals:
    """SIGUSR1: save. SIGTERM and Ctrl-C: save and exit; a second one exits at once, by the previous handler."""

    def __init__(self, will_leave: Callable[[], None]) -> None:
        """
        Args:
            will_leave: called in a signal handler when this worker was asked to save and to end.
        """
        self.requests: set[Request] = set()
        self.is_interrupted = False
        """Whether Ctrl-C was pressed."""
        self._will_leave = will_leave
        self._handlers: dict[int, Any] = {}
        """The previous ones, by the numbers of signals."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._save)
        self._handlers[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._leave)
        # Where Ctrl-C is ignored, as in the background of a shell, it stays so.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._handlers[signal.SIGINT] = signal.signal(signal.SIGINT, self._leave)

    def _save(self, _number: int, _frame: FrameType | None) -> None:
        self.requests.add(Request.SAVE)

    def _leave(self, number: int, _frame: FrameType | None) -> None:
        self.requests.add(Request.LEAVE)
        self._will_leave()
        self.is_interrupted |= number == signal.SIGINT
        signal.signal(number, self._handlers[number])

    def close(self) -> None:
        """Put the previous handlers back."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
