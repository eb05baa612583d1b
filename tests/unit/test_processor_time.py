from __future__ import annotations

import os
import threading

from tests.kit.processor_time import processor_s


def test_processor_time_never_falls_while_threads_begin_and_end() -> None:
    """Once all the time before a test was charged to it, since a thread had ended while its reading began."""
    has_ended = threading.Event()

    def begin_and_end_threads() -> None:
        while not has_ended.is_set():
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()

    busy = threading.Thread(target=begin_and_end_threads)
    busy.start()
    try:
        readings = [processor_s(os.getpid()) for _ in range(300)]
    finally:
        has_ended.set()
        busy.join()
    assert readings == sorted(readings)
