"""`paceline probe`: what this node's links, model, loader and disk really do, for plans to be made from."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import AsJson, DataDir, Quiet, Settings, Threads, resolve_job
from paceline.errors import ClusterError, PacelineError, WorkerFailed
from paceline.hardware import detect
from paceline.launch import run_workers
from paceline.plan import place
from paceline.spec import Cluster, Job, JobTiming, Link, Node, Plan
from paceline.spec.codec import from_mapping, to_mapping

if TYPE_CHECKING:
    from rich.table import Table

_PIPE_COLUMNS = 100
_PCI_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""The order in which the cluster counts GPUs; CUDA's own puts the fastest first."""


def probe(
    job: Annotated[
        str | None, typer.Argument(metavar="JOB", help="A job file or recipe whose model and data are timed too.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", min=1, help="Workers that will share a batch; all devices.")
    ] = None,
    out: Annotated[Path, typer.Option(help="What was measured goes here, into what there is.")] = Path("cluster.json"),
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Where runs, and so checkpoints, are written.")] = Path(
        "runs"
    ),
    budget: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="For the job's timings.")] = 60.0,
    data: DataDir = None,
    settings: Settings = None,
    threads: Threads = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure the links of this machine, and a job's model, loader and checkpoints; write cluster.json."""
    resolved = None if job is None else resolve_job(job, settings, data)
    before = Cluster.load(out) if out.exists() else None
    found = detect()
    num_workers = workers or min(
        len(found.devices), len(found.devices) if resolved is None else resolved.virtual_shards
    )
    plan = None if resolved is None else place(resolved, found, num_workers, threads_per_worker=threads)

    timing = None
    with _scratch(folder) as scratch:
        node, reasons = _measure_links(found.nodes[0], scratch, quiet=quiet)
        if resolved is not None and plan is not None:
            timing, more = _measure_job(resolved, plan, found, scratch, budget, quiet=quiet)
            reasons += more
    merged = merge(before, node, timing)
    try:
        merged.save(out)
    except OSError as problem:
        raise ClusterError(f"{out} cannot be written: {problem}.") from None
    _show(node, timing, reasons, out, as_json=as_json)


def merge(before: Cluster | None, node: Node, timing: JobTiming | None) -> Cluster:
    """What was known, with this node and this job's timing in place of what was known of them."""
    known = before or Cluster(())
    others = tuple(other for other in known.nodes if other.hostname != node.hostname)
    is_known = len(others) < len(known.nodes)
    nodes = tuple(node if other.hostname == node.hostname else other for other in known.nodes)
    kept = tuple(
        other
        for other in known.timings
        if timing is None
        or (other.job, other.device, other.threads_per_worker) != (timing.job, timing.device, timing.threads_per_worker)
    )
    return dataclasses.replace(
        known,
        nodes=nodes if is_known else (*nodes, node),
        timings=kept if timing is None else (*kept, timing),
    )


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder of our own on the disk that checkpoints go to; it stays if a worker fails, whose report lies there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="probe-", dir=folder)).absolute()
    except OSError as problem:
        raise PacelineError(f"The folder {folder} cannot be used: {problem}; name another with --folder.") from None
    try:
        yield scratch
    except WorkerFailed:
        raise
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    shutil.rmtree(scratch, ignore_errors=True)


def _measure_links(node: Node, scratch: Path, *, quiet: bool) -> tuple[Node, list[str]]:
    """`node` with what two of its devices tell each other, and what could not be measured."""
    from rich.console import Console

    from paceline.hardware.probe import LINKS_FILE, NODE_FILE, LinkProbe, with_measured

    _write(scratch / NODE_FILE, to_mapping(node))
    console = Console(stderr=True, quiet=quiet)
    plan = Plan(device_kind=node.device_kind, threads_per_worker=1)
    with console.status("links inside this node"):
        run_workers(
            plan,
            ["-m", "paceline.hardware.probe", str(scratch)],
            run_dir=scratch,
            environ=_PCI_ORDER,
        )
    result = LinkProbe.load(scratch / LINKS_FILE)
    return with_measured(node, result.links), list(result.not_measured)


