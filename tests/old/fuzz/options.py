"""Every command with every option, in this process; nothing is started and no node is reached."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import typer.main
from hypothesis import strategies as st

from paceline import cli
from paceline.errors import PacelineError
from paceline.hardware import detect
from paceline.report.job_text import job_toml
from paceline.spec import Cluster, Plan
from paceline.workflows.launchers import LAUNCHERS
from tests.old.fuzz.values import Case
from tests.old.sample_clusters import gpu_cluster
from tests.old.sample_records import sample_job, sample_record
from tests.old.sample_timings import sample_timings
from tests.old.unit.checkpoint.memory import Memory, write_checkpoint

# The shortest calls that are accepted.
CALLS: dict[str, tuple[str, ...]] = {
    "topo": ("--from", "cluster.json"),
    "probe": (),
    "plan": ("job.toml", "--devices", "1,2"),
    "launch": ("script.py",),
    "train": ("job.toml", "-n", "1", "--out", "out"),
    "scale": ("job.toml", "--out", "study"),
    "verify": ("job.toml",),
    "submit slurm": ("--dry-run", "train"),
    "submit kubernetes": ("job.toml", "--image", "i", "--claim", "c", "--out", "/data/run"),
    "bench comm": ("--out", "comm"),
    "bench checkpoint": ("--out", "bench"),
    "checkpoint ls": ("checkpoints",),
    "checkpoint verify": ("checkpoints",),
    "checkpoint prune": ("checkpoints", "--dry-run"),
    "export": ("checkpoints", "model.safetensors", "--force"),
    "checkpoint export": ("checkpoints", "model.safetensors", "--force"),
    "report": ("run",),
    "models": (),
    "data": (),
    "jobs ls": (),
    "jobs keys": (),
}
NO_COUNTS = ("0", "-1", "nan", "1.5", "two", "1" * 30, "9" * 5_000, "", "²", "٣", "True", "1e3", "[]")
NO_AMOUNTS = ("nan", "inf", "-inf", "-1", "1e999", "two", "", "9" * 5_000, "[]", "٣", "True")
ODD = (
    "x" * 300,
    "ä" * 5_000,
    "../..",
    "/dev/zero",
    "pipe",
    "\x1b[2J",
    "a b",
    "a=b",
    "1",
    "0",
    "2,1",
    "1..3",
    "none",
    "-",
)
SELF_ENDING = ("help", "version")
PASSING_ON = ("launch", "submit slurm")
MAY_BE_ZERO = ("max_restarts", "pick")
HARMFUL = ("listen", "connect", "facts", "out", "svg", "target", "folder", "directory", "install_completion")


class Started(BaseException):
    """Everything was accepted: workers would be started now."""


def commands() -> dict[str, Any]:
    """All commands by their names, as they are typed."""
    found: dict[str, Any] = {}

    def visit(command: Any, name: str) -> None:
        if hasattr(command, "commands"):
            for inner, one in command.commands.items():
                visit(one, f"{name} {inner}".strip())
        else:
            found[name] = command

    visit(typer.main.get_command(cli.command_line()), "")
    return found


def call(name: str, *words: str) -> tuple[str, ...]:
    """The command with some words more: in front of a script or a command, whose own they would be after it."""
    first = name in PASSING_ON
    return (name, *words, *CALLS[name]) if first else (name, *CALLS[name], *words)


def counts(command: Any) -> list[Any]:
    """The options of a command that are whole numbers of 1 or more."""
    return [one for one in _valued(command) if one.bare_type() == "int" and one.name not in MAY_BE_ZERO]


def amounts(command: Any) -> list[Any]:
    """The options of a command that are other numbers."""
    return [one for one in _valued(command) if one.bare_type() == "float"]


def _valued(command: Any) -> list[Any]:
    return [one for one in _options(command) if not one.is_flag]


def _options(command: Any) -> list[Any]:
    named = [one for one in command.params if one.param_type_name == "option"]
    return [one for one in named if one.name not in (*SELF_ENDING, *HARMFUL)]


def inputs(name: str, command: Any) -> st.SearchStrategy[Case]:
    """Calls of a command with one option that cannot be meant, or with several strange ones."""
    options = _options(command)

    def with_one(option: Any, value: str) -> Case:
        return Case(call(name, option.opts[0], value), f"{option.opts[0]} {value[:20]}")

    def with_some(several: list[tuple[Any, str]]) -> Case:
        words = [[one.opts[0]] if one.is_flag else [one.opts[0], value] for one, value in several]
        return Case(call(name, *(word for pair in words for word in pair)))

    wrong = [
        st.builds(with_one, st.sampled_from(of), st.sampled_from(values))
        for of, values in ((counts(command), NO_COUNTS), (amounts(command), NO_AMOUNTS))
        if of
    ]
    values = st.sampled_from((*ODD, *NO_COUNTS, *NO_AMOUNTS)) | st.text(max_size=12)
    some = st.lists(st.tuples(st.sampled_from(options), values), max_size=4).map(with_some) if options else st.nothing()
    strange_words = st.lists(values, max_size=3).map(lambda words: Case((name, *words)))
    return st.one_of(*wrong, some, strange_words)


def take(case: Case) -> None:
    """Call `paceline` with the words of a case. Raises `PacelineError` where it refuses, in one sentence."""
    name, *words = case.content
    if any("\0" in word or any("\ud800" <= one <= "\udfff" for one in word) for word in words):
        raise PacelineError("the operating system refuses such an argument")
    with _nothing_is_started(), mock.patch.object(sys, "argv", ["paceline", *name.split(), *words]):
        try:
            cli.main()
        except Started:
            return
        except SystemExit as ended:
            said = getattr(sys.stderr, "getvalue", str)()
            if "Traceback" in said:
                raise AssertionError(said) from None
            if ended.code not in (0, None):
                raise PacelineError(said if len(said) < 1_400 else said[:1_400]) from None


@functools.cache
def _this_node() -> Cluster:
    return detect()


@contextlib.contextmanager
def _nothing_is_started() -> Iterator[None]:
    def started(*_: object, **__: object) -> Any:
        raise Started

    here = _this_node()
    places = (
        *("allocation.run_workers", "allocation.run_elastic", "allocation.open_nodes", "allocation.contained"),
        *("verify.run_workers", "submit.submit_script", "traced_model.trace_model"),
    )
    _lay_out()
    with contextlib.ExitStack() as patches:
        for place in places:
            patches.enter_context(mock.patch(f"paceline.workflows.{place}", started))
        ray = dataclasses.replace(LAUNCHERS["ray"], nodes=started)
        patches.enter_context(mock.patch.dict(LAUNCHERS, {"ray": ray}))
        patches.enter_context(mock.patch("paceline.workflows.strategy.trace_model", started))
        patches.enter_context(mock.patch("paceline.workflows.allocation.detect", lambda: here))
        yield


def _lay_out() -> None:
    """What the calls name, where it is missing."""
    if Path("job.toml").exists():
        return
    Path("script.py").touch()
    Path("job.toml").write_text(job_toml(sample_job(name="job")))
    gpu_cluster(1, 4).save(Path("cluster.json"))
    sample_timings().save(Path("timings.json"))
    Plan(world_size=2).save(Path("plan.json"))
    Path("run").mkdir()
    sample_record(1).save(Path("run/record.json"))
    storage = Memory()
    write_checkpoint(storage, 7)
    for path, content in storage.files.items():
        place = Path("checkpoints") / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    os.mkfifo("pipe")
