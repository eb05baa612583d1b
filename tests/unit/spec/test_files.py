"""Clusters, plans, run records and forecasts are files: they read back as saved, and a damaged one is named.

An invalid key or value is one sentence with the file, the place in it and what is allowed.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Protocol, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ClusterError, PacelineError
from paceline.measure.probe import note_forecast_error
from paceline.spec import Cluster, Device, Job, Link, Mesh, Node, PipelineSpec, Plan, RunRecord, StepRow
from paceline.spec.cluster import JobTiming
from paceline.spec.codec import Bounds
from paceline.spec.forecast import Forecast, ForecastRow
from paceline.spec.plan import NodePlacement
from paceline.spec.record import EpochRecord, EvaluationRecord, StepTime

FINITE = Bounds()
GPU = Device(
    "cuda", 1, "NVIDIA A100", 2**36, uuid="GPU-1", pci_bus_id="0000:3b:00.0", numa_node=1, cpus=(4, 5), busy="in use"
)
NODE = Node(
    "gpu1",
    64,
    2**38,
    "EPYC",
    devices=(Device("cuda", 0, "NVIDIA A100", 2**36), GPU),
    nics={"NIC0": "mlx5_0"},
    links=(Link(("GPU0", "GPU1"), "NV12", 300e9), Link(("GPU0", "NIC0"), "PIX")),
    notes=("GPU 2 is in MIG mode.",),
    is_remote=True,
)
TIMING = JobTiming(
    "digits",
    "NVIDIA A100",
    25_000_000,
    8,
    (
        StepRow(
            (1,), 32, 2, gradient_bytes=1e8, step_time_s=0.02, loading_s=0.001, spread=0.02, peak_memory_bytes=2**31
        ),
        StepRow((2, 1), 32, 1, "hierarchical", 1e8, 1.25e9, 4, 0.015, 0.002),
    ),
    num_samples=1437,
    settings={"model.name": "'lenet'"},
)
CLUSTER = Cluster((NODE, Node("kim@gpu2", 8, 2**34, "Xeon")), timings=(TIMING,), forecast_errors=(0.1, -0.03))
PLAN = Plan(
    world_size=3,
    device_kind="cuda",
    nodes=(NodePlacement("gpu1", 2, devices=(3, 0), cpus=((0, 1), (2, 3))), NodePlacement("kim@gpu2")),
    threads_per_worker=2,
    algorithm="hierarchical",
    mesh=Mesh(fsdp=3, zero_stage=2),
    pipeline=PipelineSpec("gpipe", 1, ("blocks.3",)),
    timeout_s=30.0,
    forecast_samples_per_s=812.5,
)
RECORD = RunRecord(
    job=Job(name="digits"),
    plan=PLAN,
    steps=10,
    samples_seen=640,
    accuracy=None,
    loss=math.nan,
    train_loss=math.inf,
    train_s=1.5,
    wall_s=2.5,
    time_to_first_step_s=0.5,
    samples_per_s=400.0,
    step_time=StepTime(0.15, 0.01, 0.1, 0.04),
    weights_sha256="ab" * 32,
    epochs=(EpochRecord(1, math.nan, 0.1, 1.5, {"loss": math.inf}, 210.0, {"dice": 0.5}),),
    notes=("The rate was scaled.",),
    environment={"torch": "2.13"},
    evaluations=(EvaluationRecord(10, 1, {"loss": 0.5}, False),),
    best=EvaluationRecord(10, 1, {"loss": 0.5}),
    stopped="loss has not improved",
)
ROW = ForecastRow(
    2, 1, "ring", 64, 32, 1, 0.1, 0.08, 0.02, 0.01, 0.005, 0.01, "compute", 0.09, 0.12, 640.0, 1.9, 0.95, objection="no"
)
FORECAST = Forecast("digits", "A100", "cuda", "none", (ROW,), 2, "Use 2.", "It is fast.", price_per_device_hour=2.5)


class File(Protocol):
    """A value that is also a JSON file."""

    def save(self, path: Path) -> None: ...
    def to_mapping(self) -> dict[str, Any]: ...


FILES: dict[str, File] = {"cluster": CLUSTER, "plan": PLAN, "record": RECORD, "forecast": FORECAST}


def load(value: File, path: Path) -> Any:
    return type(value).load(path)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", FILES)
def test_a_value_reads_back_as_saved_and_leaves_no_draft(name: str, tmp_path: Path) -> None:
    value = FILES[name]
    value.save(tmp_path / f"{name}.json")
    assert repr(load(value, tmp_path / f"{name}.json")) == repr(value)  # NaN is no equal of itself
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.json"]


def strategy_of(kind: Any, bounds: Bounds = FINITE) -> st.SearchStrategy[Any]:
    """Any value of an annotated type, within its bounds."""
    origin, args = get_origin(kind), get_args(kind)
    low, high = max(bounds.low, bounds.above, -(2**40)), min(bounds.high, 2**40)
    simple: dict[Any, Callable[[], st.SearchStrategy[Any]]] = {
        bool: st.booleans,
        str: lambda: st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6),
        int: lambda: st.integers(math.ceil(low), int(high)),
        float: lambda: st.floats(low, high, exclude_min=bounds.above == low),
        type(None): st.none,
    }
    if kind in simple:
        return simple[kind]()
    if origin is Annotated:
        return strategy_of(*args)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(strategy_of, args))
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(strategy_of(args[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(strategy_of, args))
    if origin is dict:
        return st.dictionaries(*map(strategy_of, args), max_size=2)
    if is_dataclass(kind) and isinstance(kind, type):
        return values_of(kind)
    return st.sampled_from(args)  # a Literal


def values_of(kind: type) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{field.name: strategy_of(hints[field.name]) for field in fields(kind)})


@given(values_of(Cluster))
def test_any_cluster_reads_back_as_saved(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> None:
    path = tmp_path_factory.getbasetemp() / "cluster.json"
    cluster.save(path)
    assert Cluster.load(path) == cluster


@given(values_of(Forecast))
def test_any_forecast_reads_back_as_saved(tmp_path_factory: pytest.TempPathFactory, forecast: Forecast) -> None:
    path = tmp_path_factory.getbasetemp() / "forecast.json"
    forecast.save(path)
    assert Forecast.load(path) == forecast


@given(st.lists(values_of(NodePlacement), max_size=3).map(tuple), st.integers(1, 2**20))
def test_any_nodes_of_a_plan_read_back(nodes: tuple[NodePlacement, ...], world_size: int) -> None:
    plan = replace(PLAN, nodes=nodes, world_size=world_size)
    assert Plan.from_mapping(json.loads(json.dumps(plan.to_mapping()))) == plan


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"null", b'"plan"', b"\xff\xfe\x00", b'{"a":' * 20_000])
def test_a_damaged_file_is_named_in_one_sentence(name: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.json"
    path.write_bytes(content)
    with pytest.raises(PacelineError) as caught:
        load(FILES[name], path)
    assert path.name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_and_a_folder_are_named(name: str, tmp_path: Path) -> None:
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(PacelineError, match=path.name):
            load(FILES[name], path)


@given(st.sampled_from(sorted(FILES)), st.data())
def test_any_damage_is_refused_in_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / f"{name}.json"
    FILES[name].save(path)
    text = path.read_text()
    start = data.draw(st.integers(0, len(text)))
    end = start + data.draw(st.integers(0, 40))
    new = data.draw(st.sampled_from(["", "null", "1e999", "[]", '"x"', "{}", "NaN", "-1", "9" * 30, "\0"]))
    path.write_text(text[:start] + new + text[end:])
    try:
        load(FILES[name], path)
    except PacelineError as problem:
        assert path.name in str(problem) and "\n" not in str(problem)


def test_a_cluster_that_cannot_be_read_says_how_to_write_one(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    for content in ("{", "[]", '{"nodes": 3}'):
        path.write_text(content)
        with pytest.raises(ClusterError, match=r"cluster\.json.*write one with paceline probe"):
            Cluster.load(path)


def changed(value: File, place: str, new: object) -> dict[str, Any]:
    """The mapping with another value at "nodes.0.devices.1.index"; `...` removes what is there."""
    mapping = json.loads(json.dumps(value.to_mapping()))
    *way, last = [int(part) if part.isdigit() else part for part in place.split(".")]
    inside = mapping
    for part in way:
        inside = inside[part]
    if new is ...:
        del inside[last]
    else:
        inside[last] = new
    return dict(mapping)


@pytest.mark.parametrize(
    ("name", "place", "new", "words"),
    [
        ("cluster", "nodes", ..., ["'nodes' is missing"]),
        ("cluster", "nodes", 1, ["nodes = 1", "list"]),
        ("cluster", "timing", [], ["'timing'", "did you mean 'timings'"]),
        ("cluster", "nodes.0.num_cores", ..., ["nodes[0].num_cores"]),
        ("cluster", "nodes.0.devices.1.indx", 1, ["nodes[0].devices[1].indx", "'index'"]),
        ("cluster", "nodes.0.devices.1.index", -1, ["nodes[0].devices[1].index = -1", "at least 0"]),
        ("cluster", "nodes.0.devices.1.kind", "gpu", ["'gpu'", "'cuda'"]),
        ("cluster", "nodes.0.devices.1.cpus", [1.5], ["cpus[0]", "whole number"]),
        ("cluster", "nodes.0.links.0.bytes_per_s", -1, ["links[0].bytes_per_s", "at least 0"]),
        ("cluster", "nodes.0.links.0.ends", ["GPU0"], ["links[0].ends", "list of 2"]),
        ("cluster", "timings.0.steps.0.step_time_s", 0, ["step_time_s", "greater than 0"]),
        ("cluster", "timings.0.steps.1.workers_per_node", [2, 0], ["workers_per_node", "at least 1"]),
        ("cluster", "timings.0.steps.0.loading_s", -0.1, ["loading_s", "at least 0"]),
        ("cluster", "forecast_errors.0", math.nan, ["forecast_errors[0]", "finite"]),
        ("plan", "nodes.0.workers", 2, ["nodes[0].workers"]),
        ("plan", "nodes.0.num_workers", 0, ["nodes[0].num_workers = 0", "at least 1"]),
        ("plan", "nodes.0.devices", ["GPU0"], ["nodes[0].devices[0] = 'GPU0'", "whole number"]),
        ("plan", "nodes.0.cpus", [1], ["nodes[0].cpus[0] = 1", "list"]),
        ("plan", "timeout_s", math.inf, ["timeout_s = inf", "finite"]),
        ("plan", "timeout_s", 0, ["timeout_s", "at least 1"]),
        ("plan", "world_size", 0, ["world_size = 0", "at least 1"]),
        ("plan", "world_size", 2**21, ["world_size", "at most"]),
        ("plan", "algorithm", "rong", ["'rong'", "'ring'"]),
        ("plan", "mesh.zero_stage", 4, ["mesh.zero_stage = 4", "at most 3"]),
        ("plan", "mesh.dpp", 4, ["mesh.dpp", "dp"]),
        ("plan", "pipeline.schedule", "zb", ["pipeline.schedule", "'1f1b'"]),
        ("plan", "recompute", 1, ["recompute", "true or false"]),
        ("record", "job.epochs", 0, ["job.epochs = 0"]),
        ("record", "plan.wrld_size", 1, ["'world_size'"]),
        ("record", "steps", -1, ["steps", "at least 0"]),
        ("record", "samples_per_s", math.nan, ["samples_per_s", "finite"]),
        ("record", "epochs.0.lr", -1, ["epochs[0].lr"]),
        ("record", "weights_sha256", 3, ["weights_sha256", "text"]),
        ("forecast", "rows.0.devices", "two", ["rows[0].devices", "whole number"]),
        ("forecast", "rows.0.bound_by", "luck", ["rows[0].bound_by", "'compute'"]),
        ("forecast", "grow", "nodes", ["grow", "'batch'"]),
    ],
)
def test_an_invalid_value_is_named_with_its_file(
    name: str, place: str, new: object, words: list[str], tmp_path: Path
) -> None:
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(changed(FILES[name], place, new)))
    with pytest.raises(PacelineError) as caught:
        load(FILES[name], path)
    sentence = str(caught.value)
    assert "\n" not in sentence
    for word in (path.name, *words):
        assert word in sentence, sentence


# --- what follows from them ---


def test_a_link_is_found_from_both_ends() -> None:
    assert NODE.link("GPU1", "GPU0") == NODE.link("GPU0", "GPU1") == NODE.links[0]
    assert NODE.link("GPU1", "NIC0") is None
    assert [device.label for device in CLUSTER.devices] == ["GPU0", "GPU1"]


def test_a_cluster_is_of_gpus_only_if_every_node_has_some() -> None:
    assert Cluster((NODE,)).device_kind == "cuda"
    assert CLUSTER.device_kind == Node("a", 1, 1, "").device_kind == "cpu"


def test_a_plan_without_nodes_runs_here() -> None:
    assert Plan(world_size=3).placements == (NodePlacement("", 3),)
    assert PLAN.placements == PLAN.nodes
    assert (PLAN.backend, Plan().backend) == ("nccl", "gloo")


@pytest.mark.parametrize("text", ["{}", '{"nodes": []}', "3"])
def test_a_file_that_says_no_number_of_workers_is_no_plan(text: str) -> None:
    with pytest.raises(PacelineError, match=r"plan\.json cannot be read as a plan: .*(world_size|table)"):
        Plan.from_json(text, "plan.json")


def test_errors_of_forecasts_are_kept_up_to_a_number_the_latest_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Cluster((), forecast_errors=(0.5,) * 50).save(Path("cluster.json"))
    plan = replace(PLAN, forecast_samples_per_s=110.0)
    note_forecast_error(replace(RECORD, plan=plan, samples_per_s=100.0))
    assert Cluster.load(Path("cluster.json")).forecast_errors == pytest.approx([*[0.5] * 49, 0.1])


def test_the_summary_of_a_run_that_diverged_is_still_json() -> None:
    line = json.dumps(RECORD.summary(), allow_nan=False)
    assert json.loads(line) | {"loss": None, "accuracy": None} == json.loads(line)
    assert (json.loads(line)["steps"], json.loads(line)["world_size"]) == (10, 3)
