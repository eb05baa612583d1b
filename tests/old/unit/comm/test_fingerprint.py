"""The sentence about workers that do different things."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.fingerprint import CollectiveCall, describe_divergence

CALL = CollectiveCall(4, 2, "gradients", "head.weight", "torch.float32", (10, 3))

CALLS = st.builds(
    CollectiveCall,
    st.integers(1, 10**6),
    st.integers(1, 10**6),
    st.sampled_from(["gradients", "numbers"]),
    st.text(max_size=5),
    st.sampled_from(["torch.float32", "torch.float64"]),
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
)


@given(CALLS, CALLS)
def test_equal_calls_and_only_they_have_equal_fingerprints(one: CollectiveCall, other: CollectiveCall) -> None:
    assert (one.fingerprint() == other.fingerprint()) == (one == other)


def test_the_odd_one_out_is_named() -> None:
    odd = replace(CALL, name="tail.weight")
    sentence = describe_divergence([CALL, CALL, odd, CALL])
    assert "rank 2 is at call 4 in step 2: gradients of tail.weight (10x3 torch.float32)" in sentence
    assert "the other 3 are at call 4 in step 2: gradients of head.weight" in sentence


def test_of_two_equal_parties_rank_0_is_right() -> None:
    assert "rank 1 is at call 5" in describe_divergence([CALL, replace(CALL, sequence=5)])


def test_a_crowd_is_counted() -> None:
    calls = [CALL] * 10 + [replace(CALL, step=9)] * 6
    assert "and 2 more" in describe_divergence(calls)
