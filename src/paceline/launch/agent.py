"""The agent of a node: torch's elastic agent, as torchrun starts it, tied to the life of what started it.

    python -m paceline.launch.agent --nnodes 2 --nproc-per-node 8 … train.py --flag

The arguments are torchrun's. A pipe as standard input is the line to the launcher: "TERM" asks the workers to end,
"USR1" to save a checkpoint, and its end means that the launcher, or the connection to it, is gone: everything is
killed. Without it, as in a pod, the agent prepares the run folder and reports a failure itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import multiprocessing
import os
import signal
import socket
import stat
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

gc.disable()  # nothing that modules define is garbage, and to look for it is a seventh of the time to load torch

# ruff: noqa: E402
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, and not in its list
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from paceline import env
from paceline.diagnosis.failures import describe_failure
from paceline.launch import worker
from paceline.launch.run import prepare


def main(arguments: Sequence[str]) -> NoReturn:
    run_dir = env.value(env.RUN_DIR, Path)
    assert run_dir is not None
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # of workers that begin just then, too
    kind = os.fstat(0).st_mode
    has_launcher = stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)
    if has_launcher:
        line = os.dup(0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # workers find an empty standard input
        threading.Thread(target=_obey, args=(line,), name="launcher", daemon=True).start()
    else:
        prepare(run_dir)  # no worker starts before all agents have met
    logging.disable(logging.ERROR)  # the report says it
    config, _, words = torchrun.config_from_args(torchrun.parse_args(["--log-dir", os.devnull, *arguments]))
    config.logs_specs = _NoLogs(os.devnull)
    _choose_address(config)
    if config.max_nodes == 1:
        config.rdzv_backend = OneNode.name
        rendezvous_handler_registry.register(OneNode.name, lambda of: OneNode("127.0.0.1", 0, 0, 1, of.run_id, 0))
    # The process beside each worker begins at once: this one has loaded all that it needs. It takes no lock that a
    # thread of this one may hold: Python and the C library make theirs anew, and it calls nothing of torch's.
    config.start_method = "fork"
    warnings.simplefilter("ignore", DeprecationWarning)  # Python's own on that; PYTHONWARNINGS could make it an error
    # Restarted workers would read addresses of dead peers from the store of the agents.
    os.environ |= {env.AGENT: str(os.getpid()), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    gc.freeze()  # the processes that are forked share its memory
    gc.enable()
    exit_code = 0
    try:
        elastic_launch(config, worker.main)(words[words.index("-u") + 1 :])
    except ChildFailedError:
        exit_code = 1
    except SignalException as ended:
        exit_code = 128 + ended.sigval
    if exit_code == 1 and not has_launcher and (report := describe_failure(run_dir)) is not None:
        saved = report.save(run_dir)
        print(f"\npaceline: {report.text()}", f"The report: {saved}" if saved else "", sep="", file=sys.stderr)
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed by the caller
        stream.flush()
    os._exit(exit_code)  # not through the interpreter's shutdown, which may wait for threads of torch


class OneNode(StaticTCPRendezvous):
    """The rendezvous of an agent without others. Torch's own serves a store on the network, and rests at random for up
    to 0.3 s in each round, so that agents of many nodes do not come at once."""

    name, use_agent_store = "one-node", False

    def get_backend(self) -> str:
        return self.name

    def next_rendezvous(self) -> RendezvousInfo:
        # Held without listening: rank 0 serves its store there, seconds later, and no other run is given the same port.
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind((self.master_addr, 0))
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(*self._held.getsockname()))


class _NoLogs(DefaultLogsSpecs):
    """Logs are the supervisors' work: torch's agent would follow /dev/null, with two threads a worker."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        return dataclasses.replace(super().reify(envs), tee_stdouts={}, tee_stderrs={})


def _obey(line: int) -> None:
    """Do what the launcher asks for until it is gone."""
    with os.fdopen(line, "rb", buffering=0) as requests:
        for request in requests:
            if request.strip() == b"TERM":
                os.kill(os.getpid(), signal.SIGTERM)
            supervisors = multiprocessing.active_children() if request.strip() == b"USR1" else []
            for pid in [one.pid for one in supervisors if one.pid is not None]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGKILL)  # the supervisors of the workers see it, and kill all that they have started


def _choose_address(config: LaunchConfig) -> None:
    """Have agents meet, and workers talk, at the address that leads to the first node, if no other is named."""
    host = config.rdzv_endpoint.rpartition(":")[0].strip("[]")
    if not host or config.local_addr is not None:
        return
    with contextlib.suppress(OSError):  # no way leads there: the rendezvous says so
        config.local_addr = own = env.address_towards(host)
        # Torch would compare names, which on many machines lead to 127.0.1.1.
        config.rdzv_configs.setdefault("is_host", own in {entry[4][0] for entry in socket.getaddrinfo(host, None)})
        of_own = (name for name, one in env.addresses() if one == own)
        interface = "lo" if own.startswith("127.") else next(of_own, None)
        if interface is not None and not any(map(env.text, env.INTERFACE_VARIABLES)):
            os.environ.update(dict.fromkeys(env.INTERFACE_VARIABLES, interface))


if __name__ == "__main__":
    main(sys.argv[1:])
