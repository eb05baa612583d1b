"""`paceline plan`: what a job will do on 1, 2, … N devices, and which number to take."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import table_console
from paceline.cli.options import AsJson, DataDir, Settings
from paceline.errors import ClusterError, JobError, PacelineError
from paceline.plan import place
from paceline.spec import Cluster, Job, parse_mesh
from paceline.spec.forecast import Forecast, Grow
from paceline.spec.mesh import AXES, num_named
from paceline.workflows.forecasts import CLUSTER_FILE
from paceline.workflows.jobs import resolve_job
from paceline.workflows.traced_model import model_on_paper, trace_model

if TYPE_CHECKING:
    from paceline.plan.forecast import Question
    from paceline.spec import Plan
    from paceline.spec.model_cost import ModelCost

PLAN_FILE, PAGE_FILE, FORECAST_FILE = "plan.json", "plan.html", "forecast.json"

_MOST_DEVICES = 1_000_000


def plan(
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="A job file or recipe that was probed.")] = None,
    cluster: Annotated[Path, typer.Option(metavar="FILE", help="What paceline probe measured.")] = CLUSTER_FILE,
    devices: Annotated[
        str | None, typer.Option(metavar="COUNTS", help="Such as 1..64 or 1,2,4; all devices of the cluster.")
    ] = None,
    grow: Annotated[
        Grow, typer.Option(help="none: same global batch on every count; batch: same batch per device.")
    ] = "none",
    efficiency_floor: Annotated[
        float, typer.Option(min=0, max=1, help="Least scaling efficiency worth recommending.")
    ] = 0.5,
    price: Annotated[float | None, typer.Option(min=0, metavar="AMOUNT", help="Of one device for an hour.")] = None,
    noise_scale: Annotated[
        float | None, typer.Option(min=1, metavar="SAMPLES", help="Gradient noise scale, which training logs.")
    ] = None,
    target_samples: Annotated[
        float | None, typer.Option(min=1, metavar="SAMPLES", help="What the job as it is needs to its target.")
    ] = None,
    link_rate: Annotated[
        float | None, typer.Option(min=1, metavar="BYTES/S", help="Between nodes in one direction, if not measured.")
    ] = None,
    devices_per_node: Annotated[
        int | None, typer.Option(min=1, metavar="G", help="On nodes beyond the cluster; as on its largest one.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where plan.json, plan.html and forecast.json go.")] = Path(),
    data: DataDir = None,
    settings: Settings = None,
    as_json: AsJson = False,
    fit: Annotated[
        Path | None, typer.Option(metavar="OBS.csv", help="Instead: fit step times that were measured …")
    ] = None,
    predict: Annotated[Path | None, typer.Option(metavar="Q.csv", help="… and forecast these placements.")] = None,
    suggest: Annotated[
        Path | None, typer.Option(metavar="OBS.csv", help="Instead: say which placements to measure next.")
    ] = None,
    budget: Annotated[int, typer.Option(min=1, metavar="K", help="How many, with --suggest.")] = 1,
    trace: Annotated[
        bool, typer.Option("--trace", help="Trace the model, so that pipelines and tensor groups are weighed too.")
    ] = False,
    dry_run_mesh: Annotated[
        str | None,
        typer.Option(metavar="MESH", help="Instead: try a mesh such as 'dp128 x tp8' on paper, without its devices …"),
    ] = None,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="… whose workers along tp keep a part of the positions each.")
    ] = False,
) -> None:
    """Forecast step time, throughput, speed-up, time to a target and cost for 1…N devices, and recommend one."""
    if sequence_parallel and (dry_run_mesh is None or parse_mesh(dry_run_mesh, num_named(dry_run_mesh)).tp == 1):
        raise JobError("--sequence-parallel needs --dry-run-mesh with an axis tp, such as 'dp2 x tp2'.")
    if fit is not None or predict is not None or suggest is not None:
        _calibrate(job, fit, predict, suggest, budget, as_json=as_json)
        return
    if job is None:
        raise JobError("Name the job to plan for, such as paceline plan job.toml; or give --fit, or --suggest.")
    resolved = resolve_job(job, settings, data)
    if dry_run_mesh is not None:
        show_dry_run(resolved, dry_run_mesh, sequence_parallel=sequence_parallel, as_json=as_json)
        return
    _check_probed(job, cluster)
    known = Cluster.load(cluster)
    # NumPy, SciPy and what plots: not for `paceline --help`.
    from paceline.plan.forecast import Question, forecast

    question = Question(
        grow=grow,
        efficiency_floor=efficiency_floor,
        price_per_device_hour=price,
        noise_scale=noise_scale,
        target_samples=target_samples,
        link_bytes_per_s=link_rate,
        devices_per_node=devices_per_node,
    )
    counts = device_counts(devices or f"1..{max(1, len(known.devices))}")
    facts = trace_model(resolved) if trace else None
    found = forecast(resolved, known, counts, question, facts)
    recommended = recommended_plan(resolved, known, found, question, facts)
    _write(found, recommended, out)
    _show(found, recommended, out, as_json=as_json)


def device_counts(text: str) -> list[int]:
    """ "1..4,8" as [1, 2, 3, 4, 8]; long ranges are thinned out. Raises `JobError`."""
    from paceline.plan.forecast import counts_between

    counts: set[int] = set()
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d+)\s*(?:(?:\.\.|-|…)\s*(\d+)\s*)?", part)
        first, last = (0, 0) if ends is None else (int(ends[1]), int(ends[2] or ends[1]))
        if not 1 <= first <= last <= _MOST_DEVICES:
            raise JobError(f"--devices {text} should be counts such as 1,2,4 or a range such as 1..64.")
        counts.update(counts_between(first, last))
    return sorted(counts)


def recommended_plan(
    job: Job, cluster: Cluster, forecast: Forecast, question: Question | None = None, facts: ModelCost | None = None
) -> Plan | None:
    """The plan of the recommended row; None where the cluster has too few devices for it.

    Its workers are laid out on a mesh where replicas do not fit or a mesh is clearly faster.
    """
    from paceline.plan.mesh_selection import choose_mesh, timed_facts

    row = forecast.recommended
    if row.devices > len(cluster.devices):
        return None
    grown = job.grown(row.devices) if forecast.grow == "batch" else job
    rate = None if question is None else question.link_bytes_per_s
    choice = choose_mesh(grown, facts or timed_facts(job, cluster), cluster, row.devices, link_bytes_per_s=rate)
    if not choice.mesh.is_plain:
        plan = choice.applied(place(grown, cluster, row.devices, mesh=choice.mesh))
        samples_per_s = row.samples_per_s if choice.step_s is None else grown.global_batch_size / choice.step_s
        return dataclasses.replace(plan, forecast_samples_per_s=samples_per_s)
    plan = place(
        grown,
        cluster,
        row.devices,
        micro_batch_size=row.micro_batch_size if row.num_micro_batches > 1 and job.parity == "numeric" else None,
        algorithm=row.algorithm if row.devices > 1 else "auto",
    )
    return dataclasses.replace(plan, forecast_samples_per_s=row.samples_per_s)


def show_dry_run(job: Job, text: str, *, sequence_parallel: bool = False, as_json: bool) -> None:
    """Try a mesh on paper, with as many workers as its degrees make, and print what each would hold and send.

    Raises:
        JobError: no mesh, or more shares than the job has virtual shards.
    """
    mesh = parse_mesh(text, num_named(text))
    if mesh.num_assignments > job.virtual_shards:
        raise JobError(
            f"{mesh} divides the batch {mesh.num_assignments} ways, and the job has virtual_shards = "
            f"{job.virtual_shards}; "
            f"use --set virtual_shards={mesh.num_assignments} or more, or fewer replicas."
        )
    from paceline.parallel.dry_run import dry_run

    shard = -(-job.global_batch_size // job.virtual_shards)
    model, arguments = model_on_paper(job, shard)
    found = dry_run(
        model,
        arguments,
        mesh,
        num_micro_batches=-(-job.virtual_shards // mesh.num_assignments),
        optimizer_copies=job.optim.state_copies,
        sequence_parallel=sequence_parallel,
    )
    sent_bytes = {axis: round(found.sent_bytes(axis)) for axis in AXES if mesh.degree(axis) > 1}
    if as_json:
        stages = [
            {
                "first_layer": stage.layers[0],
                "last_layer": stage.layers[1],
                "parameter_bytes": stage.parameter_bytes,
                "activation_bytes": stage.activation_bytes,
                "memory_bytes": memory.total_bytes,
            }
            for stage, memory in zip(found.stages, found.memory, strict=True)
        ]
        facts = {"mesh": str(mesh), "num_workers": mesh.num_workers, "num_micro_batches": found.num_micro_batches}
        print(json.dumps({**facts, "stages": stages, "sent_bytes": sent_bytes, "bubble": found.bubble}))
        return
    from rich import box
    from rich.table import Table

    from paceline.plan.search import size

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in ("stage", "layers", "parameters", "activations", "memory"):
        table.add_column(heading, justify="left" if heading == "layers" else "right", overflow="fold")
    for number, (stage, memory) in enumerate(zip(found.stages, found.memory, strict=True)):
        held = (stage.parameter_bytes, stage.activation_bytes, memory.total_bytes)
        table.add_row(str(number), " … ".join(stage.layers), *map(size, held))
    many = "es" * (found.num_micro_batches > 1)
    print(
        f"{mesh}: {mesh.num_workers} workers, {found.num_micro_batches} micro-batch{many} of {shard} a share and step"
    )
    table_console(pipe_columns=120).print(table)
    for axis, num_bytes in sent_bytes.items():
        print(f"{axis}: a worker sends {size(num_bytes)} a step")
    print(f"pipeline bubble: {found.bubble:.0%}")


def _check_probed(job: str, cluster: Path) -> None:
    if not cluster.exists():
        raise ClusterError(
            f"There is no {cluster}, and nothing is known of this hardware; run paceline probe {job} first."
        )


def _calibrate(
    job: str | None, fit: Path | None, predict: Path | None, suggest: Path | None, budget: int, *, as_json: bool
) -> None:
    """From step times that somebody measured, without a job or a cluster."""
    from paceline.cli.plan_fit import fit_and_predict, suggest_next

    if job is not None:
        raise JobError(f"--fit and --suggest work on measured step times alone; leave {job} out.")
    if suggest is not None:
        if fit is not None or predict is not None:
            raise JobError("--suggest stands alone; ask for --fit and --predict in a second call.")
        suggest_next(suggest, budget, as_json)
    elif fit is None or predict is None:
        given, missing = ("--predict", "--fit OBS.csv") if fit is None else ("--fit", "--predict Q.csv")
        raise JobError(f"{given} needs {missing} beside it.")
    else:
        fit_and_predict(fit, predict, as_json)


def _write(forecast: Forecast, recommended: Plan | None, out: Path) -> None:
    """forecast.json and plan.html, and plan.json if there is one to follow."""
    from paceline.report.plan_page import render_plan_page

    try:
        out.mkdir(parents=True, exist_ok=True)
        forecast.save(out / FORECAST_FILE)
        (out / PAGE_FILE).write_text(render_plan_page(forecast), encoding="utf-8", newline="\n")
        if recommended is not None:
            text = json.dumps(recommended.to_mapping(), indent=2) + "\n"
            (out / PLAN_FILE).write_text(text, encoding="utf-8")
    except OSError as problem:
        raise PacelineError(f"The plan cannot be written into '{out}': {problem.strerror}.") from None


def _show(forecast: Forecast, recommended: Plan | None, out: Path, *, as_json: bool) -> None:
    if as_json:
        plain = None if recommended is None else recommended.to_mapping()
        print(json.dumps({**forecast.to_mapping(), "plan": plain}))
        return

    from paceline.report.plan_table import plan_table

    console = table_console(pipe_columns=160)
    console.print(plan_table(forecast, console.width))
    if recommended is None:
        row = forecast.recommended
        print(f"No {PLAN_FILE}: the cluster lacks devices for {row.devices}; probe the nodes they are on.")
    else:
        print(out / PLAN_FILE)
    print(out / PAGE_FILE)
