"""Jobs by name: a recipe of the package, a file, or a job as it is; and what a caller changes of it."""

from __future__ import annotations

import difflib
from importlib import resources
from pathlib import Path

from paceline.errors import JobError
from paceline.spec import Job, load_job


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    folder = resources.files("paceline") / "recipes"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def resolve_job(job: str, settings: list[str] | None, data_dir: str | None) -> Job:
    """The job a command line means: a file or a recipe, with its settings applied.

    Raises:
        JobError: neither a file nor a recipe, or a setting that cannot be meant.
    """
    names = recipe_names()
    if job in names:
        with resources.as_file(resources.files("paceline") / "recipes" / f"{job}.toml") as path:
            loaded = load_job(path)
    elif job.endswith(".toml") or Path(job).exists():
        loaded = load_job(job)
    else:
        near = difflib.get_close_matches(job, names, n=1, cutoff=0.5)
        hint = f" (did you mean '{near[0]}'?)" if near else ""
        raise JobError(f"'{job}' is neither a job file nor a recipe{hint}; the recipes are {', '.join(names)}.")
    changed = loaded.with_settings(settings or [])
    return changed if data_dir is None else changed.with_values(data={"dir": str(Path(data_dir).resolve())})
