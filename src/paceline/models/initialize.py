"""How the convolutional networks draw their first weights."""

from __future__ import annotations

from torch import nn


def kaiming(model: nn.Module) -> None:
    """Draw every convolution from N(0, 2 / fan_out), so that activations keep their variance going backward.

    He et al. 2015, "Delving deep into rectifiers", equation 14. Biases of convolutions start at zero;
    batch norm (gamma 1, beta 0) and linear layers keep torch's own start.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
