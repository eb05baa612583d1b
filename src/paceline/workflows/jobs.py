"""The job that is meant, by a name, a file or a value, with the caller's changes; and its plan on some devices."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import JobError, did_you_mean, file_problems, shown
from paceline.measure.probe import trace_job
from paceline.plan.placement import place
from paceline.spec import Cluster, Job, Mesh, Plan, parse_mesh
from paceline.spec.codec import from_mapping
from paceline.spec.job import CallbackSpec, with_settings
from paceline.workflows.arguments import Say, silent

_FOLDER = Path(__file__).parents[1] / "recipes"
RECIPES = {file.stem: file for file in sorted(_FOLDER.glob("*.toml"), key=lambda file: file.stem)}
"""The job files that come with the package, by name."""
_KEPT_KEYS = ("pipeline", "recompute", "tensor_plan", "cpu_offload", "debug_comm", "timeout_s")
PLAN_KEYS = ("threads_per_worker", "algorithm", "num_servers", *_KEPT_KEYS)
"""The fields of a `Plan` that settings can give; the others follow from the strategy and the devices."""
CallbackLike = CallbackSpec | type | str | tuple[type | str, Mapping[str, Any]]


def resolve_job(
    job: Job | str | Path,
    settings: Sequence[str] = (),
    data: str | Path | Callable[..., Any] | None = None,
    model: str | Callable[..., Any] | None = None,
    *,
    is_run: bool = False,
) -> Job:
    """The job of a value, a file or the name of a recipe, with changes applied: arguments as for `train`, which may be
    wrong (`JobError`). `is_run`: whether settings of the plan are allowed, which `plan_run` reads."""
    of_plan = plan_settings(settings)
    if of_plan and not is_run:
        raise JobError(f"{shown(of_plan[0])} is for the plan of a run, in train and scale alone; leave it out here.")
    of_job = [one for one in settings if one not in of_plan]
    changed = (job if isinstance(job, Job) else load_job(job)).with_settings(of_job)
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
    """The recipe of that name, or the job in a TOML file. Raises `JobError` where there is neither, or it is no job."""
    name, path = str(source), RECIPES.get(str(source), Path(source))
    if is_script(name):
        raise JobError(f"'{name}' is a script, not a job; `paceline launch {name}` runs it.")
    if not name.endswith(".toml") and not path.is_file():
        hint = did_you_mean(name, RECIPES, " ({})")
        raise JobError(f"{shown(name)} is neither a job file nor a recipe{hint}; the recipes are {', '.join(RECIPES)}.")
    with file_problems(f"The job file {shown(name)} cannot be read", JobError):
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


def is_script(job: Job | str | Path, arguments: Sequence[str] = (), **changes: Any) -> bool:
    """Whether `job` is a Python script (*.py), which takes `arguments`; others take `changes`, by names of options.
    Raises `JobError` for arguments to a job or changes to a script."""
    is_one = not isinstance(job, Job) and str(job).endswith(".py")
    given = [f"--{name}" for name, value in changes.items() if value]
    if is_one and given:
        raise JobError(
            f"{' and '.join(given)} would change a job, and '{job}' is a script: give it arguments after its name."
        )
    if arguments and not is_one:
        raise JobError(f"{shlex.join(arguments)} is no option here, and arguments go to scripts (*.py): leave it out.")
    return is_one


def check_names(job: Job) -> None:
    """Raise early what workers would raise for an unknown model, data set or optimizer; import paths stay unchecked."""
    from paceline.data import source  # these three load torch
    from paceline.models import constructor
    from paceline.train.optim import optimizer_class

    checks = ((constructor, job.model.name), (source, job.data.name), (optimizer_class, job.optim.name))
    for check, name in checks:
        if ":" not in name:
            check(name)


def with_callbacks(job: Job, callbacks: Sequence[CallbackLike]) -> Job:
    """`job` with further callbacks, as for `train`. Raises `JobError` for one that workers cannot import."""
    specs = list(job.callbacks)
    for one in callbacks:
        build, options = one if isinstance(one, tuple) else (one, {})
        if not isinstance(build, CallbackSpec):
            build = CallbackSpec(build if isinstance(build, str) else import_path(build, "callbacks"), dict(options))
        specs.append(build)
    return dataclasses.replace(job, callbacks=tuple(specs)).with_values()


def import_path(build: Any, keyword: str) -> str:
    """ "package.module:build" for a function or class; raises `JobError` for one that workers cannot import."""
    module, name = getattr(build, "__module__", None), getattr(build, "__qualname__", None)
    if not callable(build) or not module or not name or module == "__main__" or "<" in name:
        raise JobError(
            f"{keyword} = {shown(build)} should be a function or class that worker processes can import, not one of a "
            "notebook, the running script or another function: write it to a module (in a notebook with %%writefile "
            "my_module.py) and import it from there."
        )
    return f"{module}:{name}"


def import_folders(job: Job) -> list[Path]:
    """The folders of the modules that the job names, such as that of the running script; installed ones are left out,
    as workers find them by themselves."""
    folders = []
    named = [job.model.name, job.data.name, job.optim.name, job.optim.scheduler.name or ""]
    for path in [*named, *(callback.name for callback in job.callbacks)]:
        module = sys.modules.get(path.partition(":")[0].partition(".")[0]) if ":" in path else None
        if module is not None and (file := getattr(module, "__file__", None)):
            folder = Path(file).resolve().parents[1 if hasattr(module, "__path__") else 0]
            folders += [] if "site-packages" in folder.parts else [folder]
    return list(dict.fromkeys(folders))


def plan_settings(settings: Sequence[str]) -> list[str]:
    """The settings that begin with "plan.". Raises `JobError` for an unknown key."""
    found, keys = [one for one in settings if one.startswith("plan.")], [f"plan.{one}" for one in PLAN_KEYS]
    for setting in found:
        key = ".".join(setting.partition("=")[0].strip().split(".")[:2])
        if key not in keys:
            raise JobError(f"There is no key {key!r} here: {did_you_mean(key, keys)}the keys are {', '.join(keys)}.")
    return found


def plan_run(
    job: Job,
    cluster: Cluster,
    num_devices: int,
    strategy: str | None = None,
    settings: Sequence[str] = (),
    given: Plan | None = None,
    say: Say = silent,
) -> Plan:
    """A plan for a job on so many devices. `given` is `plan` of `train`; of `settings` those of the plan count. Raises
    `JobError` for a setting without the axis that it speaks of, a job that does not fit, or what `place` refuses."""
    if given is not None and strategy is not None:
        raise JobError(f"strategy = {strategy!r} and a plan both say how workers divide the model; give one of them.")
    of_plan = plan_settings(settings)
    chosen = with_settings({"plan": {}}, of_plan)["plan"]
    asked = from_mapping(Plan, with_settings({"plan": (given or Plan()).to_mapping()}, of_plan)["plan"], "plan")
    mesh = asked.mesh
    if strategy == "auto":
        from paceline.plan.forecast import choose_mesh

        choice, reason = choose_mesh(job, trace_job(job), cluster, num_devices)
        say(f"strategy {reason}")
        mesh = None if choice.mesh.is_plain else choice.mesh
        asked = dataclasses.replace(asked, recompute=choice.recompute)
    elif strategy not in (None, "dp", "dp_one_process"):
        mesh = parse_mesh(strategy, num_devices, len(cluster.nodes))
    if mesh is not None and mesh.num_workers != num_devices:
        raise JobError(f"The plan lays out {mesh.num_workers} workers as {mesh}, not {num_devices}; leave workers out.")
    if mesh is None or mesh.num_workers > 1:  # a worker alone shares nothing
        _check_effects(job, asked, mesh)
    is_one_process = strategy == "dp_one_process"
    placed = place(
        job,
        cluster,
        1 if is_one_process else num_devices,
        threads_per_worker=chosen.get("threads_per_worker"),
        algorithm=asked.algorithm,
        num_servers=asked.num_servers,
        mesh=mesh,
    )
    kept = {name: getattr(asked, name) for name in _KEPT_KEYS}
    return dataclasses.replace(placed, **kept, devices_in_process=num_devices if is_one_process else 1)


def _check_effects(job: Job, asked: Plan, mesh: Mesh | None) -> None:
    """Raise `JobError` for a setting of the plan that has no effect on this mesh."""
    is_served = job.aggregation.method == "parameter_server_async" or asked.algorithm.startswith("parameter_server")
    needs = {
        "pipeline": ("strategy = 'pp'", mesh is not None and mesh.pp > 1),
        "cpu_offload": ("strategy = 'fsdp'", mesh is not None and mesh.fsdp > 1),
        "recompute": ("a mesh, such as strategy = 'fsdp'", mesh is not None),
        "num_servers": ("plan.algorithm = 'parameter_server'", is_served),
    }
    for name, (needed, is_there) in needs.items():
        if getattr(asked, name) != getattr(Plan(), name) and not is_there:
            raise JobError(f"plan.{name} has no effect without {needed}; name it too, or leave plan.{name} out.")
