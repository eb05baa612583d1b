"""The commands, in the order of the pipeline: what each does with its options, and what it prints."""

from __future__ import annotations

import dataclasses
import errno
import json
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paceline
from paceline.cli.options import COMMANDS as COMMANDS
from paceline.cli.options import call, command, parse, to_stderr
from paceline.errors import JobError, PacelineError, WorkerFailed, did_you_mean, printable
from paceline.words import duration, number_of, size

if TYPE_CHECKING:
    from rich.console import Console

Column = str | tuple[str, Callable[[Any], str]]
"""An attribute of rows; or a heading, and what a row has below it."""
PIPE_COLUMNS = 200
"""The width of tables in a pipe: 16 GPUs and 10 network cards fit."""
FORMER_NAMES = {
    "memory": "`paceline plan JOB`, or without devices `paceline plan JOB --dry-run-mesh fsdp4`",
    "jobs": "`paceline list recipes` and `paceline list keys`",
    "models": "`paceline list models`",
    "data": "`paceline list data`",
    "export": "`paceline checkpoint export`",
    "new": "`paceline train RECIPE`, or a job file as in README.md",
    "bench": "the scripts in benchmarks/ of the repository",
}
"""What stands in the place of a command of version 0.2; answered throughout version 0.3."""


def main() -> None:
    """Run a command. A user's mistake is one sentence and an exit code; a bug keeps its traceback; signals clean up."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # while workers run, the launcher heeds them
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    getattr(sys.stdout, "reconfigure", lambda **_: None)(errors="replace")  # a terminal may lack letters
    try:
        exit_code = run(sys.argv[1:])
        print(end="", flush=True)
    except KeyboardInterrupt:
        to_stderr("paceline: interrupted; all workers have ended.")
        exit_code = 128 + signal.SIGINT
    except OSError as problem:  # the reader of the output, such as `head`, has ended, or a disk is full
        if problem.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT):
            raise
        sys.stdout = None
        sys.exit(1 if problem.errno == errno.EPIPE else f"paceline: {problem.strerror}; make room, and start again.")
    except PacelineError as error:
        told = [f"paceline: {error}"]
        if isinstance(error, WorkerFailed):
            told = [error.details.rstrip(), *told, f"The report: {error.report}" if error.report else ""]
        to_stderr(printable("\n".join(filter(None, told))))
        exit_code = error.exit_code
    sys.exit(exit_code)


def run(words: Sequence[str]) -> int:
    """Run the command of a command line without `paceline` in front; returns the exit code."""
    if runs_script("".join(words[:1]), words):
        words = ["launch", *words[1:]]
    for name in (" ".join(words[:2]), " ".join(words[:1])):
        if name in COMMANDS:
            return call(name, COMMANDS[name], words[len(name.split()) :]) or 0
    group = "".join(words[:1])
    within = [name for name in COMMANDS if name.startswith(f"{group} ")]
    if group in FORMER_NAMES:
        raise PacelineError(f"There is no `paceline {group}` any more; use {FORMER_NAMES[group]}.")
    if group == "--version":
        print(f"paceline {paceline.__version__}")
    elif group in ("", "--help", "-h") or (within and words[1:2] in ([], ["--help"], ["-h"])):
        lines = [f"  {name:<18} {COMMANDS[name].help.splitlines()[0]}" for name in within or COMMANDS]
        usage = "usage: paceline COMMAND ...; paceline COMMAND --help lists the options of a command; --version"
        print(usage, *([] if within else ["Begin with: paceline train digits-lenet -n 2"]), "", *lines, sep="\n")
    else:
        name, of_group = (" ".join(words[:2]), f" {group}") if within else (group, "")
        raise PacelineError(
            f"There is no command {name}; {did_you_mean(name, within or COMMANDS)}see `paceline{of_group} --help`."
        )
    return 0


@command("topo", as_json=False)
def topo(as_json: bool = False, **options: Any) -> None:
    """Show how the GPUs of a node are connected, and choose the best K of them."""
    found = paceline.topo(**options)

    from paceline.report.topology import choice_lines, node_view, topology_mapping

    choice, pair = found.choice if "pick" in options else None, found.pair_sentence
    if as_json:
        print(json.dumps(topology_mapping(found.node, found.choice) | ({} if pair is None else {"pair": pair})))
    elif pair is not None:
        print(pair)
    else:
        console = console_of()
        console.print(node_view(found.node, console.width, choice.ring.devices if choice else ()))
        # Whole lines, however narrow the terminal: the last one is there to be copied.
        for line in ["", *choice_lines(choice)] if choice else []:
            console.print(line, soft_wrap=True)


@command("probe")
def probe(out: str = "cluster.json", **options: Any) -> None:
    """Time real steps of a job on 1, 2, 4, … workers, for `paceline plan`: cluster.json."""
    timing = paceline.probe(out=out, **options)

    print_table(
        timing.steps,
        ("nodes x workers", lambda row: row.layout_name),
        ("micro-batch", lambda row: f"{row.num_passes} x {row.micro_batch_size}"),
        "step_time_s",
        ("varies by", lambda row: f"{100 * row.spread:.0f} %"),
        ("samples/s", lambda row: f"{row.global_batch_size / row.step_time_s:,.0f}"),
        ("waits for gradients", partial(cell_of, "sync_time_s")),
        ("waits for samples", partial(cell_of, "loading_s")),
        "peak_memory_bytes",
    )
    print(f"{timing.job}: {timing.num_parameters:,} parameters on {timing.device}\n{out}")


@command("plan", as_json=False, dry_run_mesh=None, out=".")
def plan(job: str, as_json: bool = False, dry_run_mesh: str | None = None, **options: Any) -> None:
    """Forecast time, throughput and cost of a job on 1…N devices, and recommend a number of them."""
    if dry_run_mesh is not None:
        if unused := {*options, *["json"] * as_json} - {"settings", "data"}:
            raise JobError(f"--{min(unused).replace('_', '-')} has no effect with --dry-run-mesh: leave it out.")
        memory = paceline.dry_run_mesh(job, dry_run_mesh, **options)
        held = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")
        print_table([memory], *held, ("gathered, sent or summed", partial(cell_of, "moving_bytes")), "total_bytes")
        if cuts := [stage[0].name for stage in memory.stages[1:]]:
            print(f"--set 'plan.pipeline.cuts={json.dumps(cuts)}'")
        return
    folder = Path(options.setdefault("out", "."))
    planned = paceline.plan(job, **options)
    if as_json:
        plain = None if planned.plan is None else planned.plan.to_mapping()
        print(json.dumps({**planned.forecast.to_mapping(), "plan": plain}))
        return

    from paceline.report.plan_page import plan_table

    console_of().print(plan_table(planned.forecast))
    if planned.plan is not None:
        print(folder / "plan.json")
    elif not planned.forecast.is_fitted:
        num_devices = planned.forecast.recommended.devices
        print(f"No plan.json: the cluster lacks devices for {num_devices}; probe the nodes they are on.")
    print(folder / "plan.html")


@command("launch", passes_on="rest")
def launch(**options: Any) -> None:
    """Run a script on workers of this machine or of several."""
    paceline.launch(**options)


@command("train", as_json=False)
def train(as_json: bool = False, **options: Any) -> None:
    """Train a job on workers of this machine or of several; a script (*.py) as paceline launch does."""
    options = with_folder(options)
    record = resumable(paceline.train, options)
    if as_json:
        print(json.dumps(record.summary()))
        return
    accuracy = "" if record.accuracy is None else f"accuracy {record.accuracy:.2%}, "
    expected = record.plan.forecast_samples_per_s
    forecast = "" if expected is None else f" (forecast {expected:,.0f})"
    print(
        f"{accuracy}{record.samples_per_s:,.0f} samples/s{forecast} on {record.world_size} x "
        f"{record.plan.device_kind}, {record.steps} steps in {record.train_s:.1f} s ({record.wall_s:.1f} s in all)\n"
        f"weights_sha256 {record.weights_sha256}\n{options['out']}/record.json"
    )


def with_folder(options: Mapping[str, Any], ending: str = "") -> dict[str, Any]:
    """The options of a run or study, with a folder, named after the job, where none is given."""
    from paceline.workflows.jobs import resolve_job
    from paceline.workflows.runs import new_run_dir

    job = resolve_job(options["job"], options.get("settings", ()), options.get("data"), is_run=True)
    return {**options, "out": new_run_dir(options.get("out"), job.name + ending)}


def resumable(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """What `function` returns; says which command goes on with a run, or a study of several, that has not ended."""
    result, interrupt, folder = None, None, options["out"]
    try:
        result = function(**options)
    except (KeyboardInterrupt, SystemExit) as ended:
        interrupt = ended
    if (interrupt or not getattr(result, "is_complete", True)) and any(folder.glob("**/checkpoints/latest")):
        out = [] if any(word.startswith("--out") for word in sys.argv) else ["--out", str(folder)]
        to_stderr(f"To go on: {shlex.join(['paceline', *sys.argv[1:], *out])}")
    if interrupt is not None:
        raise interrupt
    return result


@command("scale")
def scale(**options: Any) -> None:
    """Train a job on 1, 2, … N devices and write the study: scaling.json, .csv, report.html."""
    options = with_folder(options, "-scaling")
    print_study(resumable(paceline.scale, options), options["out"])


@command("report", out=".")
def report(out: str = ".", **options: Any) -> None:
    """Write tables and the HTML page from run folders."""
    print_study(paceline.report(out=out, **options), Path(out))


def print_study(study: paceline.Study, folder: Path) -> None:
    """The table of a study, and where its page lies."""
    from paceline.report.study_page import study_table

    console_of().print(study_table(study))
    print(folder / "report.html")


@command("verify", passes_on="others", as_json=False)
def verify(as_json: bool = False, **options: Any) -> int:
    """Check that N workers compute what one does; name what differs first, and the likely cause.

    Any training script of torch, unchanged, with the arguments that follow it: paceline verify --batch 8 -n 2 train.py
    -- --batch-size {batch}. Or a job, which is compared in float64. Ends with 0 if all is equal, 1 if something
    differs, 2 if that could not be told.
    """
    verdicts = paceline.verify(**options)
    for verdict in verdicts:
        print(json.dumps(dataclasses.asdict(verdict)) if as_json else verdict.sentence())
    outcomes = {verdict.outcome for verdict in verdicts}
    return 0 if outcomes == {"equal"} else 1 if "differs" in outcomes else 2


@command("submit slurm", passes_on="rest")
def submit_slurm(**options: Any) -> None:
    """Write a job script that runs `paceline COMMAND …`, and submit it; sbatch reads SBATCH_PARTITION and the like."""
    submit(paceline.submit.slurm, **options)


@command("submit ray", passes_on="rest")
def submit_ray(**options: Any) -> None:
    """Run `paceline COMMAND …` as a job on a Ray cluster."""
    submit(paceline.submit.ray, **options)


def submit(handed_on: Callable[..., Any], command: str, arguments: Sequence[str], **options: Any) -> None:
    """Hand a command on, after mistakes that it would refuse later; the script of a dry run is printed."""
    from paceline.workflows.jobs import check_names, resolve_job
    from paceline.workflows.runs import check_script

    name = "launch" if runs_script(command, arguments) else command
    given = parse(name, COMMANDS[name], arguments)
    if name == "launch":
        check_script(given["script"], is_module="module" in given)
    else:
        check_names(resolve_job(given["job"], given.get("settings", ()), given.get("data"), is_run=True))
    job = handed_on(command, arguments, **options)
    print(f"Job {job.job_id}: {job.advice}." if job.job_id else job.script.rstrip("\n"))


def runs_script(command: str, words: Sequence[str]) -> bool:
    """Whether these are the words of `paceline train SCRIPT.py`, which is `paceline launch SCRIPT.py`."""
    return command == "train" and any(word.endswith(".py") and "=" not in word for word in words)


@command("submit kubernetes", passes_on="others")
def submit_kubernetes(**options: Any) -> None:
    """Print manifests for `kubectl apply -f -`: one pod a node, PyTorch's elastic agent in each."""
    print(paceline.submit.kubernetes(**options), end="")


