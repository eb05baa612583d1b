"""Tensor plans as values: said by a user or a model, checked against the model, printed and given back."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import ModelError
from paceline.models import build
from paceline.parallel.tensor import TensorPlan, declared_plan, find_plan, tensor_parallel
from paceline.parallel.tensor.plan import given_plan, parse_style
from paceline.spec import ModelSpec, Plan
from tests.old.ranks.tensor_zoo import Gated, SeparateHeads


class Decoder(nn.Module):
    """Names as in transformers' models."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"attention": SeparateHeads(12, 6, 2), "mlp": Gated(12, 8)}) for _ in range(2)
        )
        self.head = nn.Linear(12, 10)


MLP = {"layers.*.mlp.gate": "colwise", "layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}


def test_styles_are_words_with_arguments_joined_by_plus() -> None:
    assert parse_style("packed_colwise(3) + same_input(a.b)") == {"packed_colwise": ("3",), "same_input": ("a.b",)}
    assert parse_style("heads(num_heads, width)") == {"heads": ("num_heads", "width")}
    assert parse_style("colwise_rep") == parse_style("colwise_gather_output") == {"colwise": (), "gather_output": ()}


def test_a_star_stands_for_one_part_of_a_name() -> None:
    plan = given_plan(Decoder(), MLP, 4)
    assert len(plan.styles) == 6 and plan.styles["layers.1.mlp.down"] == "rowwise"
    assert str(plan).splitlines() == [f"{name}: {style}" for name, style in MLP.items()]


def test_an_edited_plan_counts() -> None:
    replicated = MLP | {"layers.1.mlp.*": "replicate"}
    assert set(given_plan(Decoder(), replicated, 2).styles) == {f"layers.0.mlp.{key}" for key in ("gate", "up", "down")}


@pytest.mark.parametrize("model", ["gpt", "lenet", "alexnet", "mlp"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_was_found_can_be_given_back(model: str, sequence_parallel: bool) -> None:
    with torch.device("meta"):
        module = build(ModelSpec(model))
    found = find_plan(module, 2, sequence_parallel=sequence_parallel)
    plan = Plan(tensor_plan=dict(found.styles))
    read = Plan.from_mapping(json.loads(json.dumps(plan.to_mapping())))
    assert given_plan(module, read.tensor_plan or {}, 2).styles == found.styles != {}


def test_a_models_own_plan_counts_where_the_user_gives_none() -> None:
    model: Any = Decoder()
    assert declared_plan(model, None, 2) is None
    model._tp_plan = {"head": "colwise_rep"}
    assert declared_plan(model, None, 2) == TensorPlan(2, {"head": "colwise_rep"})
    assert declared_plan(model, {}, 2) == TensorPlan(2, {})
    assert declared_plan(model, MLP, 2) == given_plan(model, MLP, 2)
    whole: Any = nn.ModuleDict({"model": Decoder()})
    whole.config, whole.base_model_prefix = SimpleNamespace(base_model_tp_plan=MLP), "model"
    found = declared_plan(whole, None, 2)
    assert found is not None and set(found.styles) == {f"model.{name}" for name in given_plan(Decoder(), MLP, 2).styles}


@pytest.mark.parametrize(
    ("styles", "said"),
    [
        ({"layers.*.mlp.dawn": "rowwise"}, "names 'layers.*.mlp.dawn', which this model does not have: did you mean"),
        ({"head": "colwize"}, "no style 'colwize': did you mean 'colwise'"),
        ({"layers.0": "colwise"}, "'layers.0' is a ModuleDict, and 'colwise' is for Linear"),
        ({"layers.0.mlp.down": "rowwise"}, "'layers.0.mlp.down' is rowwise, and no layer of 8 output features is colw"),
        ({"head": "colwise"}, "'head' is colwise, and no rowwise layer takes its features; share it as colwise"),
        (
            {"head": "packed_colwise(3) + gather_output"},
            "'head' with 3 out_features cannot be shared as packed",
        ),
        ({"layers.0.attention": "heads(num_kv_heads)"}, "2 heads cannot be shared by 4 workers; use 1 or 2"),
        ({"layers.0.attention": "heads(n_head)"}, "has no whole number 'n_head' that could be divided"),
        ({"head": "colwise + same_input(neck)"}, r"same_input\(neck\), which names no module"),
    ],
)
def test_a_plan_that_does_not_fit_gets_a_sentence(styles: dict[str, str], said: str) -> None:
    with pytest.raises(ModelError, match=said.replace("*", r"\*")):
        given_plan(Decoder(), styles, 4)


def test_a_layer_with_too_few_features_is_refused_with_what_would_do() -> None:
    with pytest.raises(ModelError, match="'0' with 5 out_features cannot be shared as colwise by 4 workers; use 1 or"):
        given_plan(nn.Sequential(nn.Linear(2, 5)), {"0": "colwise_gather_output"}, 4)
    grouped = nn.Sequential(nn.Conv2d(6, 6, 1, groups=3))
    with pytest.raises(ModelError, match="'0' with 3 groups cannot be shared as channels by 2 workers; use 1 or 3"):
        given_plan(grouped, {"0": "channels + gather_output"}, 2)


def test_layers_that_are_shared_together_stay_in_one_stage() -> None:
    behind = nn.ModuleDict({"pool": nn.MaxPool2d(2)})
    axis: Any = None
    with pytest.raises(ModelError, match="'pool' is shared together with 'conv', which is in another stage"):
        tensor_parallel(behind, axis, given=TensorPlan(2, {"conv": "channels", "pool": "gather_channels(conv)"}))
