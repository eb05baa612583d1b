"""EfficientNet, one family of eight.

Tan and Le 2019, "EfficientNet: rethinking model scaling for convolutional neural networks".
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.initialize import kaiming


@dataclass(frozen=True)
class Variant:
    """How far one member of the family is scaled up from B0."""

    width: float
    depth: float
    dropout: float


VARIANTS: Final = {
    "efficientnet-b0": Variant(width=1.0, depth=1.0, dropout=0.2),
    "efficientnet-b1": Variant(width=1.0, depth=1.1, dropout=0.2),
    "efficientnet-b2": Variant(width=1.1, depth=1.2, dropout=0.3),
    "efficientnet-b3": Variant(width=1.2, depth=1.4, dropout=0.3),
    "efficientnet-b4": Variant(width=1.4, depth=1.8, dropout=0.4),
    "efficientnet-b5": Variant(width=1.6, depth=2.2, dropout=0.4),
    "efficientnet-b6": Variant(width=1.8, depth=2.6, dropout=0.5),
    "efficientnet-b7": Variant(width=2.0, depth=3.1, dropout=0.5),
}


@dataclass(frozen=True)
class BlockGroup:
    """A row of the paper's table 1, at the scale of B0."""

    expansion: int
    kernel_size: int
    stride: int
    out_channels: int
    num_blocks: int


STAGES: Final = (
    BlockGroup(expansion=1, kernel_size=3, stride=1, out_channels=16, num_blocks=1),
    BlockGroup(expansion=6, kernel_size=3, stride=2, out_channels=24, num_blocks=2),
    BlockGroup(expansion=6, kernel_size=5, stride=2, out_channels=40, num_blocks=2),
    BlockGroup(expansion=6, kernel_size=3, stride=2, out_channels=80, num_blocks=3),
    BlockGroup(expansion=6, kernel_size=5, stride=1, out_channels=112, num_blocks=3),
    BlockGroup(expansion=6, kernel_size=5, stride=2, out_channels=192, num_blocks=4),
    BlockGroup(expansion=6, kernel_size=3, stride=1, out_channels=320, num_blocks=1),
)
STEM_CHANNELS: Final = 32
HEAD_CHANNELS: Final = 1280


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
    scale = VARIANTS[variant]
    stem_channels = scaled_channels(STEM_CHANNELS, scale.width)
    parts: OrderedDict[str, nn.Module] = OrderedDict(
        stem=_conv_norm(in_channels, stem_channels, kernel_size=3, stride=stem_stride, activation=True)
    )
    depths = [math.ceil(stage.num_blocks * scale.depth) for stage in STAGES]
    channels = stem_channels
    num_blocks_before = 0
    for number, (stage, depth) in enumerate(zip(STAGES, depths, strict=True), start=1):
        out_channels = scaled_channels(stage.out_channels, scale.width)
        blocks = []
        for place in range(depth):
            skip_rate = stochastic_depth * (num_blocks_before + place) / sum(depths)
            stride = stage.stride if place == 0 else 1
            blocks.append(MBConv(channels, out_channels, stage.expansion, stage.kernel_size, stride, skip_rate))
            channels = out_channels
        parts[f"stage{number}"] = nn.Sequential(*blocks)
        num_blocks_before += depth
    head_channels = scaled_channels(HEAD_CHANNELS, scale.width)
    parts["head"] = nn.Sequential(
        OrderedDict(
            conv=_conv_norm(channels, head_channels, kernel_size=1, activation=True),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            dropout=nn.Dropout(scale.dropout if dropout is None else dropout),
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
        self,
        in_channels: int,
        out_channels: int,
        expansion: int,
        kernel_size: int,
        stride: int,
        skip_rate: float,
    ) -> None:
        super().__init__()
        wide = in_channels * expansion
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        if expansion > 1:
            parts["expand"] = _conv_norm(in_channels, wide, kernel_size=1, activation=True)
        parts["depthwise"] = _conv_norm(wide, wide, kernel_size, stride, groups=wide, activation=True)
        parts["squeeze_excite"] = SqueezeExcite(wide, max(1, in_channels // 4))
        parts["project"] = _conv_norm(wide, out_channels, kernel_size=1, activation=False)
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
        if not self.training or self.p == 0:
            return x
        return x * F.dropout(x.new_ones(x.shape[0], *[1] * (x.dim() - 1)), self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def _conv_norm(
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    stride: int = 1,
    groups: int = 1,
    *,
    activation: bool,
) -> nn.Sequential:
    # No bias: the batch norm behind it has one.
    conv = nn.Conv2d(
        in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, groups=groups, bias=False
    )
    parts: list[nn.Module] = [conv, nn.BatchNorm2d(out_channels)]
    if activation:
        parts.append(nn.SiLU())
    return nn.Sequential(*parts)
