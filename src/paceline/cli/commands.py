"""The commands, in the order of the pipeline: what each does with its options, and what it prints."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paceline
from paceline.cli.options import COMMANDS as COMMANDS
from paceline.cli.options import command, parse, to_stderr
from paceline.errors import JobError
from paceline.words import number_of
from paceline.workflows.catalog import CatalogEntry

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.workflows.checkpoint import CheckpointState

Column = tuple[str, Callable[[Any], str]]
"""A heading, and what a row has below it."""
LEVELS = {"error": "bold red", "warning": "yellow", "ok": "green"}
"""Levels of what the doctor finds, what needs action first, and their styles."""


@command("topo", "as_json")
def topo(as_json: bool = False, **options: Any) -> None:
    """Show how the GPUs of a node are connected, and choose the best K of them."""
    found = paceline.topo(**options)

    from paceline.report.topology import choice_lines, node_view, topology_mapping

    choice = found.choice if "pick" in options else None
    if as_json:
        pair = {} if found.pair_sentence is None else {"pair": found.pair_sentence}
        print(json.dumps({**topology_mapping(found.node, found.choice), **pair}))
    elif found.pair_sentence is not None:
        print(found.pair_sentence)
    else:
        console = table_console(pipe_columns=200)  # 16 GPUs and 10 network cards fit
        console.print(node_view(found.node, console.width, choice.ring.devices if choice else ()))
        # Whole lines, however narrow the terminal: the last one is there to be copied.
        for line in ["", *choice_lines(choice)] if choice else []:
            console.print(line, soft_wrap=True)


@command("probe", "as_json")
def probe(as_json: bool = False, out: str = "cluster.json", **options: Any) -> None:
    """Time real steps of a job on 1, 2, 4, … workers, for `paceline plan`: cluster.json."""
    timing = paceline.probe(out=out, **options)
    if as_json:
        from paceline.spec.codec import to_mapping

        print(json.dumps({"timing": to_mapping(timing), "cluster": out}))
        return

    from paceline.report.formats import duration

    columns: list[Column] = [
        ("nodes x workers", lambda row: row.layout_name),
        ("micro-batch", lambda row: f"{row.num_passes} x {row.micro_batch_size}"),
        ("step", lambda row: duration(row.step_time_s)),
        ("varies by", lambda row: f"{100 * row.spread:.0f} %"),
        ("samples/s", lambda row: f"{row.global_batch_size / row.step_time_s:,.0f}"),
        ("waits for gradients", lambda row: duration(row.sync_time_s)),
        ("waits for samples", lambda row: duration(row.loading_s)),
        ("peak GiB", lambda row: "" if row.peak_memory_bytes is None else f"{row.peak_memory_bytes / 2**30:.2f}"),
    ]
    print_grid(columns, timing.steps)
    print(f"{timing.job}: {timing.num_parameters:,} parameters on {timing.device}")
    print(out)


@command("plan", "as_json", "dry_run_mesh")
def plan(job: str, as_json: bool = False, dry_run_mesh: str | None = None, out: str = ".", **options: Any) -> None:
    """Forecast time, throughput and cost of a job on 1…N devices, and recommend a number of them."""
    if dry_run_mesh is not None:
        unused = options.keys() - {"settings", "data"}
        if unused:
            raise JobError(f"--{min(unused).replace('_', '-')} has no effect with --dry-run-mesh: leave it out.")
        tried = paceline.dry_run_mesh(job, dry_run_mesh, **options)
        if as_json:
            print(json.dumps(tried.to_mapping()))
        else:
            table_console(pipe_columns=120).print(tried.table())
        return
    planned = paceline.plan(job, out=out, **options)
    if as_json:
        plain = None if planned.plan is None else planned.plan.to_mapping()
        print(json.dumps({**planned.forecast.to_mapping(), "plan": plain}))
        return

    from paceline.report.plan_page import plan_table

    table_console(pipe_columns=160).print(plan_table(planned.forecast))
    if planned.plan is not None:
        print(Path(out) / "plan.json")
    elif not planned.forecast.is_fitted:
        num_devices = planned.forecast.recommended.devices
        print(f"No plan.json: the cluster lacks devices for {num_devices}; probe the nodes they are on.")
    print(Path(out) / "plan.html")


@command("launch", takes_arguments="rest")
def launch(**options: Any) -> None:
    """Run a script on workers of this machine or of several."""
    paceline.launch(**options)


@command("train", "as_json", "dry_run")
def train(as_json: bool = False, dry_run: bool = False, **options: Any) -> None:
    """Train a job on workers of this machine or of several."""
    from paceline.workflows.train import train_commands

    if dry_run:
        print(train_commands(**options))
        return
    options = with_run_folder(options)
    run_dir = options["out"]
    try:
        record = paceline.train(**options)
    except (KeyboardInterrupt, SystemExit):
        say_how_to_go_on(run_dir)
        raise
    if not record.is_complete:
        say_how_to_go_on(run_dir)
    if as_json:
        print(json.dumps(record.summary()))
        return
    accuracy = "" if record.accuracy is None else f"accuracy {record.accuracy:.2%}, "
    expected = record.plan.forecast_samples_per_s
    forecast = "" if expected is None else f" (forecast {expected:,.0f})"
    print(
        f"{accuracy}{record.samples_per_s:,.0f} samples/s{forecast} on {record.world_size} x "
        f"{record.plan.device_kind}, {record.steps} steps in {record.train_s:.1f} s ({record.wall_s:.1f} s in all)\n"
        f"weights_sha256 {record.weights_sha256}\n{run_dir}/record.json"
    )


def with_run_folder(options: dict[str, Any], ending: str = "") -> dict[str, Any]:
    """The options with a job itself, and with the folder of its run or study, which is known before it begins."""
    from paceline.workflows.jobs import resolve_job
    from paceline.workflows.run_folder import new_run_dir
    from paceline.workflows.strategy import split_settings

    of_job, of_plan = split_settings(options.pop("settings", ()))
    job = resolve_job(options.pop("job"), of_job, options.pop("data", None))
    return options | {"job": job, "settings": of_plan, "out": new_run_dir(options.get("out"), job.name + ending)}


def say_how_to_go_on(run_dir: Path) -> None:
    """Say which command goes on with a run that was interrupted."""
    if (run_dir / "checkpoints" / "latest").exists():
        is_named = any(word.startswith("--out") for word in sys.argv)
        to_stderr(
            f"To go on: {shlex.join(['paceline', *sys.argv[1:], *([] if is_named else ['--out', str(run_dir)])])}"
        )


@command("scale", "as_json")
def scale(as_json: bool = False, **options: Any) -> None:
    """Train a job on 1, 2, … N devices and write the study: scaling.json, .csv, report.html."""
    options = with_run_folder(options, "-scaling")
    study, study_dir = paceline.scale(**options), options["out"]
    if as_json:
        print(json.dumps(json.loads((study_dir / "scaling.json").read_text(encoding="utf-8"))))
    else:
        print_study(study, study_dir)


@command("report")
def report(out: str = ".", **options: Any) -> None:
    """Write tables and the HTML page from run folders."""
    print_study(paceline.report(out=out, **options), Path(out))


def print_study(study: paceline.Study, folder: Path) -> None:
    """The table of a study, and where its page lies."""
    from rich.console import Console

    from paceline.report.study_page import study_table

    Console(markup=False).print(study_table(study))
    print(folder / "report.html")


@command("verify", "as_json", takes_arguments="others")
def verify(as_json: bool = False, **options: Any) -> int:
    """Check that N workers compute what one does; name what differs first, and the likely cause.

    Any training script of torch, unchanged, with the arguments that follow it: paceline verify --batch 8 -n 2 train.py
    -- --batch-size {batch}. Or a job, which is compared in float64. Ends with 0 if all is equal, 1 if something
    differs, 2 if that could not be told.
    """
    if as_json:
        del options["say"]
    verdicts = paceline.verify(**options)
    for verdict in verdicts:
        print(json.dumps(dataclasses.asdict(verdict)) if as_json else verdict.sentence())
    outcomes = {verdict.outcome for verdict in verdicts}
    return 0 if outcomes == {"equal"} else 1 if "differs" in outcomes else 2


@command("submit slurm", takes_arguments="rest")
def slurm(command: str, arguments: Sequence[str], dry_run: bool = False, **options: Any) -> None:
    """Write a job script that runs `paceline COMMAND …` on an allocation, and submit it."""
    if command in ("train", "launch", "scale"):
        check_submitted(command, arguments)
    job = paceline.submit.slurm(command, arguments, dry_run=dry_run, **options)
    if dry_run:
        print(job.script, end="")
    else:
        log = f"{job.run_dir}/slurm-{job.job_id}.log"
        print(f"Slurm job {job.job_id}; its output goes to {log}. scancel {job.job_id} ends it.")


def check_submitted(command: str, arguments: Sequence[str]) -> None:
    """Refuse what the command would refuse in the allocation. Raises `PacelineError`."""
    from paceline.workflows.jobs import check_names, resolve_job
    from paceline.workflows.launch import check_script
    from paceline.workflows.strategy import split_settings

    given = parse(command, COMMANDS[command], arguments)
    if command == "launch":
        check_script(given["script"], is_module="module" in given)
    else:
        check_names(resolve_job(given["job"], split_settings(given.get("settings", ()))[0], given.get("data")))


@command("submit kubernetes", takes_arguments="others")
def kubernetes(**options: Any) -> None:
    """Print manifests for `kubectl apply -f -`: one pod a node, PyTorch's elastic agent in each."""
    print(paceline.submit.kubernetes(**options), end="")


