from __future__ import annotations

import tomllib

from hypothesis import given
from hypothesis import strategies as st

from paceline.report.job_text import job_toml
from paceline.spec import Job
from tests.old.sample_records import sample_job

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
names = st.text(max_size=20).filter(lambda name: bool(name) and name.isprintable())
scalars = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), texts)
options = st.dictionaries(
    texts,
    st.one_of(scalars, st.lists(scalars, max_size=3), st.dictionaries(texts, scalars, max_size=2)),
    max_size=4,
)


@given(options, names)
def test_the_text_reads_back_as_the_same_job(model_options: dict[str, object], name: str) -> None:
    job = sample_job(
        name=name,
        model={"name": "my_package.my_module:build", "options": model_options},
        data={"augment": ["crop", "flip"], "dir": "C:\\data\n"},
        optim={"schedule": "step", "step_epochs": [1.5, 3.0]},
    )
    assert Job.from_mapping(tomllib.loads(job_toml(job))) == job


def test_unset_keys_are_left_out() -> None:
    assert "train_limit" not in job_toml(sample_job())
    assert "[optim]\n" in job_toml(sample_job())
