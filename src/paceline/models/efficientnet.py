"""EfficientNet, one family of eight.

Tan and Le 2019, "EfficientNet: rethinking model scaling for convolutional neural networks".
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.resnet import conv_norm, kaiming

VARIANTS: Final = {
    "efficientnet-b0": (1.0, 1.0, 0.2),
    "efficientnet-b1": (1.0, 1.1, 0.2),
    "efficientnet-b2": (1.1, 1.2, 0.3),
    "efficientnet-b3": (1.2, 1.4, 0.3),
    "efficientnet-b4": (1.4, 1.8, 0.4),
    "efficientnet-b5": (1.6, 2.2, 0.4),
    "efficientnet-b6": (1.8, 2.6, 0.5),
    "efficientnet-b7": (2.0, 3.1, 0.5),
}
"""How many times as wide and as deep as B0 each is, and its rate of dropout."""

STAGES: Final = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)
"""The paper's table 1, at the scale of B0: expansion, kernel size, stride, output channels and blocks of each stage."""


def efficientnet(
    variant: str,
    /,
    num_classes: int = 1000,
    in_channels: int = 3,
    stem_stride: Literal[1, 2] = 2,
    dropout: float | None = None,
    stochastic_depth: float = 0.2,
) -> nn.Sequential:
    """Inverted residual blocks (Tan and Le 2019): images (b, in_channels, s, s) -> logits (b, num_classes).

    The net divides the image's side by 32; with `stem_stride` 1 by 16, for small images. `dropout` None: the
    variant's own rate. A block's chance of being skipped grows linearly with its depth towards
    `stochastic_depth` (Huang et al. 2016, "Deep networks with stochastic depth", equation 4).

    Args:
        variant: a name in `VARIANTS`.
    """
    width, depth, usual_dropout = VARIANTS[variant]
    channels = scaled_channels(32, width)
    stem = nn.Sequential(*conv_norm(in_channels, channels, 3, stem_stride, activation=nn.SiLU))
    parts: OrderedDict[str, nn.Module] = OrderedDict(stem=stem)
    num_blocks = sum(math.ceil(stage[-1] * depth) for stage in STAGES)
    place = 0
    for number, (expansion, kernel_size, stride, stage_channels, num_stage_blocks) in enumerate(STAGES, start=1):
        out_channels = scaled_channels(stage_channels, width)
        blocks: list[nn.Module] = []
        for _ in range(math.ceil(num_stage_blocks * depth)):
            skip_rate = stochastic_depth * place / num_blocks
            blocks.append(MBConv(channels, out_channels, expansion, kernel_size, 1 if blocks else stride, skip_rate))
            channels = out_channels
            place += 1
        parts[f"stage{number}"] = nn.Sequential(*blocks)
    head_channels = scaled_channels(1280, width)
    parts["head"] = nn.Sequential(
        OrderedDict(
            conv=nn.Sequential(*conv_norm(channels, head_channels, 1, activation=nn.SiLU)),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            dropout=nn.Dropout(usual_dropout if dropout is None else dropout),
            fc=nn.Linear(head_channels, num_classes),
        )
    )
    model = nn.Sequential(parts)
    kaiming(model)
    return model


def scaled_channels(channels: int, width: float) -> int:
    """`channels` * `width`, rounded to a multiple of 8 that loses no more than a tenth."""
    wanted = channels * width
    rounded = max(8, int(wanted + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * wanted else rounded + 8


class MBConv(nn.Module):
    """Mobile inverted bottleneck: widen, convolve each channel, weigh the channels, narrow, add the input.

    Sandler et al. 2018, "MobileNetV2", with squeeze-and-excitation. The input is added where the
    shape allows it.
    """

    def __init__(
        self, in_channels: int, out_channels: int, expansion: int, kernel_size: int, stride: int, skip_rate: float
    ) -> None:
        super().__init__()
        wide = in_channels * expansion
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        if expansion > 1:
            parts["expand"] = nn.Sequential(*conv_norm(in_channels, wide, 1, activation=nn.SiLU))
        depthwise = conv_norm(wide, wide, kernel_size, stride, groups=wide, activation=nn.SiLU)
        parts["depthwise"] = nn.Sequential(*depthwise)
        parts["squeeze_excite"] = SqueezeExcite(wide, max(1, in_channels // 4))
        parts["project"] = nn.Sequential(*conv_norm(wide, out_channels, 1))
        self.adds_input = stride == 1 and in_channels == out_channels
        if self.adds_input:
            parts["stochastic_depth"] = StochasticDepth(skip_rate)
        self.branch = nn.Sequential(parts)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.branch(x)
        return x + y if self.adds_input else y


class SqueezeExcite(nn.Module):
    """Weigh each channel by what the whole image holds (Hu et al. 2018); (b, c, h, w) -> the same."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, squeezed, kernel_size=1),
            nn.SiLU(),
            nn.Conv2d(squeezed, channels, kernel_size=1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x * self.gate(x)
        return y


class StochasticDepth(nn.Module):
    """In training, zero a sample's whole branch with probability `p`, and divide the others by 1 - p."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return x * F.dropout(x.new_ones(x.shape[0], *[1] * (x.dim() - 1)), self.p, self.training)
