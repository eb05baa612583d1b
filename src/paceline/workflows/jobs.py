"""Finds a job by name: a recipe of the package, a file, or a `Job`; and applies the caller's changes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from paceline.errors import JobError, did_you_mean, shortened, shown
from paceline.spec import CallbackSpec, Job, load_job
from paceline.spec.job import MOST_SAMPLES, MOST_WORKERS, TRACKER_NAMES
from paceline.spec.model_cost import ModelCost

Say = Callable[[str], None]
"""Receives progress messages of a workflow, one line at a time; such as `print`."""


_READ_NO_FOLDER = ("digits",)
"""Data sets that come with the package; nor does one that is given by its import path read data.dir."""
_BOUNDS: Mapping[str, tuple[int, float]] = {
    "budget": (1, 1e9),
    "efficiency_floor": (0, 1),
    "tolerance": (0, 1),
    "noise_scale": (1, 1e18),
    "target_samples": (1, 1e18),
    "link_rate": (1, 1e18),
    "parameters": (1, 1e18),
}
"""The least and the most that can be meant by an argument of this name; of others 0 and any finite number."""
_MOST_PRICE = 1e9
_TRACED_SAMPLES = 2


def silent(_line: str) -> None:
    """Discards the message."""


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    folder = resources.files("paceline") / "recipes"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def recipe(name: str) -> Job:
    """The recipe of this name."""
    with resources.as_file(resources.files("paceline") / "recipes" / f"{name}.toml") as path:
        return load_job(path)


def check_counts(**counts: Any) -> None:
    """Check numbers, or lists of them, that have to be 1 or more; None is left to the program.

    Raises:
        JobError: a number below 1, no number, or something else; names the argument.
    """
    for name, value in counts.items():
        numbers = list(value) if isinstance(value, Collection) else [value]
        if value is not None and (not numbers or not all(_is_count(one) for one in numbers)):
            are_several = isinstance(value, Collection) and not isinstance(value, str)
            kind = "whole numbers of 1" if are_several else "a whole number of 1"
            raise JobError(f"{name} = {shown(value)} should be {kind} or more, and {MOST_SAMPLES:,} at most.")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_SAMPLES


def read_counts(name: str, given: int | Sequence[int] | str) -> list[int]:
    """A number, numbers, or a text such as "1..4,8", ascending and once each; long ranges are thinned out.

    Raises:
        JobError: something else; names the argument.
    """
    if not isinstance(given, str):
        check_counts(**{name: given})
        return sorted({given} if isinstance(given, int) else set(given))
    counts: set[int] = set()
    for part in given.split(","):
        ends = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:(?:\.\.|-|…)\s*([0-9]{1,9})\s*)?", part)
        first, last = (0, 0) if ends is None else (int(ends[1]), int(ends[2] or ends[1]))
        if not 1 <= first <= last <= MOST_WORKERS:
            raise JobError(f"{name} = {shortened(given)} should be counts such as 1,2,4 or a range such as 1..64.")
        if first < last:
            from paceline.plan.forecast import counts_between  # NumPy and SciPy

            counts.update(counts_between(first, last))
        counts.add(first)
    return sorted(counts)


def check_amounts(**amounts: float | None) -> None:
    """Check finite numbers against the bounds of their names; None is left to the program.

    Raises:
        JobError: names the argument.
    """
    for name, value in amounts.items():
        least, most = _BOUNDS.get(name, (0, math.inf))
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and least <= value <= most and value < math.inf):
            should = f"a finite number of {least} or more" if most == math.inf else f"a number from {least} to {most:g}"
            raise JobError(f"{name} = {shown(value)} should be {should}.")


def read_price(price: float | str | None) -> tuple[float | None, str]:
    """The amount and the currency of 2.5, "2.5" or "2.5 USD"; an empty currency where none is given.

    Raises:
        JobError: it is not an amount of 0 or more, with a currency or without.
    """
    if price is None:
        return None, ""
    found = re.fullmatch(
        r"\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*([^\W\d_]{2,8}|[€$£¥]|)\s*", str(price)
    )
    with contextlib.suppress(ValueError):
        if found and 0 <= float(found[1]) <= _MOST_PRICE:
            return float(found[1]), found[2]
    raise JobError(
        f"price = {shown(price)} should be an amount of 0 or more and its currency, such as '2.5 USD'; "
        "a billion at most."
    )


def check_trackers(names: Sequence[str]) -> None:
    """Raises `JobError` for a text in place of a list, and for a tracker that is not known."""
    check_words(track=names)
    for name in names:
        if name not in TRACKER_NAMES:
            raise JobError(f"There is no tracker '{shortened(name)}'; it is one of {', '.join(TRACKER_NAMES)}.")


def check_lists(**lists: Sequence[Any]) -> None:
    """Raises `JobError` for a text in place of a list, which would be read letter by letter; names the argument."""
    for name, given in lists.items():
        if isinstance(given, str):
            raise JobError(f"{name} = {given!r} should be a list of words: {shlex.split(given)}.")


def check_words(**lists: Sequence[str]) -> None:
    """Raises `JobError` for what is no list of texts; names the argument."""
    check_lists(**lists)
    for name, words in lists.items():
        for word in words:
            if not isinstance(word, str):
                raise JobError(f"{name} holds {word!r}; each should be a text, such as {str(word)!r}.")


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
    check_words(arguments=arguments)
    if str(job).endswith(".py") and not isinstance(job, Job):
        changes = {"--set": settings, "--data": data, "--model": model}
        if given := [name for name, value in changes.items() if value]:
            raise JobError(
                f"{' and '.join(given)} would change a job, and '{job}' is a script: give it arguments of its own, "
                "after its name."
            )
        return True
    if arguments:
        name = job.name if isinstance(job, Job) else job
        raise JobError(
            f"{shlex.join(arguments)} is no option of this command, and arguments go to scripts (*.py), not to a job "
            f"such as '{name}': leave it out."
        )
    return False


def resolve_job(
    job: Job | str | Path,
    settings: Iterable[str] | None = None,
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
    settings = [settings] if isinstance(settings, str) else list(settings or ())
    check_words(settings=settings)
    changed = (job if isinstance(job, Job) else _named(str(job))).with_settings(settings)
    if model is not None:
        changed = changed.with_values(model=model if isinstance(model, str) else import_path(model, "model"))
    if data is None:
        return changed
    if isinstance(data, str | Path):
        if changed.data.name in _READ_NO_FOLDER or ":" in changed.data.name:
            raise JobError(f"The data set '{changed.data.name}' reads no folder; leave data = {shown(str(data))} out.")
        return changed.with_values(data={"dir": str(Path(data).resolve())})
    return changed.with_values(data=import_path(data, "data"))


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
    """`job` with further callbacks; see `workflows.train.train`.

    Raises:
        JobError: a class that workers cannot import, or a value that names no callback.
    """
    check_lists(callbacks=callbacks)
    specs = list(job.callbacks)
    for one in callbacks:
        if isinstance(one, CallbackSpec):
            specs.append(one)
            continue
        named, options = one if isinstance(one, tuple) and len(one) == 2 else (one, {})
        specs.append(CallbackSpec(named if isinstance(named, str) else import_path(named, "callbacks"), dict(options)))
    return dataclasses.replace(job, callbacks=tuple(specs)).with_values()


def _named(job: str) -> Job:
    names = recipe_names()
    if job in names:
        return recipe(job)
    if job.endswith(".toml") or _is_file(job):
        return load_job(job)
    hint = did_you_mean(job, names, " ({})")
    raise JobError(f"'{shortened(job)}' is neither a job file nor a recipe{hint}; the recipes are {', '.join(names)}.")


def _is_file(name: str) -> bool:
    try:
        return name != "" and Path(name).exists()
    except (OSError, ValueError):  # no file can have such a name
        return False


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


def import_path(build: Any, keyword: str) -> str:
    """ "package.module:build" for a function or class that builds a model or data sets.

    Raises:
        JobError: worker processes cannot import it, because it is no function, or was defined in a notebook, in the
            script that runs, or inside of another function.
    """
    module, name = getattr(build, "__module__", None), getattr(build, "__qualname__", None)
    if not callable(build) or not module or not name:
        raise JobError(
            f"{keyword} should be a function in a module, which every worker process can import and call, and not "
            f"a value of type {type(build).__name__}."
        )
    if module == "__main__" or "<" in name:
        raise JobError(
            f"{keyword}={name} is defined in a notebook, the running script or another function, where worker "
            "processes cannot import it; write it to a module (in a notebook with %%writefile my_module.py) and "
            "import it from there."
        )
    return f"{module}:{name}"


def trace_model(job: Job) -> ModelCost:
    """What the job's model tells without memory for it: its layers, with their arithmetic and their memory. Loads
    torch."""
    from paceline.parallel import layer_costs

    return layer_costs.trace_model(*model_on_paper(job, _TRACED_SAMPLES), _TRACED_SAMPLES)


def model_on_paper(job: Job, num_samples: int) -> tuple[Any, tuple[Any, ...]]:
    """The job's model without memory for its parameters, and what it is called with for so many samples. Loads
    torch."""
    from paceline.data import load
    from paceline.models import build
    from paceline.parallel.layer_costs import on_paper
    from paceline.train.loop import data_facts

    train_set, _ = load(job.data)
    return on_paper(lambda: build(job.model, **data_facts(train_set)), train_set[0][0], num_samples)
