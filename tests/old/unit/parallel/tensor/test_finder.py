"""Which layers are found to belong together, what the workers of a tensor axis hold, and the sentences of refusal."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.errors import ModelError
from paceline.models import build
from paceline.parallel.memory_order import memory_order
from paceline.parallel.pipeline.calls import ModelCall
from paceline.parallel.pipeline.recorder import record
from paceline.parallel.pipeline.stage import Stage
from paceline.parallel.tensor import TensorPlan, bytes_per_sample, find_plan
from paceline.parallel.tensor.exchange import block_runs, rows_to_send
from paceline.parallel.tensor.pairs import trace
from paceline.parallel.tensor.sequence_region import SequenceLayerNorm, SequenceRegion
from paceline.parallel.tensor.slices import degrees_that_fit, every_worker_has_some, slice_of
from paceline.parallel.tensor.traffic import LayerSize
from paceline.spec import ModelSpec

DEGREES = st.integers(1, 9)


@given(st.integers(1, 60), DEGREES)
def test_slices_are_those_of_chunk(length: int, degree: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(length).chunk(degree)]
    slices = [list(range(*slice_of(length, degree, rank))) for rank in range(degree)]
    assert slices == chunks + [[]] * (degree - len(chunks))
    assert every_worker_has_some(length, degree) == (len(chunks) == degree)


@given(st.integers(1, 4), st.integers(1, 6), DEGREES)
def test_redistributed_rows_come_from_whoever_holds_them(num_blocks: int, rows_each: int, degree: int) -> None:
    num_rows = num_blocks * rows_each * degree
    counts = rows_to_send(num_rows, num_blocks, degree)
    for rank in range(degree):
        needed = [row for start, stop in block_runs(num_rows, num_blocks, degree, rank) for row in range(start, stop)]
        holders = [row // (num_rows // degree) for row in needed]
        assert [holders.count(holder) for holder in range(degree)] == [counts[holder][rank] for holder in range(degree)]
        assert sum(counts[rank]) == len(needed) == num_rows // degree


@given(st.permutations(range(4)))
def test_memory_order_leads_there_and_back(order: list[int]) -> None:
    tensor = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5).permute(order)
    there, back = memory_order(tensor)
    assert tensor.permute(there).is_contiguous()
    assert tensor.permute(there).permute(back).stride() == tensor.stride()


def test_degrees_that_fit() -> None:
    assert degrees_that_fit(12) == "1, 2, 3, 4, 6 or 12"
    assert degrees_that_fit(1) == "1"


class _Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.layer(x)
        return self.last


def test_tracing_leaves_no_trace() -> None:
    module = _Remembers().eval()
    assert trace(module) is not None
    assert module.last is None and not module.training and module(torch.ones(2)).shape == (2,)


def _styles(model: nn.Module, degree: int, large: int = 0) -> dict[str, str]:
    return dict(find_plan(model, degree, large=large).styles)


def test_the_columns_of_alexnet_meet_where_they_did_on_two_gpus() -> None:
    model = build(ModelSpec("alexnet", {"num_columns": 2}))
    assert sum(p.numel() for p in model.parameters()) == 60_965_224  # Caffe's AlexNet
    styles = _styles(model, 2)
    assert styles["features.0"] == "channels"
    assert styles["features.3"] == "channels + local_input" and styles["features.5"] == "gather_channels(features.3)"
    assert styles["features.6"] == "channels"
    assert styles["features.8"] == "channels + local_input" and "features.9" not in styles
    assert styles["features.10"] == "channels + local_input" and styles["features.12"] == "gather_channels(features.10)"
    assert styles["classifier.1"] == "colwise" and styles["classifier.4"] == "rowwise"
    # Four workers halve each column, and need all of it.
    in_quarters = _styles(model, 4)
    assert in_quarters["features.8"] == "channels" and in_quarters["features.9"] == "gather_channels(features.8)"


def test_small_layers_that_stand_alone_stay_whole() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    assert not _styles(model, 2, large=65)
    assert set(_styles(model, 2, large=64)) == {"0", "2"}


def test_a_layer_that_stands_in_two_places_is_no_half_of_a_pair() -> None:
    layer = nn.Linear(8, 8)
    styles = _styles(nn.Sequential(layer, nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), layer), 2)
    assert set(styles.values()) == {"colwise_gather_output"}


def test_parameters_that_unlike_layers_share_stay_whole() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    assert not find_plan(model, 2, large=0).styles


def test_heads_that_cannot_be_divided_are_refused_with_what_would_do() -> None:
    model = build(ModelSpec("gpt", {"width": 48, "num_heads": 12, "num_layers": 1}))
    sentence = "'blocks.0.attention': 12 heads cannot be shared by 5 workers; use 1, 2, 3, 4, 6 or 12."
    with pytest.raises(ModelError, match=re.escape(sentence)):
        find_plan(model, 5)
    with pytest.raises(ModelError, match="3 heads cannot be shared by 2 workers; use 1 or 3"):
        find_plan(nn.MultiheadAttention(12, 3), 2)


def test_what_stays_whole_is_said() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 1, groups=3), nn.Conv2d(6, 3, 1), nn.BatchNorm2d(3))
    first, second = find_plan(model, 4).notes
    assert "'0' with 6 output channels is not shared by 4 workers" in first and "1 or 3" in first
    assert "'1' with 3 output channels is not shared by 4 workers" in second


def test_finding_draws_no_random_numbers_and_changes_nothing() -> None:
    model = build(ModelSpec("gpt", {"width": 8, "num_heads": 2, "num_layers": 1}))
    before, state = torch.get_rng_state(), {name: value.clone() for name, value in model.state_dict().items()}
    text = repr(model)
    find_plan(model, 2, large=0)
    assert torch.equal(torch.get_rng_state(), before) and repr(model) == text
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_plans_need_no_memory_for_weights() -> None:
    with torch.device("meta"):
        model = build(ModelSpec("gpt", {"width": 32, "num_heads": 4, "num_layers": 1}))
    assert _styles(model, 2)["blocks.0.attention.query_key_value"] == "packed_colwise(3)"


class _Residual(nn.Module):
    """A pair, a norm, and something in between them."""

    def __init__(self, between: str = "") -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(8), nn.Dropout(0.1)
        self.pair = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.ones(8))
        self.between = between

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        if shift is not None:
            x = x + shift
        normed = self.norm(x)
        if self.between == "length":
            normed = normed / x.shape[1]
        elif self.between == "parameter":
            normed = normed * self.scale
        elif self.between == "all":
            normed = normed.cumsum(1)
        y: Tensor = x + self.drop(self.pair(normed)) * 0.5
        return y


def _regions(model: nn.Module) -> list[tuple[str, str]]:
    """The first and the last module of every sequence-parallel region."""
    entries = find_plan(model, 2, sequence_parallel=True).entries
    first = [name for name, entry in entries.items() if "enter_sequence_region" in entry]
    return list(zip(first, [name for name, entry in entries.items() if "leave_sequence_region" in entry], strict=True))


def _regions_of(*blocks: nn.Module) -> list[tuple[str, str]]:
    return _regions(nn.Sequential(nn.Linear(4, 8), *blocks, nn.Linear(8, 3)))


def test_positions_are_parted_where_each_is_treated_by_itself() -> None:
    assert _regions_of(*[_Residual() for _ in range(3)]) == [("1", "3")]
    assert _regions_of(_Residual(), _Residual(), nn.BatchNorm1d(5), _Residual(), _Residual()) == [
        ("1", "2"),
        ("4", "5"),
    ]
    assert _regions_of(_Residual()) == []  # nothing is gained
    assert _regions_of(nn.Sequential(nn.Tanh(), _Residual(), nn.Dropout(0.5), _Residual())) == [("1", "1")]


@pytest.mark.parametrize("between", ["length", "parameter", "all"])
def test_positions_stay_together_where_something_needs_all_of_them(between: str) -> None:
    assert _regions_of(_Residual(), _Residual(), _Residual(between), _Residual()) == [("1", "2")]
    assert _regions_of(nn.Sequential(*[_Residual(between) for _ in range(3)])) == []


def test_what_sequence_parallelism_does_not_find_is_said() -> None:
    model = nn.Sequential(*[_Residual("all") for _ in range(2)])
    (note,) = find_plan(model, 2, sequence_parallel=True).notes
    assert "0 of 2 pairs" in note
    assert not find_plan(model, 2).notes


def test_a_norm_of_positions_refuses_to_be_called_outside_of_its_stretch() -> None:
    norm = SequenceLayerNorm(4)
    norm.region = SequenceRegion(cast(Any, None))
    with pytest.raises(ModelError, match="leave sequence parallelism out"):
        norm(torch.ones(2, 3, 4))


def test_layers_of_a_stage_of_a_pipeline_follow_each_other_as_in_the_model() -> None:
    with torch.device("meta"):
        model = build(ModelSpec("lenet"))
        recording = record(model, ModelCall((torch.zeros(2, 1, 28, 28),)))
    assert _styles(Stage(recording, 0, len(recording.layers)), 2) == _styles(model, 2)
    # Its partner is in another stage.
    with_fc1 = next(number for number in range(len(recording.layers)) if recording.name(number) == "fc1")
    assert _styles(Stage(recording, with_fc1 + 1, len(recording.layers)), 2)["fc2"] == "colwise_gather_output"
    assert _styles(Stage(recording, with_fc1, len(recording.layers)), 2)["fc2"] == "rowwise"


def test_blocks_of_a_stage_share_positions_though_nobody_calls_their_list() -> None:
    with torch.device("meta"):
        model = build(ModelSpec("gpt", {"width": 16, "num_heads": 2, "num_layers": 3}))
        recording = record(model, ModelCall((torch.zeros(2, 5, dtype=torch.long),)))
    start = next(number for number in range(len(recording.layers)) if recording.name(number) == "blocks.1")
    stage = Stage(recording, start, len(recording.layers))
    for part, region, num_rowwise in ((stage, ("blocks.1", "norm"), 4), (model, ("blocks", "blocks"), 6)):
        assert _regions(part) == [region]
        styles = find_plan(part, 2, sequence_parallel=True).styles.values()
        assert sum("scatter_sequence" in style for style in styles) == num_rowwise


def test_a_transformer_layer_sends_what_megatron_says() -> None:
    """Four sums of b * L * width: two forward, two backward (section 3)."""
    plan = TensorPlan(4, {"in": "colwise", "out": "rowwise"})
    sizes = {"in": LayerSize(8, 32, True), "out": LayerSize(32, 8, True)}
    assert bytes_per_sample(plan, sizes, 4) == 2 * (2 * 3 / 4 * 8 * 4)


class Biased(nn.Module):
    """The first of them makes a bias for each head, which all add to their scores."""

    def __init__(self, has_bias: bool) -> None:
        super().__init__()
        self.n_heads, self.key_width, self.has_bias = 4, 2, has_bias
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.bias = nn.Parameter(torch.randn(4, 1, 1)) if has_bias else None

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.n_heads, self.key_width)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        bias = self.bias if self.bias is not None else bias
        scores = q @ k.transpose(-1, -2) + (0 if bias is None else bias)
        y: Tensor = self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))
        return y


def test_attentions_of_one_kind_are_divided_all_or_none() -> None:
    """One that hands the others something of all heads keeps theirs together, as in T5."""
    assert find_plan(nn.Sequential(Biased(False), Biased(False)), 2).layers
    plan = find_plan(nn.Sequential(Biased(True), Biased(False)), 2)
    assert not plan.layers
    assert any("Biased stay whole" in note for note in plan.notes)


class Counting(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("calls").add_(1)
        y: Tensor = self.second(self.first(x).relu())
        return y


def test_finding_a_plan_moves_no_buffer() -> None:
    model = Counting()
    find_plan(model, 2)
    assert float(model.get_buffer("calls")) == 0
