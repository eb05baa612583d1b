"""The files of a communication benchmark: its timings in, its page and Markdown out."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import JobError, PacelineError
from paceline.regular_files import read_json
from paceline.report.comm_bench import MARKDOWN_FILE, PAGE_FILE
from paceline.report.comm_page import render_comm_page
from paceline.report.comm_table import comm_markdown
from paceline.report.files import write_files
from paceline.spec.comm_timing import TIMINGS_FILE, CommTimings


def load_timings(path: Path) -> CommTimings:
    """The timings of a file, or of a folder that holds one.

    Raises:
        PacelineError: there is none, or it is damaged; the message names the file.
    """
    path = path / TIMINGS_FILE if path.is_dir() else path
    try:
        return CommTimings.from_mapping(read_json(path))
    except OSError as problem:
        raise PacelineError(f"The timings '{path}' cannot be read: {problem.strerror}.") from None
    except (ValueError, JobError) as problem:
        raise PacelineError(f"The timings '{path}' are damaged or of another version: {problem}") from None


def write_comm_bench(timings: CommTimings, out: Path) -> None:
    """Write comm.html and comm.md into the folder `out`.

    Raises:
        PacelineError: the folder cannot be made or written to.
    """
    write_files({PAGE_FILE: render_comm_page(timings), MARKDOWN_FILE: comm_markdown(timings)}, out)
