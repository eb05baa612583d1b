"""All targets."""

from __future__ import annotations

from pathlib import Path

from tests.old.fuzz import options
from tests.old.fuzz.engine import Target
from tests.old.fuzz.files import FORMATS, Format
from tests.old.fuzz.values import Case


def _of_file(one: Format) -> Target:
    def take(case: Case) -> None:
        folder = Path("file")
        folder.mkdir(exist_ok=True)
        path = folder / one.name
        path.write_bytes(case.content)
        try:
            one.use(path)
        finally:
            path.unlink(missing_ok=True)

    return Target(one.name, one.contents, take)


COMMANDS = {name: command for name, command in options.commands().items() if name in options.CALLS}
TARGETS = (
    *map(_of_file, FORMATS),
    *(Target(f"paceline {name}", options.inputs(name, command), options.take) for name, command in COMMANDS.items()),
)
