"""Calls between workers over sockets that nobody else can use.

Workers of one node call each other over Unix sockets in a folder that only their user can enter. Between nodes the
sockets are TCP ones on the named interface, and whoever connects must prove, by an HMAC over the server's random
challenge, that it knows a secret that the workers share through their store. Messages are those of `plain_messages`:
nothing that is received is unpickled, and only the handlers that a worker names can be called.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from paceline import env
from paceline.comm.links import node_identity
from paceline.errors import PeerLost
from paceline.network_addresses import address_towards, addresses
from paceline.plain_messages import MAX_TEXT_BYTES, decode, empty_tensors, encode, memory

_SECRET_BYTES = 32
_HANDSHAKE_S = 5.0
"""A connection that has not proved by then that it may call is closed."""
_ACCEPT_AGAIN_S = 0.1


class Peers:
    """One worker's connections to the others: it answers their calls and calls them.

    Every thread has its own connection to every peer that it calls, and every connection has its own thread at the
    peer, so a call that waits for an answer holds up no other.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: Sequence[int],
        timeout_s: float,
        handlers: Mapping[str, Callable[..., Any]],
        classes: Sequence[type],
    ) -> None:
        """A collective of the workers `ranks`.

        Args:
            handlers: what others may call here, by name; each runs in a thread of its caller's connection.
            classes: the dataclasses that messages may contain.
        """
        self._rank = rank
        self.timeout_s = timeout_s
        self._handlers = handlers
        self._classes = classes
        number = store.add(f"paceline/peers/{rank}", 1)  # equal on all ranks: they connect together
        self._store = PrefixStore(f"peers{number}", store)
        self._secret = self._agreed_secret(is_first=rank == ranks[0])
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._listening = self._open(ranks)
        self._connections: dict[tuple[int, int], socket.socket] = {}
        """To a rank, from a thread of this worker."""
        self._open_connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._accept, name="paceline-peers", daemon=True).start()

    def _agreed_secret(self, is_first: bool) -> bytes:
        if is_first:
            self._store.set("secret", secrets.token_hex(_SECRET_BYTES))
        return bytes(self._store.get("secret"))

    def _open(self, ranks: Sequence[int]) -> socket.socket:
        """Listen where all the others can connect, and tell them the address."""
        self._store.set(f"node{self._rank}", node_identity())
        nodes = {bytes(self._store.get(f"node{rank}")) for rank in ranks}
        if len(nodes) == 1:
            # In /tmp whatever TMPDIR says: the kernel takes no address of more than 107 bytes.
            self._folder = tempfile.TemporaryDirectory(prefix="paceline-peers-", dir="/tmp")  # with mode 0700
            address = f"{self._folder.name}/socket"
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listening.bind(address)
            listening.listen(4096)
        else:
            host = _own_address()
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listening = socket.create_server((host, 0), family=family, backlog=4096)
            address = f"{host} {listening.getsockname()[1]}"
        self._store.set(f"address{self._rank}", address)
        return listening

    def call(self, rank: int, name: str, *arguments: Any) -> Call:
        """Begin to run handler `name` on worker `rank`; on this worker itself, run it at once in this thread."""
        if rank == self._rank:
            return Call(rank, answer=self._handlers[name](*arguments))
        deadline_s = time.monotonic() + self.timeout_s
        try:
            connection = self._connection_to(rank)
            connection.settimeout(self.timeout_s)
            _send(connection, *encode((name, *arguments)))
        except OSError as problem:
            self._forget(rank)
            return Call(rank, problem=problem)
        return Call(rank, connection, deadline_s, self._classes, on_failure=lambda: self._forget(rank))

    def close(self) -> None:
        """Close all connections; whoever calls this worker from now on hears that it is gone."""
        with self._lock:
            self._is_closed = True
            connections = list(self._open_connections)
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self._folder is not None:
            self._folder.cleanup()

    def _connection_to(self, rank: int) -> socket.socket:
        key = rank, threading.get_ident()
        if key not in self._connections:
            address = bytes(self._store.get(f"address{rank}")).decode()
            if address.startswith("/"):
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.settimeout(self.timeout_s)
                connection.connect(address)
            else:
                host, port = address.split()
                connection = socket.create_connection((host, int(port)), timeout=self.timeout_s)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._remember(connection)
            connection.sendall(self._proof(_read(connection, _SECRET_BYTES)))
            self._connections[key] = connection
        return self._connections[key]

    def _forget(self, rank: int) -> None:
        """Close this thread's connection to a peer that did not answer: a late answer must not meet the next call."""
        connection = self._connections.pop((rank, threading.get_ident()), None)
        if connection is not None:
            with self._lock:
                self._open_connections.discard(connection)
            connection.close()

    def _proof(self, challenge: bytes) -> bytes:
        return hmac.digest(self._secret, challenge, "sha256")

    def _remember(self, connection: socket.socket) -> None:
        with self._lock:
            if self._is_closed:
                connection.close()
                raise ConnectionAbortedError("this worker has closed its connections")
            self._open_connections.add(connection)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
                self._remember(connection)
            except OSError:
                if self._is_closed:
                    return
                time.sleep(_ACCEPT_AGAIN_S)  # out of descriptors, say: others may be closed soon
                continue
            threading.Thread(target=self._answer, args=(connection,), name="paceline-peer", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        """Run what the peer calls, one call after the other, until it or this worker closes the connection."""
        try:
            self._answer_calls(connection)
        except OSError:
            return  # closed, here or there
        finally:
            connection.close()
            with self._lock:
                self._open_connections.discard(connection)

    def _answer_calls(self, connection: socket.socket) -> None:
        connection.settimeout(_HANDSHAKE_S)
        challenge = secrets.token_bytes(_SECRET_BYTES)
        connection.sendall(challenge)
        if not hmac.compare_digest(_read(connection, _SECRET_BYTES), self._proof(challenge)):
            return
        connection.settimeout(None)
        while True:
            name, *arguments = _receive(connection, self._classes)
            try:
                answer = encode(("result", self._handlers[name](*arguments)))
            except Exception:
                answer = encode(("error", traceback.format_exc()))
            _send(connection, *answer)


@dataclass
class Call:
    """A call to another worker: under way on a connection, or answered."""

    rank: int
    connection: socket.socket | None = None
    deadline_s: float = 0.0
    classes: Sequence[type] = ()
    on_failure: Callable[[], None] = lambda: None
    answer: Any = None
    problem: OSError | None = None

    @property
    def is_done(self) -> bool:
        """Whether `result` returns, or raises, without waiting long."""
        if self.connection is None or time.monotonic() >= self.deadline_s:
            return True
        readable = select.poll()  # unlike select(), for any number of open files
        readable.register(self.connection, select.POLLIN)
        return bool(readable.poll(0))

    def result(self, role: str) -> Any:
        """What the worker answered.

        Args:
            role: what the worker does, for the error.

        Raises:
            PeerLost: the worker cannot be reached, or does not answer in time; says its rank and `role`.
            RuntimeError: the handler raised an exception there; has its traceback.
        """
        if self.connection is not None:
            connection, self.connection = self.connection, None
            try:
                connection.settimeout(max(0.001, self.deadline_s - time.monotonic()))
                kind, self.answer = _receive(connection, self.classes)
                if kind == "error":
                    raise RuntimeError(f"On worker {self.rank}:\n{self.answer}")
            except OSError as problem:
                self.on_failure()
                self.problem = problem
        if self.problem is not None:
            raise lost(self.rank, role, str(self.problem) or type(self.problem).__name__)
        return self.answer


def lost(rank: int, role: str, reason: str) -> PeerLost:
    return PeerLost(
        f"Worker {rank}, {role}, cannot be reached any more ({reason}); what it held is lost: start again from the "
        "last checkpoint.",
        rank=rank,
    )


def _own_address() -> str:
    """The address of this node that the workers of other nodes can reach.

    It is that of the interface that the environment names; else the one on the way to the rendezvous of the run.
    """
    name = env.own_interface()
    if name is not None and name in (one for _, one in socket.if_nameindex()):
        return addresses(name)[0][1]
    found = address_towards(urlsplit(env.worker_facts().init_method).hostname or socket.gethostname())
    others = [one for _, one in addresses()]
    return others[0] if found.startswith("127.") and others else found


def _send(connection: socket.socket, text: bytes, tensors: Sequence[Tensor]) -> None:
    connection.sendall(len(text).to_bytes(8, "big") + text)
    for tensor in tensors:
        connection.sendall(memory(tensor))


def _receive(connection: socket.socket, classes: Sequence[type]) -> Any:
    length = int.from_bytes(_read(connection, 8), "big")
    if length > MAX_TEXT_BYTES:
        raise ConnectionAbortedError(f"a message of {length:,} bytes was announced, which no worker sends")
    text = _read(connection, length)
    tensors = empty_tensors(text)
    for tensor in tensors:
        _read_into(connection, memory(tensor))
    return decode(text, tensors, classes)


def _read(connection: socket.socket, length: int) -> bytes:
    received = bytearray(length)
    _read_into(connection, memoryview(received))
    return bytes(received)


def _read_into(connection: socket.socket, view: memoryview) -> None:
    while view:
        num_received = connection.recv_into(view)
        if not num_received:
            raise ConnectionResetError("the connection was closed")
        view = view[num_received:]
