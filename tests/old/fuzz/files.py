"""Every file that the program reads, with what reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from paceline.errors import PacelineError
from paceline.hardware.read import read_topology
from paceline.launch.failures import Failure
from paceline.launch.node_list import parse_node_list, read_node_file
from paceline.report.comm_bench import comm_mapping
from paceline.report.comm_page import load_timings
from paceline.report.files import study_mapping
from paceline.report.job_text import job_toml
from paceline.report.study import analyse, detect_grow
from paceline.run_lease import LEASE_FILE, own_lease, run_token
from paceline.spec import Cluster, Job, Plan, load_job
from paceline.spec.checkpoint_timing import CheckpointRequest, CheckpointTimings
from paceline.spec.record import RunRecord
from paceline.train.records.metrics import json_lines
from paceline.workflows.plan import plan as plan_job
from paceline.workflows.step_times import fit_step_times
from tests.old.fuzz.values import Case, cases, leaves, spoiled
from tests.old.sample_clusters import gpu_cluster
from tests.old.sample_records import sample_job, sample_record
from tests.old.sample_timings import sample_timings

Use = Callable[[Path], object]


@dataclass(frozen=True)
class Format:
    """A file: its name, what it may hold, and what the program does with it."""

    name: str
    contents: st.SearchStrategy[Case]
    """Bytes."""
    use: Use


def _json(name: str, valid: Mapping[str, Any], use: Use, free: tuple[str, ...] = ()) -> Format:
    whole = json.dumps(valid).encode()
    inside = cases(valid, free).map(lambda case: Case(json.dumps(case.content).encode(), case.impossible))
    return Format(name, inside | spoiled(whole).map(Case), use)


def _text(name: str, valid: str, use: Use) -> Format:
    return Format(name, spoiled(valid.encode()).map(Case), use)


def _use_job(path: Path) -> None:
    job = load_job(path)
    assert Job.from_mapping(job.to_mapping()) == job
    job_toml(job)
    job.with_settings(["optim.lr=0.1"])


def _use_record(path: Path) -> None:
    records = [RunRecord.load(path)]
    study = analyse(records, grow=detect_grow(records), tolerance=0.01)
    json.dumps(study_mapping(study))
    records[0]._repr_html_()
    json.dumps(records[0].summary(), allow_nan=False)


def _use_cluster(path: Path) -> None:
    cluster = Cluster.load(path)
    planned = plan_job(sample_job(name="job"), cluster=cluster, devices="1,2,9")
    json.dumps(planned.forecast.to_mapping())


def _use_plan(path: Path) -> None:
    plan = Plan.load(path)
    assert Plan.from_mapping(plan.to_mapping()) == plan


def _use_lease(path: Path) -> None:
    if not run_token(path.parent):
        raise PacelineError("it says nothing")


def _use_note(path: Path) -> None:
    if Failure.read(path) is None:
        raise PacelineError("it says nothing")


def _use_metrics(path: Path) -> None:
    json_lines(path.parent, 3, print).close()


def _use_nodes(path: Path) -> None:
    read_node_file(path)


def _settings() -> st.SearchStrategy[Case]:
    """Settings of a command line, one a line."""
    job = sample_job(optim={"schedule": "step", "step_epochs": [1.0, 2.0]}).to_mapping()
    found = [
        (".".join(map(str, path)), leaf) for path, leaf in leaves(job) if not any(isinstance(p, int) for p in path)
    ]
    numbers = [key for key, leaf in found if isinstance(leaf, int | float) and not isinstance(leaf, bool)]
    impossible = [
        "nan",
        "inf",
        "-inf",
        "1e999",
        "-1",
        "2" * 25,
        "0x" + "f" * 5_000,
        "9" * 5_000,
        "[" * 2_000,
        "{}",
        "'1'",
    ]
    odd = ["0", "1", "1e308", "٣", "x" * 5_000, "a.b", "true", "none", "1\ny=2", "../..", "\x1b[2J", "#", "''"]
    return st.builds(
        lambda key, value: Case(f"{key}={value}".encode(), f"{key}={value[:20]}"),
        st.sampled_from(numbers),
        st.sampled_from(impossible),
    ) | st.builds(
        lambda key, value: Case(f"{key}={value}".encode("utf-8", "replace")),
        st.sampled_from([key for key, _ in found]) | st.text(max_size=10) | st.just("a." * 9_000),
        st.sampled_from(odd) | st.text(max_size=12),
    )


def _use_setting(path: Path) -> None:
    job = sample_job(optim={"schedule": "step", "step_epochs": [1.0, 2.0]})
    job.with_settings([path.read_bytes().decode("utf-8", "replace")])


_TOPOLOGY = """        GPU0    GPU1    NIC0    CPU Affinity
GPU0     X      NV12    PIX     0-15
GPU1    NV12     X      SYS     16-31
NIC0    PIX     SYS      X

NIC Legend:
  NIC0: mlx5_0
"""
_STEPS = """num_nodes,devices_per_node,micro_batch_size,step_time_s,sync_time_s
1,1,8,0.020,
1,2,8,0.024,0.003
1,4,8,0.027,0.004
2,4,8,0.031,0.006
2,4,16,0.055,0.006
4,4,8,0.033,0.007
"""
_FAILURE = {
    "rank": 1,
    "pid": 7,
    "time": 1.5,
    "type": "ValueError",
    "message": "m",
    "traceback": "t",
    "is_user_error": False,
}


def _timings() -> CheckpointTimings:
    return CheckpointTimings(
        CheckpointRequest("there"), 2, "cpu", 10, 0.1, (0.1, 0.2), (0.1, 0.1), (0.3, 0.3), (0.2, 0.2)
    )


def _fit(path: Path) -> None:
    fit_step_times(path, path)


FORMATS = (
    _text("job.toml", job_toml(sample_job(optim={"schedule": "step", "step_epochs": [1.5, 3.0]})), _use_job),
    _json("job.json", sample_job().to_mapping(), lambda path: Job.load(path), ("options", "none")),
    _json(
        "record.json",
        sample_record(2).to_mapping(),
        _use_record,
        ("options", "metrics", "train_loss", "loss", "accuracy", "noise_scale", "environment"),
    ),
    _json("cluster.json", {"schema": 1, **gpu_cluster(2, 2).to_mapping()}, _use_cluster),
    _json("plan.json", Plan(world_size=2).to_mapping(), _use_plan),
    _json(
        "timings.json", sample_timings().to_mapping(), lambda path: comm_mapping(load_timings(path)), ("environment",)
    ),
    _json(
        "checkpoint-timings.json", _timings().to_mapping(), lambda path: CheckpointTimings.load(path), ("environment",)
    ),
    _json("rank1.json", _FAILURE, _use_note, ("rank", "pid", "time")),
    _json(LEASE_FILE, own_lease("token").to_mapping(), _use_lease),
    _text("hosts.txt", "gpu1 slots=8\nkim@gpu2:4 # two\n[fd00::3]\n", _use_nodes),
    _text(
        "hosts", "a:8,kim@b:4,[fd00::3]:2", lambda path: parse_node_list(path.read_bytes().decode("utf-8", "replace"))
    ),
    _text("topology.txt", _TOPOLOGY, read_topology),
    _text("steps.csv", _STEPS, _fit),
    _text("metrics.jsonl", '{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n', _use_metrics),
    Format("setting", _settings(), _use_setting),
)
