"""Everything Paceline raises on purpose.

Anything else that escapes is a bug in Paceline or in the user's own code and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_MOST_SHOWN = 100
"""Characters of a value in a sentence."""
_LONGEST_SENTENCE = 1_500


def shown(value: Any) -> str:
    """`value` as it is written in Python, short enough for a sentence."""
    return shortened(repr(value))


def shortened(text: str, most: int = _MOST_SHOWN) -> str:
    """A text of at most so many characters: its beginning and its end."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most - most // 2 - 1) :]}"


def did_you_mean(word: str, known: Iterable[str], form: str = "{} ") -> str:
    """ "did you mean 'ring'? " for the nearest of the words that there are, in a `form`; empty where none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5) if len(word) < 100 else []
    return form.format(f"did you mean '{near[0]}'?") if near else ""


def printable(text: str) -> str:
    """`text` with control characters written as in Python, but for line ends and tabs."""
    return "".join(one if one.isprintable() or one in "\n\t" else repr(one)[1:-1] for one in text)


class PacelineError(Exception):
    """A mistake that the user can correct; its message is one sentence.

    Messages may quote any input: control characters are escaped, and long messages are shortened.
    """

    exit_code = 2

    def __init__(self, message: str = "") -> None:
        super().__init__(shortened(printable(message), _LONGEST_SENTENCE))


def reason_of(problem: BaseException | str) -> str:
    """A problem's own text; that of a system's error without its number and path."""
    return (problem.strerror if isinstance(problem, OSError) else None) or str(problem)


@contextlib.contextmanager
def file_problems(what: str, kind: type[PacelineError] = PacelineError, remedy: str = "") -> Iterator[None]:
    """While the block is open, a file that cannot be used raises `kind`, which says `what`, the system's reason, and
    the `remedy`."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as problem:
        reason = "it is no text in UTF-8" if isinstance(problem, UnicodeDecodeError) else reason_of(problem)
        raise kind(f"{what}: {reason}{remedy and '; '}{remedy}.") from None


class JobError(PacelineError):
    """An invalid job: unknown key, wrong type, impossible value."""


class InvalidFileError(JobError):
    """A file that cannot be used; the names in its message are columns or keys, even where options are named so."""


class ClusterError(PacelineError):
    """An invalid description of nodes, devices and links; the message names row and column, or key."""


class DataError(PacelineError):
    """A data set that is missing, truncated or corrupt; the message names the file."""


class ModelError(PacelineError):
    """A model that cannot be built or trained the way the job asks."""


class CheckpointError(PacelineError):
    """A checkpoint that cannot be written, read or trusted; the message says which and why."""


class LaunchError(PacelineError):
    """Workers that cannot be started here."""


class DivergenceError(PacelineError):
    """Workers that called different collectives; the message names rank, tensor and step."""

    exit_code = 1


class PeerLost(PacelineError):  # noqa: N818 - it says what happened
    """A worker that this one waits for has ended or fallen silent; `rank` says which. It has an error of its own."""

    exit_code = 1

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class WorkerFailed(PacelineError):  # noqa: N818 - it says what happened
    """A worker ended before its work did.

    `rank` is the first worker that failed, `details` its own traceback (empty when a signal left none), `report` a file
    with details. If it is not caught, as in a notebook, Python shows that traceback below the message.
    """

    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        details: str = "",
        exit_code: int = 1,
        report: Path | None = None,
    ) -> None:
        super().__init__(message)
        self.rank, self.details, self.exit_code, self.report = rank, details, exit_code, report
        if details:
            self.add_note(details.rstrip())
