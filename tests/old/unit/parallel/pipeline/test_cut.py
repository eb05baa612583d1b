"""The cut that dynamic programming finds is the best of all cuts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ModelError
from paceline.parallel.pipeline import stage_limits
from paceline.partition import StageLimits, best_cut
from paceline.spec import Mesh, PipelineSpec
from paceline.spec.mesh import ScheduleName
from paceline.spec.model_cost import LayerCost

layers = st.lists(
    st.builds(
        LayerCost,
        name=st.just("layer"),
        time_s=st.floats(0, 10),
        parameter_bytes=st.integers(0, 100),
        activation_bytes=st.integers(0, 100),
        output_bytes=st.integers(0, 100),
        may_begin=st.booleans(),
    ),
    min_size=1,
    max_size=9,
)


def slowest_s(costs: Sequence[LayerCost], starts: Sequence[int], limits: StageLimits) -> float:
    """What a cut is judged by; infinite where it breaks a limit."""
    slowest = 0.0
    for stage, (start, stop) in enumerate(zip(starts, [*starts[1:], len(costs)], strict=True)):
        part = costs[start:stop]
        kept = limits.micro_batches_kept[stage] if limits.micro_batches_kept else 1
        held = sum(limits.copies_of_parameters * c.parameter_bytes + kept * c.activation_bytes for c in part)
        if held > limits.memory_bytes or (start and not part[0].may_begin):
            return math.inf
        slowest = max(slowest, sum(c.time_s for c in part))
    return slowest


@settings(deadline=None)
@given(layers, st.integers(1, 4), st.sampled_from([math.inf, 800.0, 1500.0]))
def test_no_other_cut_is_better(costs: list[LayerCost], num_stages: int, memory_bytes: float) -> None:
    limits = StageLimits(memory_bytes=memory_bytes, micro_batches_kept=(4, 3, 2, 1)[:num_stages])
    every_cut = [(0, *rest) for rest in itertools.combinations(range(1, len(costs)), num_stages - 1)]
    best_s = min((slowest_s(costs, starts, limits) for starts in every_cut), default=math.inf)
    if math.isinf(best_s):
        with pytest.raises(ModelError, match="stages"):
            best_cut(costs, num_stages, limits)
    else:
        assert slowest_s(costs, best_cut(costs, num_stages, limits), limits) == pytest.approx(best_s)


def test_of_equally_fast_cuts_the_one_that_sends_less() -> None:
    sent = (50, 10, 50, 0)
    costs = [LayerCost(str(number), time_s, output_bytes=sent[number]) for number, time_s in enumerate((4, 0, 0, 4))]
    assert best_cut(costs, 2) == (0, 2)


MIB = 2.0**20


@pytest.mark.parametrize(
    ("schedule", "kept"), [("gpipe", (8, 8, 8, 8)), ("1f1b", (4, 3, 2, 1)), ("zero_bubble", (4, 4, 4, 4))]
)
def test_a_stage_keeps_what_its_schedule_has_under_way(schedule: ScheduleName, kept: tuple[int, ...]) -> None:
    limits = stage_limits(Mesh(pp=4), PipelineSpec(schedule=schedule), 8, 64 * MIB, optimizer_copies=2)
    assert limits == StageLimits(64 * MIB, 4.0, kept)


@pytest.mark.parametrize(
    ("mesh", "copies"),
    [(Mesh(pp=2, fsdp=4), 1.0), (Mesh(pp=2, fsdp=4, zero_stage=2), 2.0), (Mesh(pp=2, fsdp=2, tp=2), 1.0)],
)
def test_a_stage_holds_its_part_of_parameters(mesh: Mesh, copies: float) -> None:
    """With ZeRO 2 the gathered parameters besides."""
    limits = stage_limits(mesh, PipelineSpec(), 2, MIB, optimizer_copies=2, micro_batch_share=3.0)
    assert limits.copies_of_parameters == copies
    assert limits.micro_batches_kept == (6.0 / mesh.tp, 3.0 / mesh.tp)


def test_where_nobody_knows_the_memory_nothing_is_limited() -> None:
    assert stage_limits(Mesh(pp=2), PipelineSpec(), 2, math.inf, optimizer_copies=2) == StageLimits()
    two = PipelineSpec(schedule="interleaved", stages_per_worker=2)
    assert stage_limits(Mesh(pp=2), two, 2, MIB, optimizer_copies=2) == StageLimits()


def test_activations_of_many_micro_batches_push_layers_to_later_stages() -> None:
    """Four equal layers would be cut in the middle; the first stage keeps two micro-batches, and the last one one."""
    costs = [LayerCost(str(number), 1.0, 0, 10) for number in range(4)]
    limits = stage_limits(Mesh(pp=2), PipelineSpec(schedule="1f1b"), 8, 30.0, optimizer_copies=0)
    assert limits.micro_batches_kept == (2.0, 1.0)
    assert best_cut(costs, 2, limits) == (0, 1)
    with pytest.raises(ModelError, match=r"No cut of this model into 2 stages fits into .* more stages, smaller micro"):
        best_cut(costs, 2, replace(limits, memory_bytes=19.0))
