"""The commands of commands.toml and what each of them says, as one text to compare."""

from __future__ import annotations

import math
import re
import shlex
import tomllib
from pathlib import Path

import paceline
from tests.golden.terminal import INPUTS, Said, run_commands
from tests.kit.html import Page

FOLDER = Path(__file__).parent
OUTPUTS = FOLDER / "outputs"
LARGEST_RELATIVE_DIFFERENCE, OF_DRAWS = 1e-3, 0.25
"""Of any number; of a plan, whose forecasts are made of drawn samples, which the last digits of another processor lead
elsewhere: the step by some 0.2 %, ends of intervals by 1 %, small parts of a step by more."""
NAMES = tuple(tomllib.loads((FOLDER / "commands.toml").read_text()))
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_VOLATILE = (
    (re.compile(r"/\S*?/python3?\b(?:\.\d+)?"), "PYTHON"),
    (re.compile(r"/\S*paceline-golden-\w+/folder"), "FOLDER"),
    (re.compile(re.escape(paceline.__version__)), "VERSION"),
    (re.compile(r"\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d(?::\d\d)?\b"), "TIME"),
)


def outputs() -> dict[str, str]:
    """What every command says and writes now."""
    lines = tomllib.loads((FOLDER / "commands.toml").read_text()).values()
    return dict(zip(NAMES, map(_as_text, run_commands([_arguments(line) for line in lines])), strict=True))


def _arguments(line: str) -> list[str]:
    """The words of a command line; `@FOLDER` stands for all that is in a folder of the inputs."""
    found: list[str] = []
    for word in shlex.split(line):
        folder = word.removeprefix("@")
        names = sorted(path.name for path in (INPUTS / folder).iterdir()) if folder != word else []
        found += [f"{folder}/{name}" for name in names] or [word]
    return found


def _as_text(said: Said) -> str:
    sections = {f"exit code {said.exit_code}": "", "output": said.out, "errors": said.err}
    for name, content in said.files.items():
        sections[f"file {name}"] = "\n".join(Page(content).pieces) if name.endswith(".html") else content
    text = "\n".join(f"--- {title}\n{content.rstrip()}" for title, content in sections.items())
    for pattern, word in _VOLATILE:
        text = pattern.sub(word, text)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def are_same(name: str, now: str, recorded: str) -> bool:
    """Whether two texts of a command have the same words, and numbers that are equal but for their last digits."""
    largest_difference = OF_DRAWS if name.startswith("plan-") else LARGEST_RELATIVE_DIFFERENCE
    if _NUMBER.sub("#", now) != _NUMBER.sub("#", recorded):
        return False
    pairs = zip(_NUMBER.findall(now), _NUMBER.findall(recorded), strict=True)
    return all(math.isclose(float(one), float(other), rel_tol=largest_difference) for one, other in pairs)
