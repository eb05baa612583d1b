"""A job is checked on the way in: what is invalid is one sentence with the key, the value and what is allowed.

A job says what to train and never on what; it reads back from TOML, JSON and the command line as it was.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import JobError
from paceline.spec import Job
from paceline.spec.job import OptimSpec, differences
from paceline.spec.record import best_place
from paceline.workflows.jobs import load_job


def nested(path: str, value: object) -> dict[str, Any]:
    """{"optim": {"lr": value}} for "optim.lr"."""
    found: Any = value
    for key in reversed(path.split(".")):
        found = {key: found}
    return dict(found)


def merged(*mappings: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mapping in mappings:
        for key, value in mapping.items():
            known = found.get(key)
            found[key] = merged(known, value) if isinstance(known, dict) and isinstance(value, Mapping) else value
    return found


def job_of(settings: Mapping[str, object]) -> Job:
    """A job from dotted keys."""
    return Job.from_mapping(merged(*(nested(path, value) for path, value in settings.items())))


def refusal(settings: Mapping[str, object]) -> str:
    with pytest.raises(JobError) as caught:
        job_of(settings)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".") and len(sentence) < 700
    return sentence


# --- keys ---


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("epoch", "epochs"),
        ("batch_size", "global_batch_size"),
        ("virtual_shard", "virtual_shards"),
        ("presicion", "precision"),
        ("optimizer", "optim"),
        ("checkpoints", "checkpoint"),
        ("optim.learning_rate", "lr"),
        ("optim.weight_decy", "weight_decay"),
        ("optim.warmup_epoch", "warmup_epochs"),
        ("optim.scheduler.optoins", "options"),
        ("data.argument", "augment"),
        ("data.loader_worker", "loader_workers"),
        ("model.nmae", "name"),
        ("checkpoint.every_step", "every_steps"),
        ("checkpoint.keep_bets", "keep_best"),
        ("aggregation.methd", "method"),
        ("aggregation.sync_evry", "sync_every"),
        ("early_stopping.patient", "patience"),
    ],
)
def test_an_unknown_key_names_its_place_and_the_keys_that_there_are(path: str, nearest: str) -> None:
    sentence = refusal({path: 1})
    assert f"'{path}'" in sentence and re.search(rf"\b{nearest}\b", sentence)


@pytest.mark.parametrize(
    ("path", "nearest"),
    [("epoch", "epochs"), ("optim.weight_decy", "weight_decay"), ("checkpoint.every_step", "every_steps")],
)
def test_the_nearest_key_is_proposed(path: str, nearest: str) -> None:
    assert f"did you mean '{nearest}'" in refusal({path: 1})


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("optim.lr", "fast", ["'fast'", "number"]),
        ("optim.lr", float("nan"), ["nan", "finite"]),
        ("optim.lr", float("inf"), ["inf", "finite"]),
        ("optim.lr", [0.1], ["number"]),
        ("optim", "sgd", ["'sgd'", "table"]),
        ("average_decay", 1.0, ["below 1"]),
        ("data.augment", 0.9, ["list"]),
        ("epochs", 2.5, ["2.5", "whole number"]),
        ("epochs", True, ["whole number"]),
        ("epochs", "3", ["'3'", "whole number"]),
        ("epochs", None, ["whole number"]),
        ("epochs", 2**80, ["at most"]),
        ("compile", 1, ["true", "'max-autotune'"]),
        ("compile", "fast", ["'fast'"]),
        ("name", 3, ["text"]),
        ("name", "", ["1 to 200"]),
        ("name", "x" * 201, ["1 to 200"]),
        ("name", "a\nb", ["one line"]),
        ("name", "a\0b", ["one line"]),
        ("parity", "bitwize", ["'bitwize'", "'bitwise'"]),
        ("precision", "bf16", ["'bf16'", "'bfloat16'"]),
        ("nonfinite", "ignor", ["'ignore'"]),
        ("optim.schedule", "cosin", ["'cosine'"]),
        ("optim.lr_scaling", "liner", ["'linear'"]),
        ("aggregation.method", "local-sgd", ["'local_sgd'"]),
        ("aggregation.wire", "bf16", ["'bfloat16'"]),
        ("data.augment", "crop", ["list"]),
        ("data.augment", ["corp"], ["[0]", "'crop'"]),
        ("data.options", {"a": object()}, ["data.options.a"]),
        ("model.options", ["a"], ["table"]),
        ("model", 3, ["table"]),
        ("callbacks", [{"name": 3}], ["callbacks[0].name", "text"]),
        ("callbacks", [{}], ["callbacks[0].name", "missing"]),
        ("callbacks", {"name": "a:B"}, ["list"]),
        ("checkpoint.best_mode", "largest", ["'max'"]),
        ("checkpoint.save_final", "yes", ["true or false"]),
        ("early_stopping.mode", "minimum", ["'min'"]),
    ],
)
def test_a_value_of_another_kind_is_named_with_what_is_allowed(path: str, value: object, words: Iterable[str]) -> None:
    sentence = refusal({path: value})
    assert path.split("[")[0] in sentence
    for word in words:
        assert word in sentence, sentence


BOUNDS: list[tuple[str, list[float], list[float]]] = [
    # key, what is refused, what is accepted
    ("global_batch_size", [-5, 0, 2**31], [8, 2**31 - 1]),
    ("virtual_shards", [-1, 0, 2**20 + 1], [1, 256]),
    ("epochs", [-1, 0, 2**31], [1, 2**31 - 1]),
    ("seed", [-1, 2**63], [0, 2**63 - 1]),
    ("eval_every_epochs", [0, -3], [1, 100]),
    ("eval_every_steps", [0, -1], [1, 100]),
    ("eval_batch_size", [0, 2**31], [1, 4096]),
    ("average_decay", [-0.1, 1, 1.5], [0, 0.999]),
    ("optim.lr", [0, -1], [1e-12, 10]),
    ("optim.momentum", [-0.1, 1.1], [0, 0.99]),
    ("optim.weight_decay", [-1e-4], [0, 0.5]),
    ("optim.step_factor", [0, -0.1], [0.1]),
    ("optim.warmup_epochs", [-1], [0, 5]),
    ("optim.base_batch_size", [0, -1], [1, 256]),
    ("optim.label_smoothing", [-0.1, 1.1], [0, 0.1]),
    ("optim.clip_norm", [0, -1], [0.5]),
    ("data.crop_padding", [0], [1, 4]),
    ("data.cutout_size", [0], [1, 16]),
    ("data.loader_workers", [-1], [0, 8]),
    ("data.train_limit", [0], [1]),
    ("data.test_limit", [0], [1]),
    ("checkpoint.every_minutes", [0, -2], [0.5]),
    ("checkpoint.every_steps", [0], [1]),
    ("checkpoint.keep_last", [0], [1, 5]),
    ("checkpoint.keep_every_hours", [0, -1], [1.5]),
    ("aggregation.sync_every", [0], [1, 500]),
    ("aggregation.outer_lr", [0, -0.1], [0.7]),
    ("aggregation.outer_momentum", [-0.1, 1.1], [0, 0.9]),
    ("aggregation.staleness", [-1], [0, 4]),
    ("early_stopping.patience", [0], [1, 9]),
    ("early_stopping.min_change", [-0.1], [0, 0.01]),
]


@pytest.mark.parametrize(("path", "refused", "accepted"), BOUNDS, ids=[path for path, *_ in BOUNDS])
def test_numbers_keep_their_bounds(path: str, refused: list[float], accepted: list[float]) -> None:
    for value in (*refused, math.nan, math.inf, -math.inf):
        sentence = refusal({path: value})
        assert path in sentence and re.search(r"should be|possible|finite|large|below|smaller", sentence), sentence
    for value in accepted:
        # A value that is written and read back is the same one.
        assert job_of(job_of({path: value}).to_mapping()) == job_of({path: value})


def test_a_job_made_in_python_is_the_one_that_its_file_says() -> None:
    tables: Any = {"model": "gpt", "optim": {"lr": 0.2, "options": {"betas": (0.9, 0.95)}}}
    made = Job(**tables)
    assert (made.model.name, made.optim.lr) == ("gpt", 0.2)
    assert made == Job.from_mapping(json.loads(json.dumps(made.to_mapping())))


def test_bounds_hold_where_a_job_is_made_in_python() -> None:
    with pytest.raises(JobError, match=r"global_batch_size = -5"):
        Job(global_batch_size=-5, virtual_shards=-9)
    with pytest.raises(JobError, match=r"optim\.lr = -1"):
        Job(optim=OptimSpec(lr=-1.0))


# --- what does not go together ---


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"virtual_shards": 9, "global_batch_size": 8}, ["virtual_shards = 9", "global_batch_size = 8"]),
        ({"parity": "bitwise", "compile": True}, ["compile = False"]),
        ({"parity": "bitwise", "aggregation.wire": "bfloat16"}, ["aggregation.wire = 'float32'", "'bfloat16'"]),
        ({"parity": "bitwise", "aggregation.method": "diloco"}, ["'every_step'", "'diloco'"]),
        ({"parity": "bitwise", "aggregation.method": "local_sgd"}, ["'every_step'", "'local_sgd'"]),
        ({"parity": "bitwise", "aggregation.method": "parameter_server_async"}, ["'every_step'"]),
        ({"optim.clip_norm": 1.0, "aggregation.method": "parameter_server_async"}, ["optim.clip_norm"]),
        ({"precision": "float16", "aggregation.method": "parameter_server_async"}, ["'float16'"]),
        ({"eval_every_steps": 5, "aggregation.method": "parameter_server_async"}, ["eval_every_steps"]),
        ({"average_decay": 0.9, "aggregation.method": "diloco"}, ["average_decay", "'diloco'"]),
        ({"nonfinite": "rollback", "aggregation.method": "local_sgd"}, ["'rollback'", "'local_sgd'"]),
        ({"optim.schedule": "step"}, ["optim.step_epochs"]),
        ({"optim.step_epochs": [0.0]}, ["optim.step_epochs", "greater than 0"]),
        ({"optim.scheduler.name": "a:B", "optim.schedule": "cosine"}, ["optim.scheduler", "optim.schedule"]),
        ({"optim.scheduler.name": "a:B", "optim.warmup_epochs": 1}, ["optim.scheduler", "optim.warmup_epochs"]),
    ],
)
def test_keys_that_contradict_each_other_are_both_named(settings: dict[str, object], words: list[str]) -> None:
    sentence = refusal(settings)
    for word in words:
        assert word in sentence, sentence


# --- files and settings ---

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
names = st.text(max_size=20).filter(lambda name: bool(name) and name.isprintable())
scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | texts
options = st.dictionaries(
    texts, scalars | st.lists(scalars, max_size=3) | st.dictionaries(texts, scalars, max_size=2), max_size=4
)
jobs = st.builds(
    lambda name, batch, shards, epochs, seed, model, data, steps: job_of(
        {
            "name": name,
            "global_batch_size": batch,
            "virtual_shards": min(batch, shards),
            "epochs": epochs,
            "seed": seed,
            "model.name": "package.module:build",
            "model.options": model,
            "data.options": data,
            "data.dir": "C:\\data\n",
            "data.augment": ["crop", "flip"],
            "optim.schedule": "step",
            "optim.step_epochs": sorted(steps),
            "callbacks": [{"name": "a:B", "options": model}],
        }
    ),
    names,
    st.integers(1, 2**31 - 1),
    st.integers(1, 64),
    st.integers(1, 1000),
    st.integers(0, 2**63 - 1),
    options,
    options,
    st.lists(st.floats(0.1, 300), min_size=1, max_size=3),
)


@given(jobs)
def test_a_job_reads_back_from_json(tmp_path_factory: pytest.TempPathFactory, job: Job) -> None:
    assert Job.from_mapping(json.loads(json.dumps(job.to_mapping()))) == job
    folder = tmp_path_factory.getbasetemp()
    job.save(folder / "job.json")
    assert Job.load(folder / "job.json") == job


def test_a_job_file_needs_no_name_and_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    for start in ("", "\ufeff"):
        file.write_text(start + 'model = "resnet18"\n[optim]\nlr = 0.5\n', encoding="utf-8")
        job = load_job(file)
        assert (job.name, job.model.name, job.optim.lr) == ("mine", "resnet18", 0.5)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"model = \n", ["TOML"]),
        (b"a = " + b"[" * 5000, ["TOML"]),
        (b"# of which all keys were left out\n", ["no keys"]),
        (b"epochz = 1\n", ["'epochs'"]),
        (b"[optim]\nlr = 'fast'\n", ["optim.lr", "'fast'"]),
        (b"epochs = 1\nepochs = 2\n", ["TOML"]),
        (b"\xff\xfe", ["mine.toml"]),
        (b"seed = " + b"9" * 5000, ["mine.toml"]),
    ],
)
def test_an_invalid_job_file_is_named(tmp_path: Path, content: bytes, words: list[str]) -> None:
    file = tmp_path / "mine.toml"
    file.write_bytes(content)
    with pytest.raises(JobError) as caught:
        load_job(file)
    for word in ("mine.toml", *words):
        assert word in str(caught.value)


def test_a_missing_job_file_and_a_directory_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "other.toml", tmp_path):
        with pytest.raises(JobError, match=re.escape(path.name)):
            load_job(path)


def test_settings_are_toml_values_or_bare_words() -> None:
    job = Job().with_settings(
        [
            "optim.lr=0.2",
            "data=mnist",
            "data.augment=['crop', 'flip']",
            "optim.clip_norm=1",
            "model.options.width=3",
            "callbacks=[{name = 'a:B'}]",
            "checkpoint.every_minutes=none",
            "optim.lr_scaling=none",
        ]
    )
    assert (job.optim.lr, job.data.name, job.data.augment) == (0.2, "mnist", ("crop", "flip"))
    assert (job.optim.clip_norm, job.model.options) == (1.0, {"width": 3})
    assert [one.name for one in job.callbacks] == ["a:B"]
    # Both an absent value and a choice of that name are written none.
    assert (job.checkpoint.every_minutes, job.optim.lr_scaling) == (None, "none")


@pytest.mark.parametrize(
    "setting", ["epochs", "=3", "epochs.deep=1", "nokey=1", "epochs=nan", "optim.lr=0x", "a." * 30 + "b=1", "epochs=٣"]
)
def test_an_invalid_setting_is_refused(setting: str) -> None:
    with pytest.raises(JobError):
        Job().with_settings([setting])


def test_an_option_that_is_set_leaves_the_others() -> None:
    job = Job().with_settings(["model.options.width=32", "model.options.num_heads=2"])
    assert job.model.options == {"width": 32, "num_heads": 2}
    assert job.with_settings(["model.options={width=8}"]).model.options == {"width": 8}


def test_another_model_does_not_inherit_options() -> None:
    job = job_of({"model.name": "resnet18", "model.options": {"stem": "cifar"}})
    assert job.with_settings(["model=resnet20"]).model.options == {}
    assert job.with_settings(["model=resnet18"]).model.options == {"stem": "cifar"}


def test_values_cannot_be_changed_in_place() -> None:
    with pytest.raises(AttributeError):
        Job().epochs = 3  # type: ignore[misc]


# --- what follows from a job ---


@given(st.integers(1, 64), st.integers(1, 20), st.integers(1, 100), st.sampled_from(["linear", "sqrt", "none"]))
def test_growing_keeps_the_batch_of_a_device_and_scales_the_rate(
    factor: int, shards: int, size: int, rule: str
) -> None:
    job = job_of({"global_batch_size": shards * size, "virtual_shards": shards, "optim.lr_scaling": rule})
    grown = job.scaled_for(factor)
    assert grown.global_batch_size == shards * size * factor
    assert grown.shard_size == job.shard_size == size
    assert grown.lr_scale == pytest.approx({"linear": factor, "sqrt": math.sqrt(factor), "none": 1.0}[rule])
    assert job.lr_scale == 1.0
    # A rate that was chosen for another batch keeps its base.
    assert grown.scaled_for(2).lr_scale == pytest.approx(
        {"linear": 2 * factor, "sqrt": math.sqrt(2 * factor)}.get(rule, 1.0)
    )


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        ({}, {"optim.lr": 0.2}, ["optim.lr was 0.1 and is 0.2"]),
        ({}, {"seed": 1, "model.name": "mlp"}, ["model.name was 'lenet' and is 'mlp'", "seed was 0 and is 1"]),
        ({"model.options": {"a": 1}}, {"model.options": {"a": 2}}, ["model.options.a was 1 and is 2"]),
        # What cannot change a result may differ, and a precision that each run decides is told by the run.
        ({}, {"name": "x", "data.dir": "/there", "data.loader_workers": 2}, []),
        ({}, {"checkpoint.every_steps": 5, "early_stopping.metric": "loss", "eval_every_steps": 3}, []),
        ({}, {"precision": "auto"}, []),
        ({"precision": "auto"}, {"precision": "bfloat16"}, ["precision was 'auto' and is 'bfloat16'"]),
    ],
)
def test_what_makes_another_result_is_named_with_both_values(
    before: dict[str, object], now: dict[str, object], named: list[str]
) -> None:
    assert differences(job_of(before).to_mapping(), job_of(now).to_mapping()) == named


@pytest.mark.parametrize(
    ("settings", "kept", "mode"),
    [
        ({}, None, "auto"),
        ({"early_stopping.metric": "f1", "early_stopping.mode": "max"}, "f1", "max"),
        ({"early_stopping.metric": "f1", "checkpoint.keep_best": "loss"}, "loss", "auto"),
    ],
)
def test_early_stopping_keeps_the_best_by_its_metric_unless_another_is_named(
    settings: dict[str, object], kept: str | None, mode: str
) -> None:
    found = job_of(settings).kept_checkpoints
    assert (found.keep_best, found.best_mode) == (kept, mode)


@given(
    st.lists(st.floats(-5, 5) | st.sampled_from([math.nan, math.inf]), max_size=12),
    st.sampled_from([("val_loss", "auto", 1), ("accuracy", "auto", -1), ("accuracy", "min", 1), ("loss", "max", -1)]),
)
def test_the_best_value_is_the_first_of_the_finite_ones_that_none_beats(
    values: list[float], metric: tuple[str, Any, int]
) -> None:
    name, mode, sign = metric
    finite = [(sign * value, place) for place, value in enumerate(values) if math.isfinite(value)]
    assert best_place(values, name, mode) == (min(finite)[1] if finite else None)