def _measure_job(
    job: Job, plan: Plan, cluster: Cluster, scratch: Path, budget_s: float, *, quiet: bool
) -> tuple[JobTiming, list[str]]:
    """What the parts of `job` take on the first device, by itself."""
    _write(scratch / "job.json", job.to_mapping())
    _write(
        scratch / "request.json",
        {
            "largest_micro_batch_size": -(-job.global_batch_size // plan.world_size),
            "device_kind": plan.device_kind,
            "device": cluster.devices[0].name,
            "threads_per_worker": plan.threads_per_worker,
            "budget_s": budget_s,
        },
    )
    alone = Plan(device_kind=plan.device_kind, threads_per_worker=plan.threads_per_worker)
    program = ["-m", "paceline.train.probe", str(scratch), *(["--quiet"] if quiet else [])]
    run_workers(alone, program, run_dir=scratch, environ=_PCI_ORDER)
    result = json.loads((scratch / "probe.json").read_text(encoding="utf-8"))
    return from_mapping(JobTiming, result["timing"]), list(result["not_measured"])


def _write(path: Path, mapping: dict[str, object]) -> None:
    path.write_text(json.dumps(mapping) + "\n", encoding="utf-8")


def _show(node: Node, timing: JobTiming | None, reasons: Sequence[str], out: Path, *, as_json: bool) -> None:
    """Two tables and what was not measured; or one line of JSON."""
    measured = [link for link in node.links if link.source == "measured"]
    if as_json:
        timings = None if timing is None else to_mapping(timing)
        links = [to_mapping(link) for link in measured]
        print(json.dumps({"links": links, "timing": timings, "not_measured": list(reasons), "cluster": str(out)}))
        return

    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_COLUMNS)
    if measured:
        console.print(_link_table(measured))
    if timing is not None:
        console.print(_timing_table(timing))
        print(f"{timing.job}: {timing.num_parameters:,} parameters on {timing.device}")
        if timing.largest_micro_batch_size is not None:
            print(f"largest micro-batch that was tried and fits: {timing.largest_micro_batch_size}")
        if timing.loader_samples_per_s is not None:
            print(f"loader: {timing.loader_samples_per_s:,.0f} samples/s")
        if timing.checkpoint_bytes_per_s is not None:
            print(f"checkpoints: {timing.checkpoint_bytes_per_s / 1e6:,.0f} MB/s")
    for reason in reasons:
        print(f"not measured: {reason}")
    print(out)


def _link_table(links: Sequence[Link]) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("link", "between"):
        table.add_column(name)
    for name in ("GB/s", "latency µs"):
        table.add_column(name, justify="right")
    labels = [link.label for link in links]
    for link in (links[labels.index(label)] for label in dict.fromkeys(labels)):  # measured once, on the first pair
        rate = "" if link.bytes_per_s is None else f"{link.bytes_per_s / 1e9:.2f}"
        latency = "" if link.latency_s is None else f"{link.latency_s * 1e6:.1f}"
        table.add_row(link.label, " and ".join(link.ends), rate, latency)
    return table


def _timing_table(timing: JobTiming) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    has_memory = any(row.peak_memory_bytes is not None for row in timing.micro_batches)
    for name in ("micro-batch", "ms a pass", "samples/s", *(["peak GiB"] if has_memory else [])):
        table.add_column(name, justify="right")
    for row in timing.micro_batches:
        memory = [] if row.peak_memory_bytes is None else [f"{row.peak_memory_bytes / 2**30:.2f}"]
        rate = row.micro_batch_size / row.seconds
        table.add_row(str(row.micro_batch_size), f"{row.seconds * 1e3:.2f}", f"{rate:,.0f}", *memory)
    return table