@command("checkpoint ls", as_json=False)
def checkpoint_ls(as_json: bool = False, **options: Any) -> None:
    """List the checkpoints of a run, oldest first; only `verify` reads them."""
    states = paceline.checkpoint.ls(**options)
    if as_json:
        text = json.dumps({"checkpoints": [dataclasses.asdict(one) for one in states]})
        print(json.dumps(json.loads(text, parse_constant=lambda _: None)))  # JSON has no NaN, which a loss may be
    else:
        size_column = ("size", lambda one: size(one.num_bytes) if one.num_bytes else "")
        print_table(states, "name", "step", "saved_at", "workers", size_column, "metrics", "state", "problem")


@command("checkpoint verify")
def checkpoint_verify(**options: Any) -> int:
    """Read every byte of every checkpoint; exit code 1 if one is damaged."""
    states = paceline.checkpoint.verify(**options)
    for one in states:
        print(f"{one.name}  {one.state}{one.problem and ': '}{one.problem}")
    return int(any(one.state == "damaged" for one in states))


@command("checkpoint prune")
def checkpoint_prune(dry_run: bool = False, **options: Any) -> None:
    """Remove checkpoints that no rule keeps; rules count only what was read and found good."""
    pruning = paceline.checkpoint.prune(dry_run=dry_run, **options)
    for name, problem in pruning.damaged.items():
        print(f"{name}  is damaged, does not count and is left alone: {problem}")
    for name in pruning.stay:
        print(f"{name}  stays")
    for name in pruning.go:
        print(f"{name}  {'would be removed' if dry_run else 'is removed'}")


