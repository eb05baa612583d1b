"""A job is checked on the way in, and every complaint names key, value and what is allowed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import JobError
from paceline.spec import AggregationSpec, Job, load_job
from paceline.spec.job import differences


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"epoch": 3}, ["'epoch'", "'epochs'"]),
        ({"optim": {"learning_rate": 1}}, ["'optim.learning_rate'", "lr"]),
        ({"optim": {"lr": "fast"}}, ["optim.lr", "'fast'", "a number"]),
        ({"optim": {"lr": 0}}, ["optim.lr", "greater than 0"]),
        ({"optim": {"lr": float("nan")}}, ["optim.lr", "finite"]),
        ({"optim": "sgd"}, ["optim", "table"]),
        ({"epochs": 0}, ["epochs", "at least 1"]),
        ({"epochs": 2.5}, ["epochs", "2.5", "whole number"]),
        ({"epochs": True}, ["epochs", "whole number"]),
        ({"compile": 1}, ["compile", "true or false"]),
        ({"parity": "bitwize"}, ["parity", "'bitwize'", "'bitwise'"]),
        ({"data": {"augment": "crop"}}, ["data.augment", "list"]),
        ({"data": {"augment": ["corp"]}}, ["data.augment[0]", "'crop'"]),
        ({"optim": {"betas": [0.9]}}, ["optim.betas", "list of 2"]),
        ({"virtual_shards": 9, "global_batch_size": 8}, ["virtual_shards", "global_batch_size"]),
        ({"optim": {"schedule": "step"}}, ["optim.step_epochs"]),
        ({"aggregation": {"wire": "int4"}}, ["aggregation.wire", "'int4'", "'float32'"]),
        ({"aggregation": {"staleness": -1}}, ["aggregation.staleness = -1", "at least 0"]),
        ({"aggregation": {"overlap_steps": 2}}, ["aggregation.overlap_steps = 2", "diloco", "every_step"]),
        ({"aggregation": {"method": "diloco", "overlap_steps": 16}}, ["overlap_steps = 16", "sync_every = 16"]),
        ({"parity": "bitwise", "aggregation": {"wire": "bfloat16"}}, ["aggregation.wire = 'float32'", "'bfloat16'"]),
        ({"parity": "bitwise", "aggregation": {"method": "diloco"}}, ["'every_step'", "'diloco'"]),
        (
            {"optim": {"clip_norm": 1.0}, "aggregation": {"method": "parameter_server_async"}},
            ["'parameter_server_async'", "no optim.clip_norm"],
        ),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(mapping: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(JobError) as caught:
        Job.from_mapping(mapping)
    sentence = str(caught.value)
    assert "\n" not in sentence
    for word in words:
        assert word in sentence


def test_settings_are_toml_values_and_bare_words() -> None:
    job = Job().with_settings(
        [
            "optim.lr=0.2",
            "data=mnist",
            "data.augment=['crop', 'flip']",
            "optim.clip_norm=1",
            "model.options.width=3",
        ]
    )
    assert job.optim.lr == 0.2
    assert job.data.name == "mnist"
    assert job.data.augment == ("crop", "flip")
    assert job.optim.clip_norm == 1.0
    assert job.model.options == {"width": 3}
    assert job.with_settings(["optim.clip_norm=none"]).optim.clip_norm is None
    # Both an absent value and a choice by that name are written none.
    assert Job().with_settings(["optim.lr_scaling=none"]).optim.lr_scaling == "none"
    assert Job().with_settings(["optim.clip_norm=none"]).optim.clip_norm is None


@pytest.mark.parametrize("setting", ["epochs", "=3", "epochs.deep=1", "nokey=1"])
def test_settings_that_are_none_are_refused(setting: str) -> None:
    with pytest.raises(JobError):
        Job().with_settings([setting])


@given(
    st.builds(
        Job,
        global_batch_size=st.integers(8, 10**6),
        virtual_shards=st.integers(1, 8),
        epochs=st.integers(1, 1000),
        seed=st.integers(0, 2**63 - 1),
    )
)
def test_a_job_survives_its_mapping(job: Job) -> None:
    assert Job.from_mapping(job.to_mapping()) == job


@given(st.integers(1, 64))
def test_growing_keeps_the_batch_per_device_and_remembers_the_base(factor: int) -> None:
    grown = Job(global_batch_size=96, virtual_shards=6).grown(factor)
    assert grown.global_batch_size == 96 * factor
    assert grown.global_batch_size / grown.virtual_shards == 16
    assert grown.optim.base_batch_size == 96


def test_a_job_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Job().epochs = 3  # type: ignore[misc]


def test_job_files(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('model = "resnet18"\n[optim]\nlr = 0.5\n')
    job = load_job(file)
    assert (job.name, job.model.name, job.optim.lr) == ("mine", "resnet18", 0.5)
    file.write_text("\ufeff" + file.read_text())  # as some editors write it
    assert load_job(file) == job
    file.write_text("model = \n")
    with pytest.raises(JobError, match=r"mine\.toml.*not valid TOML"):
        load_job(file)
    file.write_text("# of which all keys were left out\n")
    with pytest.raises(JobError, match=r"mine\.toml' has no keys"):
        load_job(file)
    file.write_text("epochz = 1\n")
    with pytest.raises(JobError, match=r"mine\.toml.*'epochs'"):
        load_job(file)
    with pytest.raises(JobError, match="no job file"):
        load_job(tmp_path / "other.toml")
    with pytest.raises(JobError, match="directory"):
        load_job(tmp_path)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(JobError, match="cannot be read"):
        load_job(file)


def test_another_model_does_not_inherit_options() -> None:
    job = Job.from_mapping({"model": {"name": "resnet18", "options": {"stem": "cifar"}}})
    assert job.with_settings(["model=resnet20"]).model.options == {}
    assert job.with_settings(["model=resnet18"]).model.options == {"stem": "cifar"}


def test_a_staleness_that_nobody_reads_makes_no_other_job() -> None:
    def found(**method: Any) -> list[str]:
        specs = (AggregationSpec(staleness=staleness, **method) for staleness in (4, 1))
        before, now = (dataclasses.replace(Job(), aggregation=spec).to_mapping() for spec in specs)
        return differences(before, now)

    assert found() == []
    assert found(method="parameter_server_async") == ["aggregation.staleness was 4 and is 1"]
