"""Finds a job by name: a recipe of the package, a file, or a `Job`; and applies the caller's changes."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import JobError, did_you_mean, file_problems, shortened, shown
from paceline.spec import Job
from paceline.spec.job import CallbackSpec
from paceline.spec.model_cost import ModelCost

_FOLDER = Path(__file__).parents[1] / "recipes"
RECIPES = {file.stem: file for file in sorted(_FOLDER.glob("*.toml"), key=lambda file: file.stem)}
"""The job files that come with the package, by name."""
_TRACED_SAMPLES = 2


def resolve_job(
    job: Job | str | Path,
    settings: Sequence[str] | None = None,
    data: str | Path | Callable[..., Any] | None = None,
    model: str | Callable[..., Any] | None = None,
) -> Job:
    """The job of a value, a file or the name of a recipe, with changes applied.

    Args:
        settings: keys of the job to change, such as "optim.lr=0.1".
        data: the directory of the job's data set, or a function that builds (train_set, test_set).
        model: the name of a model, or a function or class that builds one.

    Raises:
        JobError: neither a file nor a recipe, an invalid setting, or a function that workers cannot import.
    """
    changed = (job if isinstance(job, Job) else _named(str(job))).with_settings(settings or ())
    if model is not None:
        changed = changed.with_values(model=model if isinstance(model, str) else import_path(model, "model"))
    if data is None:
        return changed
    if not isinstance(data, str | Path):
        return changed.with_values(data=import_path(data, "data"))
    if changed.data.name == "digits" or ":" in changed.data.name:
        raise JobError(f"The data set '{changed.data.name}' reads no folder; leave data = {shown(str(data))} out.")
    return changed.with_values(data={"dir": str(Path(data).resolve())})


def load_job(source: str | Path) -> Job:
    """The job in a TOML file. Raises `JobError` for a file that is missing, no TOML, or no job."""
    path = Path(source)
    with file_problems(f"The job file '{shortened(str(path))}' cannot be read", JobError):
        content = path.read_bytes()
    try:
        mapping = tomllib.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as problem:
        raise JobError(f"The job file '{path}' is not valid TOML: {problem}.") from None
    if not mapping:  # rather a mistake than a wish for all of the defaults
        raise JobError(f"The job file '{path}' has no keys; give it some of those that `paceline list keys` shows.")
    try:
        return Job.from_mapping({"name": path.stem, **mapping})
    except JobError as problem:
        raise JobError(f"{path}: {problem}") from None


def _named(job: str) -> Job:
    if job in RECIPES:
        return load_job(RECIPES[job])
    if job.endswith(".py"):
        raise JobError(f"'{job}' is a script, not a job; `paceline launch {job}` runs it.")
    if job.endswith(".toml") or Path(job).is_file():
        return load_job(job)
    hint = did_you_mean(job, RECIPES, " ({})")
    raise JobError(
        f"'{shortened(job)}' is neither a job file nor a recipe{hint}; the recipes are {', '.join(RECIPES)}."
    )


def is_script(
    job: Job | str | Path,
    arguments: Sequence[str],
    settings: Sequence[str],
    data: str | Path | Callable[..., Any] | None,
    model: str | Callable[..., Any] | None,
) -> bool:
    """Whether `job` is a Python script (*.py). Options for the other kind of job are refused, never ignored.

    Raises:
        JobError: a job with `arguments`, or a script with changes of a job; names them.
    """
    is_one = not isinstance(job, Job) and str(job).endswith(".py")
    changes = {"--set": settings, "--data": data, "--model": model}
    given = [name for name, value in changes.items() if value] if is_one else []
    if given:
        raise JobError(
            f"{' and '.join(given)} would change a job, and '{job}' is a script: give it arguments of its own, after "
            "its name."
        )
    if arguments and not is_one:
        raise JobError(f"{shlex.join(arguments)} is no option here, and arguments go to scripts (*.py): leave it out.")
    return is_one


def check_names(job: Job) -> None:
    """Raise early what workers would raise for names that are unknown; import paths are not checked.

    Raises:
        ModelError, DataError, JobError: there is no such model, data set or optimizer.
    """
    from paceline.data import source  # these three load torch
    from paceline.models import constructor
    from paceline.train.optim import optimizer_class

    checks = ((constructor, job.model.name), (source, job.data.name), (optimizer_class, job.optim.name))
    for check, name in checks:
        if ":" not in name:
            check(name)


def with_callbacks(
    job: Job, callbacks: Sequence[CallbackSpec | type | str | tuple[type | str, Mapping[str, Any]]]
) -> Job:
    """`job` with further callbacks, as for `train`. Raises `JobError` for one that workers cannot import."""
    specs = list(job.callbacks)
    for one in callbacks:
        if not isinstance(one, CallbackSpec):
            named, options = one if isinstance(one, tuple) else (one, {})
            name = named if isinstance(named, str) else import_path(named, "callbacks")
            one = CallbackSpec(name, dict(options))
        specs.append(one)
    return dataclasses.replace(job, callbacks=tuple(specs)).with_values()


def import_path(build: Any, keyword: str) -> str:
    """ "package.module:build" for a function or class that builds a model or data sets.

    Raises:
        JobError: worker processes cannot import it, because it is no function, or was defined in a notebook, in the
            script that runs, or inside of another function.
    """
    module, name = getattr(build, "__module__", None), getattr(build, "__qualname__", None)
    if not callable(build) or not module or not name or module == "__main__" or "<" in name:
        raise JobError(
            f"{keyword} = {shown(build)} should be a function or class that worker processes can import, not one of a "
            "notebook, the running script or another function: write it to a module (in a notebook with %%writefile "
            "my_module.py) and import it from there."
        )
    return f"{module}:{name}"


def import_folders(job: Job) -> list[Path]:
    """Where this process found the modules that the job names, such as beside the running script; not those that are
    installed, which workers find by themselves."""
    folders = []
    named = [job.model.name, job.data.name, job.optim.name, job.optim.scheduler.name or ""]
    for path in [*named, *(callback.name for callback in job.callbacks)]:
        module = sys.modules.get(path.partition(":")[0].partition(".")[0]) if ":" in path else None
        if module is not None and (file := getattr(module, "__file__", None)):
            folder = Path(file).resolve().parents[1 if hasattr(module, "__path__") else 0]
            folders += [] if "site-packages" in folder.parts else [folder]
    return list(dict.fromkeys(folders))


def trace_model(job: Job) -> ModelCost:
    """What the job's model tells without memory for it: its layers, with their arithmetic and their memory. Loads
    torch."""
    from paceline.data import load
    from paceline.models import build
    from paceline.parallel import layer_costs
    from paceline.train.loop import data_facts

    train_set, _ = load(job.data)
    model, arguments = layer_costs.on_paper(
        lambda: build(job.model, **data_facts(train_set)), train_set[0][0], _TRACED_SAMPLES
    )
    return layer_costs.trace_model(model, arguments, _TRACED_SAMPLES)
