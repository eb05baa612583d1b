"""Residual networks: He et al. 2015, "Deep residual learning for image recognition"; and what other convolutional
networks share with them: a convolution with its batch norm, and how first weights are drawn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

Stem = Literal["imagenet", "cifar"]


def resnet20(num_classes: int = 10, in_channels: int = 3) -> nn.Sequential:
    """The 20-layer net for CIFAR (section 4.2): images (b, in_channels, s, s) -> logits (b, num_classes).

    Three stages of 16, 32 and 64 channels with parameter-free shortcuts (option A).
    """
    stem = nn.Sequential(*conv_norm(in_channels, 16, 3, activation=nn.ReLU))
    return _resnet(stem, basic_block, PaddedShortcut, 16, [(16, 3), (32, 3), (64, 3)], num_classes)


def resnet18(num_classes: int = 1000, in_channels: int = 3, stem: Stem = "imagenet") -> nn.Sequential:
    """18 layers of basic blocks: images (b, in_channels, s, s) -> logits (b, num_classes).

    The "imagenet" stem (7 x 7, stride 2, max pool) divides the image's side by 4 before the first stage; the
    "cifar" stem (3 x 3, stride 1) keeps it, for images of some 32 pixels.
    """
    stages = [(64, 2), (128, 2), (256, 2), (512, 2)]
    return _resnet(_stem(stem, in_channels), basic_block, projected_shortcut, 64, stages, num_classes)


def resnet50(num_classes: int = 1000, in_channels: int = 3, stem: Stem = "imagenet") -> nn.Sequential:
    """50 layers of bottleneck blocks: images (b, in_channels, s, s) -> logits (b, num_classes).

    Stems as in `resnet18`. A stage halves the image in its 3 x 3 convolution and not in the 1 x 1 before it
    (often called v1.5): the 1 x 1 would throw away three pixels of four unseen.
    """
    stages = [(256, 3), (512, 4), (1024, 6), (2048, 3)]
    return _resnet(_stem(stem, in_channels), bottleneck, projected_shortcut, 64, stages, num_classes)


class Residual(nn.Module):
    """relu(branch(x) + shortcut(x)): the branch learns what to add to what is there."""

    def __init__(self, branch: nn.Sequential, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.relu(self.branch(x) + self.shortcut(x))
        return y


class PaddedShortcut(nn.Module):
    """Option A: every `stride`-th pixel, and zeros in the new channels.

    (b, in_channels, h, w) -> (b, out_channels, ceil(h / stride), ceil(w / stride))
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.num_new_channels = out_channels - in_channels
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.num_new_channels))


def projected_shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    """Option B: a learned 1 x 1 convolution, where a block changes the shape."""
    return nn.Sequential(*conv_norm(in_channels, out_channels, 1, stride))


def basic_block(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    """Two 3 x 3 convolutions."""
    return nn.Sequential(
        *conv_norm(in_channels, out_channels, 3, stride, activation=nn.ReLU), *conv_norm(out_channels, out_channels, 3)
    )


def bottleneck(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    """1 x 1 down to a quarter of `out_channels`, 3 x 3 there, 1 x 1 back up."""
    inner = out_channels // 4
    return nn.Sequential(
        *conv_norm(in_channels, inner, 1, activation=nn.ReLU),
        *conv_norm(inner, inner, 3, stride, activation=nn.ReLU),
        *conv_norm(inner, out_channels, 1),
    )


def _resnet(
    stem: nn.Module,
    branch: Callable[[int, int, int], nn.Sequential],
    shortcut: Callable[[int, int, int], nn.Module],
    channels: int,
    stages: Sequence[tuple[int, int]],
    num_classes: int,
) -> nn.Sequential:
    """A stem, stages and a classifier.

    Args:
        channels: of the stem's output.
        stages: the channels and the number of blocks of each; every stage but the first halves the image.
    """
    parts: OrderedDict[str, nn.Module] = OrderedDict(stem=stem)
    for number, (out_channels, num_blocks) in enumerate(stages, start=1):
        blocks = []
        for place in range(num_blocks):
            stride = 2 if number > 1 and place == 0 else 1
            block = branch(channels, out_channels, stride)
            is_same_shape = channels == out_channels and stride == 1
            blocks.append(Residual(block, nn.Identity() if is_same_shape else shortcut(channels, out_channels, stride)))
            channels = out_channels
        parts[f"stage{number}"] = nn.Sequential(*blocks)
    parts["head"] = nn.Sequential(
        OrderedDict(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(channels, num_classes))
    )
    model = nn.Sequential(parts)
    kaiming(model)
    return model


def _stem(stem: Stem, in_channels: int) -> nn.Sequential:
    if stem == "cifar":
        return nn.Sequential(*conv_norm(in_channels, 64, 3, activation=nn.ReLU))
    pool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
    return nn.Sequential(*conv_norm(in_channels, 64, 7, 2, activation=nn.ReLU), pool)


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
