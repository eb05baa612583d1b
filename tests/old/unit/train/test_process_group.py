"""The end of a process: nothing that needs Python is under way when the interpreter is taken down."""

from __future__ import annotations

import hashlib
import sys
import threading
from pathlib import Path

import pytest

from paceline.train.process.process_group import GLOO_THREAD, await_rest


@pytest.mark.skipif(sys.platform != "linux", reason="threads are told apart by their names in /proc")
def test_who_leaves_waits_for_a_thread_that_has_to_let_go_of_something() -> None:
    started, let_go = threading.Event(), threading.Event()

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(GLOO_THREAD)
        started.set()
        hashlib.sha256(bytes(30_000_000))  # without Python's lock, as a collective is
        let_go.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert started.wait(10)
        await_rest()
        assert let_go.is_set()
    finally:
        thread.join()
