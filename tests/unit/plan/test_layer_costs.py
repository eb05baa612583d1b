"""What a trace on the meta device tells of a model, beside what the model does with values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.errors import ModelError
from paceline.models import build
from paceline.models.gpt import GPT
from paceline.parallel.layer_costs import trace_model
from paceline.spec.forecast import ModelCost

WORDS, LENGTH, WIDTH, SAMPLES = 32, 8, 16, 2
BUILD = partial(GPT, WORDS, LENGTH, num_layers=3, num_heads=4, width=WIDTH)


@pytest.fixture(scope="module")
def cost() -> ModelCost:
    return trace_model(BUILD, torch.zeros(LENGTH, dtype=torch.long), SAMPLES)


def test_layers_are_the_blocks_before_which_a_pipeline_may_cut(cost: ModelCost) -> None:
    names = ["tokens", "positions", "dropout", "blocks.0", "blocks.1", "blocks.2", "norm"]
    assert [layer.name for layer in cost.layers] == names
    assert all(layer.may_begin for layer in cost.layers)
    parameters = [parameter.nbytes for parameter in BUILD().parameters()]
    assert sum(layer.parameter_bytes for layer in cost.layers) == sum(parameters) == 4 * cost.num_parameters
    assert max(layer.largest_parameter_bytes for layer in cost.layers) == max(parameters)
    roots = [layer.name for layer in cost.layers if layer.root_bytes == layer.parameter_bytes > 0]
    assert roots == ["tokens", "positions", "norm"] and sum(layer.root_bytes > 0 for layer in cost.layers) == 3
    assert [layer.tied_bytes for layer in cost.layers] == [0] * 6 + [4 * WORDS * WIDTH]  # as the classifier
    assert cost.layers[-1].output_bytes == 4 * LENGTH * WORDS  # the loss makes a gradient of all logits


def test_arithmetic_is_that_of_the_matrix_products(cost: ModelCost) -> None:
    """Two operations a multiplication (Kaplan et al. 2020, section 2.1)."""
    layers = 3 * 12 * WIDTH**2 + WORDS * WIDTH
    attention = 3 * 2 * LENGTH * WIDTH  # scores, and what they weigh
    found = sum(layer.time_s for layer in cost.layers)
    assert 1.0 <= found / (2 * LENGTH * (layers + attention)) < 1.1


def test_a_layer_keeps_what_autograd_keeps_of_it(cost: ModelCost) -> None:
    model = BUILD()
    kept: dict[int, int] = {}
    own = {parameter.data_ptr() for parameter in model.parameters()}
    alive = []  # or another tensor might get the address

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(torch.zeros(SAMPLES, LENGTH, dtype=torch.long))
    found = sum(layer.activation_bytes for layer in cost.layers) * SAMPLES
    assert found == pytest.approx(sum(kept.values()) + logits.nbytes, rel=0.02)  # attention keeps a number a token, too
    assert cost.bytes_per_sample is not None and cost.bytes_per_sample * SAMPLES > found


def test_tensor_parallelism_divides_what_the_plan_of_the_model_says(cost: ModelCost) -> None:
    divided = {layer.name: layer for layer in cost.layers if layer.num_tensor_slices > 1}
    assert list(divided) == ["blocks.0", "blocks.1", "blocks.2"]
    for layer in divided.values():
        assert layer.tensor_shards(4) == 4 and layer.tensor_shards(8) == 1
        # Two sums in forward; in backward one for each layer that takes what is whole: query, key, value and the net.
        assert (layer.num_all_reduces, layer.output_bytes) == (6, 4 * LENGTH * WIDTH)
        assert 0.1 < layer.replicated_fraction < 0.5
    plain = trace_model(partial(nn.Linear, 4, 4), torch.zeros(4))
    assert all(layer.num_tensor_slices == 1 for layer in plain.layers)


class Asking(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) if inputs.sum() > 0 else inputs


def of_growing_dropout() -> nn.Module:
    return nn.Sequential(*(nn.Dropout(rate.item()) for rate in torch.linspace(0.0, 0.2, 3)))


@pytest.mark.parametrize("build_model", [partial(Asking, 4, 4), of_growing_dropout])
def test_a_model_that_reads_values_is_refused_in_one_sentence(build_model: Callable[[], nn.Module]) -> None:
    with pytest.raises(ModelError, match="cannot be tried without values"):
        trace_model(build_model, torch.zeros(4))


def test_each_strategy_divides_what_it_says() -> None:
    settings = ["optim.momentum=0.9", "parity=numeric"]
    dp, fsdp = (paceline.dry_run_mesh("digits-lenet", mesh, settings=settings) for mesh in ("dp4", "fsdp4"))
    num_bytes = 4 * sum(parameter.numel() for parameter in build("lenet").parameters())
    assert dp.parameter_bytes == dp.gradient_bytes == dp.optimizer_bytes == num_bytes
    assert fsdp.parameter_bytes == fsdp.gradient_bytes == fsdp.optimizer_bytes == num_bytes / 4
    asked = paceline.dry_run_mesh("digits-lenet", "fsdp4")  # which cannot have the bits that this job asks for
    assert asked.parameter_bytes == fsdp.parameter_bytes
    with pytest.raises(ModelError, match="tensor"):
        paceline.dry_run_mesh("digits-lenet", "tp4", settings=settings)
