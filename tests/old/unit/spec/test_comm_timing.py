from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm import ALGORITHMS, WIRE_FORMATS
from paceline.errors import JobError
from paceline.spec.algorithm import algorithm_names
from paceline.spec.codec import to_mapping
from paceline.spec.comm_timing import (
    CommCase,
    CommRequest,
    CommTiming,
    CommTimings,
    message_sizes,
)
from paceline.spec.wire import WIRE_FACTS, WireName
from tests.old.sample_timings import sample_timings


def test_it_can_name_whatever_there_is_to_time() -> None:
    assert set(algorithm_names()) == set(ALGORITHMS)
    assert set(get_args(WireName)) == set(WIRE_FORMATS) == set(WIRE_FACTS)


def test_values_that_are_summed_have_a_type_of_their_own() -> None:
    with pytest.raises(JobError, match="dtype"):
        CommRequest.from_mapping({"dtype": "auto"})


def test_the_usual_sizes_are_4_kib_to_256_mib_in_steps_of_4() -> None:
    assert message_sizes() == tuple(4096 * 4**power for power in range(9))


@given(st.integers(8, 2**20), st.integers(0, 2**30))
def test_sizes_grow_from_the_smallest_to_the_largest(smallest: int, more: int) -> None:
    sizes = message_sizes(smallest, smallest + more)
    assert (sizes[0], sizes[-1]) == (smallest, smallest + more)
    growths = [later / size for size, later in pairwise(sizes)]
    assert all(growth == 4 for growth in growths[:-1])
    assert all(1 < growth < 8 for growth in growths[-1:])


def test_an_empty_request_asks_for_every_algorithm() -> None:
    assert {case.algorithm for case in CommRequest.from_mapping({}).cases} == set(ALGORITHMS)


def test_values_survive_their_files(tmp_path: Path) -> None:
    timings = sample_timings()
    timings.save(tmp_path / "timings.json")
    assert CommTimings.from_mapping(json.loads((tmp_path / "timings.json").read_text())) == timings
    timings.request.save(tmp_path / "request.json")
    assert CommRequest.from_mapping(json.loads((tmp_path / "request.json").read_text())) == timings.request


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"cases": []}, "cases should name algorithms"),
        ({"cases": [{"algorithm": "auto"}]}, "cases should name algorithms"),
        ({"cases": [{"algorithm": "rong"}]}, "did you mean 'ring'"),
        ({"sizes_bytes": []}, "at least 8 bytes"),
        ({"sizes_bytes": [4]}, "at least 8 bytes"),
        ({"budget_s": 0}, "budget_s = 0.0 should be greater than 0"),
        ({"budget": 5}, "did you mean 'budget_s'"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(JobError, match=sentence):
        CommRequest.from_mapping(wrong)


def test_a_timing_is_the_median_of_its_rounds() -> None:
    timing = CommTiming(CommCase("ring"), 8, (3.0, 1.0, 2.0))
    assert (timing.median_s, timing.min_s) == (2.0, 1.0)
    assert to_mapping(timing)["times_s"] == [3.0, 1.0, 2.0]


def test_cases_have_names_for_people() -> None:
    assert str(CommCase("ring")) == "ring"
    assert str(CommCase("ring", "bfloat16", "alternating")) == "ring in bfloat16, nodes in turn"


@pytest.mark.parametrize("name", ["alpha_s", "beta_s_per_byte"])
def test_no_message_and_no_byte_costs_less_than_nothing(name: str) -> None:
    mapping = to_mapping(sample_timings())
    mapping["fits"][-1][name] = -1
    with pytest.raises(JobError, match=name):
        CommTimings.from_mapping(mapping)