@command("checkpoint ls", "as_json")
def checkpoint_ls(as_json: bool = False, **options: Any) -> None:
    """List the checkpoints of a run, oldest first; only `verify` reads them."""
    from rich.filesize import decimal

    states = paceline.checkpoint.ls(**options)
    if as_json:
        print(json.dumps({"checkpoints": [dataclasses.asdict(one) for one in states]}))
        return
    columns: list[Column] = [
        ("checkpoint", lambda one: one.name),
        ("step", lambda one: f"{one.step:,}" if one.saved_at else ""),
        ("saved (UTC)", lambda one: one.saved_at.replace("T", " ").removesuffix("Z")),
        ("workers", lambda one: str(one.workers) if one.saved_at else ""),
        ("size", lambda one: decimal(one.num_bytes) if one.saved_at else ""),
        ("metrics", lambda one: ", ".join(f"{name} {value:.4g}" for name, value in one.metrics.items())),
        ("state", state_in_words),
    ]
    print_grid(columns, states, left=("checkpoint", "metrics", "state"))


@command("checkpoint verify")
def checkpoint_verify(**options: Any) -> int:
    """Read every byte of every checkpoint; exit code 1 if one is damaged."""
    states = paceline.checkpoint.verify(**options)
    for one in states:
        print(f"{one.name}  {state_in_words(one)}")
    return int(any(one.state == "damaged" for one in states))


