"""Calls between workers: torch's RPC, set up over a store that the workers share already."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary

import torch
from torch.distributed import PrefixStore, Store, rpc  # type: ignore[attr-defined]
from torch.distributed.rendezvous import register_rendezvous_handler

from paceline.errors import PeerLost

# RPC finds functions by name and never objects, and a process has one RPC agent: what that serves is found here, as
# long as somebody keeps it alive. (RRefs would do without, at the price of reference counts across dying workers.)
_SERVED: WeakValueDictionary[type, Any] = WeakValueDictionary()


def serve(servant: object) -> None:
    """Let the functions that others call find `servant`: one of its class a process."""
    _SERVED[type(servant)] = servant


def served(kind: type) -> Any:
    return _SERVED[kind]


def connect(store: Store, rank: int, ranks: Sequence[int], timeout_s: float) -> None:
    """Begin to call and be called by the workers `ranks`. A common act of all of them.

    Calls are answered from now on, so whatever they need has to be there before. The process group of the run, if
    there is one, stays as it is; the addresses are those of the interface in TP_SOCKET_IFNAME.
    """
    # RPC takes a URL, never a store; only a scheme of its own can stand for this one.
    scheme = f"store{uuid4().hex}"
    meeting = [(PrefixStore(f"rpc{_num_connections(store, rank)}", store), ranks.index(rank), len(ranks))]
    register_rendezvous_handler(scheme, lambda _url: iter([meeting.pop()]))
    store_timeout = store.timeout  # type: ignore[attr-defined]
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"{scheme}://", rpc_timeout=timeout_s, num_worker_threads=max(16, 2 * len(ranks))
    )
    try:
        with warnings.catch_warnings():
            # Torch warns of a use of its own.
            warnings.filterwarnings("ignore", "You are using a Backend .* as a ProcessGroup")
            rpc.init_rpc(_name(rank), rank=ranks.index(rank), world_size=len(ranks), rpc_backend_options=options)
    finally:
        store.set_timeout(store_timeout)  # init_rpc changes it for everybody


def _num_connections(store: Store, rank: int) -> int:
    """How often this rank has connected over `store`: equal on all ranks, as they do it together."""
    return int(store.add(f"paceline/rpc/{rank}", 1))


def disconnect(timeout_s: float | None) -> None:
    """End it. With a timeout: a common act of all that connected; None: at once, whoever else is still there."""
    try:
        rpc.shutdown(graceful=timeout_s is not None, timeout=timeout_s or 0)
    except RuntimeError:
        if timeout_s is None:
            raise
        # Somebody died on the way out. Nobody needs an answer any more, and this side is down all the same.


def call(rank: int, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> torch.futures.Future[Any]:
    """Begin to run `function` (of a module's top level) on worker `rank`."""
    try:
        future: torch.futures.Future[Any] = rpc.rpc_async(_name(rank), function, args=arguments, timeout=timeout_s)
    except RuntimeError as error:  # some broken connections are noticed here, others in the answer
        future = torch.futures.Future()
        future.set_exception(error)
    return future


def answer(future: torch.futures.Future[Any], rank: int, role: str) -> Any:
    """What worker `rank` answered.

    Raises:
        PeerLost: it cannot be reached, or does not answer in time; says its rank and `role`.
    """
    try:
        return future.wait()
    except RuntimeError as error:
        if _is_from_remote_code(error):
            raise
        raise lost(rank, role, str(error).splitlines()[0]) from None


def lost(rank: int, role: str, reason: str) -> PeerLost:
    return PeerLost(
        f"Worker {rank}, {role}, cannot be reached any more ({reason}); what it held is lost: start again from the "
        "last checkpoint.",
        rank=rank,
    )


def is_unreachable(future: torch.futures.Future[Any]) -> bool:
    """Whether a finished call failed on its way: the worker is gone, or did not answer in time."""
    try:
        future.wait()
    except RuntimeError as error:
        return not _is_from_remote_code(error)
    return False


def _is_from_remote_code(error: RuntimeError) -> bool:
    return "On WorkerInfo(" in str(error)


def _name(rank: int) -> str:
    return f"worker{rank}"
