"""What the convolutional networks share: a convolution with its batch norm, and how first weights are drawn."""

from __future__ import annotations

from torch import nn


def conv_norm(
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    stride: int = 1,
    *,
    groups: int = 1,
    activation: type[nn.Module] | None = None,
) -> list[nn.Module]:
    """(b, in_channels, h, w) -> (b, out_channels, ceil(h / stride), ceil(w / stride)); the batch norm has the bias."""
    padding = kernel_size // 2
    conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(out_channels), *([activation()] if activation else [])]


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
