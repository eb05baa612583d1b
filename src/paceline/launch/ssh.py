"""Runs a program on another node over SSH: the command line of the local client, and the cause of its failure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.errors import LaunchError
from paceline.launch.variables import with_variables

CONNECT_TIMEOUT_S = 10
ALIVE_INTERVAL_S = 5
"""The interval of the client's keep-alive messages; three unanswered ones mean a lost connection."""

SSH_FAILED = 255
"""The exit code of a failure of ssh itself; any other one is that of the program."""

# ssh takes the first value of an option: neither the user's configuration nor `options` changes these.
_OPTIONS = (
    # Nobody can type a password or "yes".
    "BatchMode=yes",
    "StrictHostKeyChecking=yes",
    f"ConnectTimeout={CONNECT_TIMEOUT_S}",
    f"ServerAliveInterval={ALIVE_INTERVAL_S}",
    "ServerAliveCountMax=3",
    # With connection sharing, the first connection would outlive its program.
    "ControlMaster=no",
    # Two connections with the same forwarded port fail, and a configured command would replace ours.
    "ClearAllForwardings=yes",
    "ForwardAgent=no",
    "ForwardX11=no",
    "PermitLocalCommand=no",
    "RemoteCommand=none",
)


def ssh_argv(
    host: str, program: Sequence[str], *, cwd: Path, environ: Mapping[str, str], options: Sequence[str] = ()
) -> tuple[str, ...]:
    """The local command whose standard input and output are those of `program`, run in `cwd` on `host`.

    It requests no terminal, so that bytes pass unchanged: a program whose client dies sees its standard input end, and
    must then end by itself. The node's shell must read POSIX quotes. `options` are arguments for ssh, such as
    ("-F", "config").

    Raises:
        LaunchError: `host` would be read as an option, or `environ` holds what looks like a secret.
    """
    if not host or host.startswith("-") or "\0" in host:
        raise LaunchError(f"{host!r} is not the name of a node; it should look like gpu1, kim@gpu1 or 10.0.0.7.")
    fixed = [word for option in _OPTIONS for word in ("-o", option)]
    # The shell is replaced by the program.
    command = f"cd -- {shlex.quote(str(cwd))} && exec {shlex.join(with_variables(program, environ))}"
    return ("ssh", "-T", *fixed, *options, "--", host, command)


# The first pattern found in the output of ssh or the node's shell gives the sentence for the user.
_REASONS: tuple[tuple[str, str], ...] = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key for \S+ has changed|DNS SPOOFING",
        "{host} shows another host key than the one known for it: somebody else may be answering; if the machine was "
        "set up anew, run ssh-keygen -R {name} and connect once by hand.",
    ),
    (
        r"Host key verification failed|host key is known for",
        "{host} is not among the known hosts; connect once by hand (ssh {host}) and compare its key.",
    ),
    (r"Could not resolve hostname", "The name {name} is not known to this machine; check it, or use an address."),
    (
        r"Permission denied \(|Too many authentication failures",
        "{host} does not let you in; run ssh-copy-id {host} once, or name the right key in ~/.ssh/config.",
    ),
    (
        r"Load key .*(bad permissions|invalid format)|UNPROTECTED PRIVATE KEY",
        "A private key for {host} is unusable; it should be readable by you alone (chmod 600).",
    ),
    (r"Connection refused", "Nothing answers SSH on {host}; start sshd there, or set its port in ~/.ssh/config."),
    (
        r"Connection timed out|Operation timed out|No route to host|Network is unreachable",
        "{host} cannot be reached over the network; check that it is up and that no firewall drops SSH.",
    ),
    (
        r"kex_exchange_identification|banner exchange|Connection (closed|reset) by \S+ port",
        "{host} hung up before the login; see its sshd log (MaxStartups, AllowUsers, TCP wrappers).",
    ),
    (
        r"Timeout, server \S+ not responding|closed by remote host|Broken pipe|Connection reset",
        "The connection to {host} was lost; the machine or the network between went down.",
    ),
)
_REMOTE_REASONS: tuple[tuple[str, str], ...] = (
    (
        r"cd:.*(can't cd to|[Nn]o such file or directory|[Nn]ot a directory|[Pp]ermission denied)",
        "{host} has no such folder to work in, or closes it to your user; run from a folder that every node shares.",
    ),
    (r"No module named '?paceline", "Python on {host} has no Paceline; install the same version there as here."),
)
# Exit codes of POSIX shells and env for a missing program and for a file that is not executable.
_EXIT_REASONS = {
    126: "The Python named is no program that your user may run on {host}.",
    127: "{host} has no such Python; install the environment at the same path on every node.",
}


def explain_ssh_failure(exit_code: int, stderr: str, host: str = "the node") -> str | None:
    """Why a program could not run on `host`, and the remedy, in a sentence; None if ssh is not the reason.

    `stderr` is what the client of `ssh_argv` wrote before it ended with `exit_code`.
    """
    reasons = _REASONS if exit_code == SSH_FAILED else _REMOTE_REASONS if exit_code > 0 else ()
    sentence = next((text for pattern, text in reasons if re.search(pattern, stderr)), _EXIT_REASONS.get(exit_code))
    if sentence is None and exit_code == SSH_FAILED:
        last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "no reason given")
        return f"Starting a program on {host} by ssh failed: {last}"
    if sentence is None:
        return None
    text = sentence.format(host=host, name=host.rpartition("@")[2])
    return text[0].upper() + text[1:]
