"""How checks are made: a check is a row of a table, and one function applies it to facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from paceline.words import listing

F = TypeVar("F")
S = TypeVar("S")

Level = Literal["ok", "warning", "error"]
Sentence = str | Callable[[S], str]
"""A text whose {names} are attributes of the subject, or a function that makes the text."""


@dataclass(frozen=True)
class Finding:
    """One sentence on what is so, and one on what to do."""

    level: Level
    """ "error": training will fail or be wrong; "warning": it will be slow or may fail."""
    check: str
    """A short name that scripts can rely on, such as "ulimit nofile"."""
    what: str
    fix: str = ""
    """A command where there is one; empty where nothing needs doing."""
    node: str = ""
    """The node it was found on; empty: this one, or all of them together."""


@dataclass(frozen=True)
class Problem(Generic[S]):
    """One thing that can be wrong with a subject, in the words of a `Finding`."""

    level: Level
    is_so: Callable[[S], object]
    """Tells by its truth whether the subject has the problem."""
    what: Sentence[S]
    fix: Sentence[S]
    hides_others: bool = True
    """Whether the problems after it in its check are not looked for in the same subject."""


def error(
    is_so: Callable[[S], object], what: Sentence[S], fix: Sentence[S], *, hides_others: bool = True
) -> Problem[S]:
    return Problem("error", is_so, what, fix, hides_others)


def warning(
    is_so: Callable[[S], object], what: Sentence[S], fix: Sentence[S], *, hides_others: bool = True
) -> Problem[S]:
    return Problem("warning", is_so, what, fix, hides_others)


class Check(Generic[F, S]):
    """What can be wrong with some subjects among facts, and what to say where nothing is.

    Args:
        name: the `Finding.check`; its {names} are attributes of the facts.
        subjects: what is looked at among the facts; None where the check does not apply and says nothing.
        fine: the sentence where no subject has a problem.
        named: the `Finding.check` of a subject's problems, where that is not the check's own name.
    """

    def __init__(
        self,
        name: str,
        subjects: Callable[[F], Sequence[S] | None],
        fine: Sentence[F],
        *problems: Problem[S],
        named: str = "",
    ) -> None:
        self.name = name
        self.fine = fine
        self.problems = problems
        self.subjects = subjects
        self._named = named

    def findings(self, facts: F) -> list[Finding]:
        """A finding for every problem, or the one that says that there is none."""
        subjects = self.subjects(facts)
        if subjects is None:
            return []
        name = filled_in(self.name, facts)
        found = [finding for subject in subjects for finding in self._problems_of(subject, name)]
        return found or [Finding("ok", name, filled_in(self.fine, facts))]

    def _problems_of(self, subject: S, name: str) -> Iterator[Finding]:
        for problem in self.problems:
            if problem.is_so(subject):
                check = filled_in(self._named, subject) or name
                yield Finding(problem.level, check, filled_in(problem.what, subject), filled_in(problem.fix, subject))
                if problem.hides_others:
                    return


def filled_in(sentence: Sentence[S], subject: S) -> str:
    return sentence.format_map(_Attributes(subject)) if isinstance(sentence, str) else sentence(subject)


class _Attributes(dict[str, Any]):
    """Attributes of an object as a mapping."""

    def __init__(self, subject: object) -> None:
        self._subject = subject

    def __missing__(self, name: str) -> Any:
        return getattr(self._subject, name)


def words(items: Sequence[str], most: int = 4) -> str:
    """ "a, b and c"; no more than `most` by name."""
    if len(items) > most:
        items = [*items[: most - 1], f"{len(items) - most + 1} more"]
    return listing(items)
