"""Do the tests notice small defects? One mutant at a time is put into a copy of a checkout, and tests are run.

    python -m benchmarks.mutations --out FILE.json [--source CHECKOUT] [--only NAME …] [--jobs N]

`mutants.toml` beside this file has the mutants: defects that a release had, or as people make them. `text` is in one
place of the source and becomes `replacement`; `tests` are those that belong to it. A test that fails notices the mutant
if it passes without it; one that a mutant keeps from ending fails by its time limit.
Results are kept in FILE: what it has is not tried again. All of them are printed as a table in Markdown. A test that
starts programs without PYTHONPATH tries the installed source and notices nothing.

Each pytest is forked from this process, which has loaded torch and nothing of Paceline: most of these tests take less
time than torch takes to load.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import queue
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

COPIED = ("src", "tests", "benchmarks", "examples", "docs", "README.md", "pyproject.toml")
PRELOADED = ("torch", "torch.distributed", "numpy", "scipy.stats", "typer", "rich.table", "jinja2", "hypothesis")
# Without the budgets of processor time, which a slow mutant would exceed for another reason than its defect.
PYTEST = ("-rfE", "--tb=line", "-o", "addopts=-q -p no:cacheprovider")
TEST_LIMIT_S = 120
NOT_AT_ITS_END = "pytest"


@dataclass(frozen=True)
class Mutant:
    """A small change of one place of the source, and the tests that belong to that place."""

    name: str
    text: str
    replacement: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What its tests made of a mutant."""

    file: str
    """The changed file; empty where the mutant's text is not in the source exactly once."""
    noticed_by: str
    """A test's id; empty if no test noticed."""
    how: str
    """The test's failure, or why there is none."""
    seconds: float = 0.0


class Checkout:
    """A copy of a checkout."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.folder = folder
        for path in (source / name for name in COPIED):
            if path.is_dir():
                shutil.copytree(path, folder / path.name)
            else:
                shutil.copy2(path, folder)

    def try_out(self, mutant: Mutant, tests: Sequence[str], limit_s: float) -> Outcome:
        """The first of these tests that fails with the mutant."""
        texts = {path: path.read_text() for path in (self.folder / "src").rglob("*.py")}
        found = [path for path, text in texts.items() for _ in range(text.count(mutant.text))]
        if len(found) != 1:
            return Outcome("", "", "the text is not in the source exactly once")
        (path,), began = found, time.monotonic()
        status = path.stat()
        path.write_text(texts[path].replace(mutant.text, mutant.replacement))
        try:
            failed = self.failures(["-x", *tests], limit_s) if tests else {NOT_AT_ITS_END: "no test is named"}
        finally:
            path.write_text(texts[path])
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        test, how = next(iter(failed.items()), ("", "all tests pass"))
        name = str(path.relative_to(self.folder / "src/paceline"))
        return Outcome(name, "" if test == NOT_AT_ITS_END else test, how[:200], round(time.monotonic() - began, 1))

    def failures(self, arguments: Sequence[str], limit_s: float) -> dict[str, str]:
        """How each test that fails does, by its id; by `NOT_AT_ITS_END` what else went wrong."""
        with tempfile.TemporaryFile("w+") as said:
            pid = os.fork()
            if pid == 0:
                self._run_pytest([*PYTEST, f"--timeout={min(TEST_LIMIT_S, limit_s):.0f}", *arguments], said.fileno())
            deadline = time.monotonic() + limit_s
            while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
                if time.monotonic() > deadline:
                    os.killpg(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    return {NOT_AT_ITS_END: f"pytest was not at its end after {limit_s:.0f} s"}
                time.sleep(0.05)
            said.seek(0)
            failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?:@\S+)?(?: - (.*))?$", said.read(), re.MULTILINE)
        exit_code = os.waitstatus_to_exitcode(ended[1])
        return dict(failed) if failed or not exit_code else {NOT_AT_ITS_END: f"pytest ended with {exit_code}"}

    def _run_pytest(self, arguments: Sequence[str], output: int) -> NoReturn:
        """In a forked process, as `python -m pytest` in the copy."""
        exit_code = 1
        try:
            os.setsid()
            os.chdir(self.folder)
            os.environ |= {"PYTHONPATH": str(self.folder / "src"), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "300"}
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.dont_write_bytecode = True
            sys.path[:] = [str(self.folder / "src"), str(self.folder), *(one for one in sys.path if one)]
            for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
                del sys.modules[name]
            exit_code = importlib.import_module("pytest").main(list(arguments))
            sys.stdout.flush()
        finally:
            os._exit(exit_code)


def load_mutants() -> list[Mutant]:
    listed = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())["mutant"]
    return [Mutant(**one | {"tests": tuple(one["tests"])}) for one in listed]


def table(mutants: Sequence[Mutant], outcomes: dict[str, Outcome]) -> str:
    """What was noticed, in Markdown."""
    lines = ["| mutant | file | noticed by |", "|---|---|---|"]
    for mutant in mutants:
        known = outcomes.get(mutant.name)
        lines.append(
            f"| {mutant.name} | " + (" | not tried |" if known is None else f"{known.file} | {_cell(known)} |")
        )
    lines.append(f"\n{sum(bool(one.noticed_by) for one in outcomes.values())} of {len(outcomes)} noticed")
    return "\n".join(lines)


def _cell(outcome: Outcome) -> str:
    test = outcome.noticed_by.removeprefix("tests/").replace("|", "\\|")
    return f"`{test}`" if test else f"**nobody**: {outcome.how}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=Path(), metavar="CHECKOUT", help="what is copied")
    parser.add_argument("--out", type=Path, required=True, help="where results go; what it has is not tried again")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="mutants to try, again if they have a result")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--limit", type=float, default=300, metavar="S", help="seconds for each call of pytest")
    arguments = parser.parse_args()
    limit_s = arguments.limit
    stored = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    mutants, done = load_mutants(), {name: Outcome(**found) for name, found in stored.items()}
    wanted = [one for one in mutants if (one.name in arguments.only if arguments.only else one.name not in done)]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in PRELOADED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        free: queue.SimpleQueue[Checkout] = queue.SimpleQueue()
        for number in range(arguments.jobs):
            (place := Path(folder) / str(number)).mkdir()
            free.put(Checkout(arguments.source.resolve(), place))

        def run(mutant: Mutant) -> None:
            checkout = free.get()
            tests = [f"tests/{test}" for test in mutant.tests]
            done[mutant.name] = outcome = checkout.try_out(mutant, tests, limit_s)
            free.put(checkout)
            print(f"{outcome.seconds:6.1f} s  {mutant.name}: {outcome}", file=sys.stderr, flush=True)
            _keep(dict(done), arguments.out)

        list(pool.map(run, wanted))
        tests = sorted({done[one.name].noticed_by for one in wanted if one.name in done} - {""})
        failed = free.get().failures(tests, len(tests) * limit_s) if tests else {}
    for name, one in done.items():
        if one.noticed_by in failed or (NOT_AT_ITS_END in failed and one.noticed_by in tests):
            why = failed.get(NOT_AT_ITS_END, f"{one.noticed_by} fails without it too")
            done[name] = Outcome(one.file, "", why, one.seconds)
    _keep(done, arguments.out)
    print(table(mutants, done))


def _keep(outcomes: dict[str, Outcome], path: Path) -> None:
    path.write_text(json.dumps({name: asdict(outcome) for name, outcome in outcomes.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
