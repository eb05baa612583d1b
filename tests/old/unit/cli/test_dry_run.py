"""What a run refuses, its dry run refuses with the same sentence."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from paceline.errors import PacelineError
from paceline.run_lease import hold_folder
from paceline.spec.record import RECORD_FILE
from tests.old.fuzz import options
from tests.old.fuzz.engine import in_scratch_folder
from tests.old.fuzz.values import Case
from tests.old.sample_records import sample_record

BOTH = (
    ("--hosts", "a:0"),
    ("--hosts", "a:1,a:1"),
    ("--hosts", "a:1", "--launcher", "local"),
    ("--launcher", "ssh"),
    ("--launcher", "slurm"),
    ("--hosts-file", "none"),
    ("--hosts-file", "pipe"),
    ("--out", "script.py"),
    ("--out", "pipe"),
    ("--out", "script.py/x"),
    ("--strategy", "nope"),
    ("--min-workers", "5"),
    ("--max-workers", "3"),
    ("--exclude-slower", "2"),
)
OF_TRAIN = (
    ("-n", "100000"),
    ("--out", "x" * 300),
    ("--strategy", "pp99"),
    ("--cut", "x"),
    ("--track", "nope"),
    ("--plan", "none"),
    ("--servers", "7"),
)
CASES = [("launch", words) for words in BOTH] + [("train", words) for words in (*BOTH, *OF_TRAIN)]


@pytest.mark.parametrize(("command", "words"), CASES, ids=lambda one: "".join(one)[:40])
def test_a_dry_run_refuses_what_the_run_refuses(command: str, words: tuple[str, ...]) -> None:
    start = {"launch": ("launch",), "train": ("train", "job.toml")}[command]
    end = {"launch": ("script.py",), "train": ()}[command]
    count = () if {"-n", "--hosts", "--hosts-file"} & set(words) else ("-n", "2")
    with in_scratch_folder():
        said = [_said((*start, *count, *words, *more, *end)) for more in ((), ("--dry-run",))]
    assert said[0] == said[1] != ""


def test_a_dry_run_has_nothing_to_say_in_json() -> None:
    with in_scratch_folder():
        assert "leave one of them out" in _said(("train", "job.toml", "-n", "2", "--dry-run", "--json"))


@pytest.mark.parametrize("command", ["launch", "train"])
def test_a_dry_run_refuses_a_folder_that_another_run_uses(command: str) -> None:
    start = {"launch": ("launch", "--out", "used", "script.py"), "train": ("train", "--out", "used", "job.toml")}
    with in_scratch_folder():
        Path("used").mkdir()
        with hold_folder(Path("used")):
            said = [_said((*start[command][:-1], *more, start[command][-1])) for more in ((), ("--dry-run",))]
    assert said[0] == said[1] and "is in use by process" in said[0]


def test_a_dry_run_refuses_a_folder_of_a_finished_run_of_another_job_and_leaves_it_alone() -> None:
    with in_scratch_folder():
        Path("done").mkdir()
        sample_record().save(Path("done") / RECORD_FILE)
        said = [
            _said(("train", "job.toml", "--out", "done", "--set", "seed=99", *more)) for more in ((), ("--dry-run",))
        ]
        assert [path.name for path in Path("done").iterdir()] == [RECORD_FILE]
    assert said[0] == said[1] and "already holds a finished run of another job" in said[0]


def test_a_dry_run_of_a_script_takes_any_folder_that_its_run_takes() -> None:
    with in_scratch_folder():
        Path("done").mkdir()
        sample_record().save(Path("done") / RECORD_FILE)
        assert _said(("launch", "--out", "done", "-n", "2", "--dry-run", "script.py")) == ""


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.name=lenett", "There is no model 'lenett': did you mean 'lenet'?"),
        ("data.name=digit", "There is no data set 'digit': did you mean 'digits'?"),
        ("optim.name=adamm", "There is no optimizer 'adamm': did you mean 'adam'?"),
    ],
)
def test_a_dry_run_refuses_names_that_workers_would_not_find(setting: str, words: str) -> None:
    with in_scratch_folder():
        assert words in _said(("train", "job.toml", "--set", setting, "--dry-run"))


def _said(words: tuple[str, ...]) -> str:
    with contextlib.redirect_stderr(io.StringIO()):  # from which `take` reads
        try:
            options.take(Case(words))
        except PacelineError as refusal:
            return str(refusal)
    return ""
