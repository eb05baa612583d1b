from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.parallel.dry_run.dry_run import on_paper, trace_model
from paceline.parallel.pipeline.layer_costs import counting_kept


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_memory_that_autograd_keeps_counts_once_and_without_parameters(device: str) -> None:
    """Three inputs of 16 bytes, and three outputs of ReLU, which the layer after it keeps too, of 32."""
    model = _model().to(device)
    with counting_kept(model.parameters()) as kept_bytes:
        output = model(torch.randn(3, 4, device=device))
        assert kept_bytes() == 3 * (16 + 32)
    assert output.shape == (3, 2)


def test_a_traced_model_keeps_what_it_does_keep() -> None:
    """Weights that backward needs are no activations: they do not come again with every sample."""
    model, arguments = on_paper(_model, torch.randn(4), 2)
    cost = trace_model(model, arguments, 2)
    of_loss = 8  # as much as the output
    assert sum(layer.activation_bytes for layer in cost.layers) == 16 + 32 + of_loss
    # Between the halves of backward only the gradients of outputs wait; the first layer's input has none.
    assert [layer.waiting_bytes for layer in cost.layers] == [32, 0, 8]
    # At the last layer, where all is kept, the gradients of its output and of its input.
    assert [layer.moment_bytes for layer in cost.layers] == [32 + 16, 32 + 32, 8 + 32]
    assert cost.activations.bytes_per_sample == 16 + 32 + of_loss + 8 + 32


def test_a_traced_model_computes_three_products_a_layer() -> None:
    """Output, gradient of the weight, gradient of the input: two operations for each of 4 * 8 + 8 * 2 numbers."""
    assert trace_model(*on_paper(_model, torch.randn(4), 2), 2).flops_per_sample == pytest.approx(288)