@command("checkpoint export")
def checkpoint_export(**options: Any) -> None:
    """Write the model of a checkpoint into one safetensors file, under plain state_dict names."""
    found = paceline.checkpoint.export(**options)
    print(f"{options['target']}: the model at step {found.step:,}, from {found.name}")


@command("watch")
def watch(**options: Any) -> None:
    """Show runs in the terminal while they train."""
    paceline.watch(**options)


@command("doctor", as_json=False, show_all=False)
def doctor(as_json: bool = False, show_all: bool = False, **options: Any) -> int:
    """Check this machine and say what to fix: exit code 0 is fine, 2 is an error."""
    levels = ("error", "warning", "ok")
    findings = sorted(paceline.doctor(**options), key=lambda finding: levels.index(finding.level))
    counts = {level: sum(finding.level == level for finding in findings) for level in levels}
    if as_json:
        listed = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({**{f"num_{level}": count for level, count in counts.items()}, "findings": listed}))
    else:
        shown = [finding for finding in findings if show_all or finding.level != "ok"]
        print_table(shown, "level", "node", "what", ("what to do", lambda finding: finding.fix))
        warnings, errors = number_of(counts["warning"], "warning"), number_of(counts["error"], "error")
        print(f"{number_of(counts['ok'], 'check')} passed, {warnings}, {errors}.")
    return 2 if counts["error"] else 0


