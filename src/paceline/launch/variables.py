"""Environment variables before a program. All users of a node can read a command line, so secrets are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from paceline.errors import LaunchError

_SECRET = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|(^|_|API|ACCESS|PRIVATE)KEY)S?(_|$)", re.IGNORECASE
)


def looks_secret(name: str) -> bool:
    """Whether a variable of this name is likely to hold a secret, such as HF_TOKEN."""
    return _SECRET.search(name) is not None


def with_variables(program: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """`program` behind `env`, which sets `environ` for it: ("env", "A=1", "python", …).

    Raises:
        LaunchError: a variable looks like a secret, or its name is invalid.
    """
    for name, value in environ.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
            raise LaunchError(f"{name!r} cannot be set as an environment variable on another node.")
        if looks_secret(name):
            raise LaunchError(
                f"{name} looks like a secret, and a command line can be read by everybody on the node; let the node "
                "itself set it: in ~/.profile, in ~/.ssh/environment, or from a Kubernetes Secret."
            )
    if not environ:
        return tuple(program)
    return ("env", *(f"{name}={value}" for name, value in environ.items()), *program)
