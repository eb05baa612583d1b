"""Every key of a job is explained, and what is listed can be used."""

from __future__ import annotations

import tomllib

import pytest

from paceline.errors import JobError
from paceline.models import MODELS
from paceline.spec import Job
from paceline.workflows import catalog
from paceline.workflows.jobs import resolve_job


def test_every_key_of_a_job_has_a_meaning() -> None:
    assert [key.name for key in catalog.job_keys() if not key.meaning] == []


def test_the_listed_keys_and_defaults_make_the_default_job() -> None:
    keys = [key for key in catalog.job_keys() if key.default]
    names = [key.name for key in keys]
    assert len(names) == len(set(names))
    mapping = tomllib.loads("\n".join(f"{key.name} = {key.default}" for key in keys))
    assert Job.from_mapping(mapping) == Job()


def test_keys_say_their_choices_and_bounds() -> None:
    (parity,) = catalog.job_keys("parity")
    assert parity.values == '"numeric" | "bitwise"'
    (lr,) = catalog.job_keys("optim.lr_")
    assert lr.values == '"linear" | "sqrt" | "none"'
    (momentum,) = catalog.job_keys("aggregation.outer_momentum")
    assert momentum.values == "number, at least 0, at most 1"
    with pytest.raises(JobError, match="No key of a job begins with 'oprim'"):
        catalog.job_keys("oprim")


def test_every_recipe_model_and_data_set_is_listed() -> None:
    assert [resolve_job(entry.name).name for entry in catalog.recipes()] == [one.name for one in catalog.recipes()]
    assert [entry.name for entry in catalog.models()] == list(MODELS)
    assert all(len(entry.meaning) > 20 for entry in [*catalog.recipes(), *catalog.models(), *catalog.data_sets()])