@command("list", function="catalog")
def list_catalog(**options: Any) -> None:
    """List recipes, models, data sets, or the keys of a job and of --set, with their meaning."""
    from rich.padding import Padding

    entries, console = paceline.catalog(**options), console_of()
    if not console.is_terminal:
        print_table(entries, "name", "default", "values", "meaning", pipe_columns=400)
        return
    for entry in entries:  # a column would leave sentences no room
        default, values = f" = {entry.default}" if entry.default else "", f"  ({entry.values})" if entry.values else ""
        console.print(f"{entry.name}{default}{values}", style="bold")
        console.print(Padding(entry.meaning, (0, 0, 0, 4)))


def console_of(pipe_columns: int = PIPE_COLUMNS) -> Console:
    """Standard output; a pipe has no width of its own and gets `pipe_columns`."""
    from rich.console import Console  # not for `paceline --help`

    # Names of layers, metrics and devices may have brackets, which would be markup.
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=pipe_columns)


def print_table(rows: Sequence[Any], *columns: Column, pipe_columns: int = PIPE_COLUMNS) -> None:
    """Print a table of values, without columns that are empty."""
    from paceline.report.tables import grid_of

    named = [(heading_of(one), partial(cell_of, one)) if isinstance(one, str) else one for one in columns]
    if rows:
        console_of(pipe_columns).print(grid_of(named, rows, left=[heading for heading, _ in named], whole=["name"]))


def heading_of(name: str) -> str:
    """ "peak_memory_bytes" as "peak memory": the cells have the unit."""
    return name.removesuffix("_s").removesuffix("_bytes").replace("_", " ")


def cell_of(name: str, row: Any) -> str:
    """An attribute in the unit that its name ends with; empty where there is none."""
    value = getattr(row, name)
    if not value:
        return ""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {number:.4g}" for key, number in value.items())
    if name.endswith("_s"):
        return duration(value)
    return size(value) if name.endswith("_bytes") else f"{value:,}" if isinstance(value, int) else str(value)
