"""Models that others wrote learn on several workers what a plain PyTorch loop over virtual shards learns, to 1e-12.

Every landing trains each model by one engine, another one every day: `PACELINE_ZOO_DAY`, which every failure names,
repeats a day. Every night trains all models by all engines.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.engines import Engine
from tests.kit.workers import run_ranks
from tests.zoo.zoo import LARGEST_DIFFERENCE, ZOO, train_beside_oracle

DAY = int(os.environ.get("PACELINE_ZOO_DAY", datetime.date.today().toordinal()))
ENGINES = {
    "dp on 2": Engine(2),
    "dp on 3": Engine(3),
    "dp, bitwise": Engine(3, job={"parity": "bitwise"}),
    "zero1": Engine(2, {"fsdp": 2, "zero_stage": 1}),
    "fsdp": Engine(2, {"fsdp": 2}),
    "pp": Engine(2, {"pp": 2}),
    "tp": Engine(2, {"tp": 2}),
}


def _engines_of(model: str) -> list[str]:
    """Tensor parallelism is for models that carry a plan of their own."""
    return [name for name in ENGINES if name != "tp" or ZOO[model].has_tensor_plan]


def _cases() -> Iterator[Any]:
    for place, model in enumerate(ZOO):
        engines = _engines_of(model)
        todays = engines[(DAY + place) % len(engines)]
        for name in engines:
            marks = () if name == todays else (pytest.mark.nightly,)
            yield pytest.param(model, name, marks=marks, id=f"{model}-{name}-day {DAY}")


@pytest.mark.budget(processor_s=15)
@pytest.mark.parametrize(("model", "engine"), list(_cases()))
def test_a_model_learns_what_a_plain_loop_learns(model: str, engine: str) -> None:
    first, *others = run_ranks(train_beside_oracle, ENGINES[engine].num_workers, model, ENGINES[engine], timeout_s=240)
    if engine == "pp" and ZOO[model].is_cut != "at blocks":
        assert ZOO[model].is_cut in first.refusal
        return
    assert not first.refusal
    assert first.num_changed > 1
    assert first.difference < LARGEST_DIFFERENCE
    assert {other.weights_sha256 for other in others} == {first.weights_sha256}
