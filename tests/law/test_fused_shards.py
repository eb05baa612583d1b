"""`fuse_shards`: shards that go together learn what they learn one by one; models that couple samples are refused."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from tests.kit import losses, models
from tests.kit.engines import ENGINES
from tests.kit.train import trained
from tests.law.tasks import TASKS
from tests.law.test_law import assert_learned, expected


@pytest.mark.parametrize("most_samples", [2, 1000])
@pytest.mark.parametrize("name", ["plain torch", "ragged end", "token mean"])
@pytest.mark.parametrize("engine", ["one worker", "dp on 2", "dp on 3"])
def test_shards_that_go_together_learn_what_they_learn_one_by_one(engine: str, name: str, most_samples: int) -> None:
    outcomes = trained(ENGINES[engine], TASKS[name], fuse_shards=most_samples)
    assert_learned(ENGINES[engine], outcomes, expected(name, in_own_order=False))


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (TASKS["batch norm"], "couples a shard's samples"),
        (TASKS["coupled samples"], "is not that of one after the other"),
        (replace(TASKS["plain torch"], model=functools.partial(models.layers, dropout=0.5)), "draws for them"),
        (replace(TASKS["plain torch"], loss=losses.with_noise), "is not that of one after the other"),
    ],
)
def test_what_couples_samples_or_draws_is_refused(task: object, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        trained(ENGINES["dp on 2"], task, fuse_shards=1000)  # type: ignore[arg-type]
