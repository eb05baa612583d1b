"""A small network that learns CIFAR-10 in ten epochs.

Jordan 2024, "94% on CIFAR-10 in 3.29 seconds on a single GPU" (arXiv:2404.00498), section 3, after Page 2018, "How to
train your ResNet".
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from paceline.errors import ModelError

_DEVIATIONS = (
    (3.194, 0.633, 0.586, 0.235),
    (0.879, 0.081, 0.067, 0.027),
    (0.424, 0.053, 0.047, 0.026),
)
"""Standard deviations of CIFAR-10's normalised 2 x 2 patches along `Whitening`: colours, then patterns."""


def cifarnet(num_classes: int = 10, in_channels: int = 3, mirror: bool = True) -> nn.Sequential:
    """Images (b, 3, s, s), normalised as CIFAR-10's, of at least 15 x 15 pixels -> logits (b, num_classes).

    Args:
        mirror: evaluate each image together with its mirror image, by the mean of both logits.

    Raises:
        ModelError: the images have no three channels.
    """
    if in_channels != 3:
        raise ModelError(f"The model 'cifarnet' needs images of 3 channels, not of {in_channels}; take 'resnet20'.")
    kind = _Mirrored if mirror else nn.Sequential
    return kind(
        OrderedDict(
            whiten=Whitening(),
            activation=nn.GELU(),
            stage1=_stage(24, 64),
            stage2=_stage(64, 256),
            stage3=_stage(256, 256),
            pool=nn.AdaptiveMaxPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(256, num_classes, bias=False),
            scale=_Scale(1 / 9),
        )
    )


class Whitening(nn.Conv2d):
    """Fixed filters that make neighbouring pixels nearly independent, each in both signs; the biases are learned.

    The paper takes the eigenvectors of the training set's patches. Those of CIFAR-10 are nearly the products of three
    opponent colours and four Haar patterns, which need no data.
    """

    def __init__(self) -> None:
        super().__init__(3, 24, kernel_size=2)
        self.weight.requires_grad_(False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()  # the layers behind it draw after it, as behind any other convolution
        colours = torch.tensor([[1.0, 1, 1], [1, 0, -1], [1, -2, 1]])
        patterns = torch.tensor([[1.0, 1, 1, 1], [1, 1, -1, -1], [1, -1, 1, -1], [1, -1, -1, 1]]) / 2
        colours /= colours.norm(dim=1, keepdim=True)
        filters = torch.einsum("ic,jp->ijcp", colours, patterns) / torch.tensor(_DEVIATIONS)[:, :, None, None]
        filters = filters.reshape(12, 3, 2, 2)
        self.weight.copy_(torch.cat([filters, -filters]))
        self.bias.zero_()  # type: ignore[union-attr]  # it has one


class _IdentityConv(nn.Conv2d):
    """A 3 x 3 convolution that starts as the identity, in as many channels as there are before it."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size=3, padding=1, bias=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.dirac_(self.weight[: self.in_channels])


def _stage(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv1=_IdentityConv(in_channels, out_channels),
            pool=nn.MaxPool2d(2),
            norm1=_norm(out_channels),
            activation1=nn.GELU(),
            conv2=_IdentityConv(out_channels, out_channels),
            norm2=_norm(out_channels),
            activation2=nn.GELU(),
        )
    )


def _norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, momentum=0.4)
    norm.weight.requires_grad_(False)
    return norm


class _Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class _Mirrored(nn.Sequential):
    """Evaluates images together with their mirror images."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Callable[[Tensor], Tensor] = super().forward
        return logits(x) if self.training else (logits(x) + logits(x.flip(-1))) / 2
