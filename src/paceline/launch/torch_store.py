"""The store by which programs that call `torch.distributed.init_process_group` themselves find each other.

As under torchrun, every rank gets an address and a port and connects as a client (TORCHELASTIC_USE_AGENT_STORE). The
launcher holds the socket, which no other job can take; rank 0 inherits it, and serves the store as soon as somebody
connects. A program that never does pays for one socket and one sleeping thread.
"""

from __future__ import annotations

import importlib
import select
import socket
import sys
import threading
import time
from typing import Any

IMPORT_WAIT_S = 2.0
"""How long the program may take to start loading torch; if it does not, a child process is the client."""


def serve_store_when_called(descriptor: int) -> None:
    """Serve a store at a listening socket once the first client has come, to the end of this process."""

    def serve() -> None:
        called = select.poll()
        called.register(descriptor, select.POLLIN)
        called.poll()
        store_type = _await_torch().TCPStore
        with socket.socket(fileno=descriptor) as listening:
            host, port = listening.getsockname()[:2]
            listening.detach()  # the store owns it now
        store = store_type(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
        threading.Event().wait()  # as long as the process lasts, and the interpreter need not take it down
        del store

    threading.Thread(target=serve, name="torch-store", daemon=True).start()


def _await_torch() -> Any:
    """torch.distributed once the program has loaded it completely, so that two threads do not load it at once."""
    deadline = time.monotonic() + IMPORT_WAIT_S
    while "torch" not in sys.modules and time.monotonic() < deadline:
        time.sleep(0.01)
    while "torch" in sys.modules:
        distributed = getattr(sys.modules["torch"], "distributed", None)
        if hasattr(distributed, "TCPStore"):
            return distributed
        time.sleep(0.01)
    return importlib.import_module("torch.distributed")