def state_in_words(one: CheckpointState) -> str:
    return f"{one.state}: {one.problem}" if one.problem else one.state


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


@command("doctor", "as_json", "strict", "show_all")
def doctor(as_json: bool = False, strict: bool = False, show_all: bool = False, **options: Any) -> int:
    """Check this machine and say what to fix: exit code 0 is fine, 2 is an error."""
    findings = sorted(paceline.doctor(**options), key=lambda finding: list(LEVELS).index(finding.level))
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    if as_json:
        listed = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({**{f"num_{level}": count for level, count in counts.items()}, "findings": listed}))
    else:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for finding in findings:
            if show_all or finding.level != "ok":
                body = Text(f"{finding.node}: {finding.what}" if finding.node else finding.what)
                body.append(f"\n→ {finding.fix}" if finding.fix else "", style="cyan")
                table.add_row(Text(finding.level, style=LEVELS[finding.level]), body)
        if table.row_count:
            table_console(pipe_columns=100).print(table)
        warnings, errors = number_of(counts["warning"], "warning"), number_of(counts["error"], "error")
        print(f"{number_of(counts['ok'], 'check')} passed, {warnings}, {errors}.")
    return 2 if counts["error"] else int(strict and counts["warning"] > 0)


@command("list recipes", function="catalog.recipes")
def list_recipes() -> None:
    """List the recipes: jobs that come with the package."""
    print_entries(paceline.catalog.recipes())


@command("list models", function="catalog.models")
def list_models() -> None:
    """List the reference models and their options."""
    print_entries(paceline.catalog.models())


@command("list data", function="catalog.data_sets")
def list_data() -> None:
    """List the data sets that a job can name."""
    print_entries(paceline.catalog.data_sets())


@command("list keys", function="catalog.job_keys")
def list_keys(prefix: str = "") -> None:
    """List every key of a job file, then those that only --set takes: default, values and meaning."""
    print_entries(paceline.catalog.job_keys(prefix))


def print_entries(entries: Sequence[CatalogEntry]) -> None:
    """Names and what they are."""
    columns: list[Column] = [
        ("name", lambda entry: entry.name),
        ("default", lambda entry: entry.default),
        ("values", lambda entry: entry.values),
        ("description", lambda entry: entry.meaning),
    ]
    print_grid(columns, entries, pipe_columns=400)


def table_console(pipe_columns: int) -> Console:
    """Standard output; a pipe has no width of its own and gets `pipe_columns`."""
    from rich.console import Console  # not for `paceline --help`

    # Names of layers, metrics and devices may have brackets, which would be markup.
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=pipe_columns)


def print_grid(
    columns: Sequence[Column], rows: Sequence[Any], *, left: Collection[str] = (), pipe_columns: int = 120
) -> None:
    """Print a table, without the columns of which nothing is known."""
    from paceline.report.tables import grid_of

    table_console(pipe_columns).print(grid_of(columns, rows, left=left or [heading for heading, _ in columns]))
