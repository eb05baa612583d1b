"""Convolutions of which every worker computes its own output channels: 64 channels over 4 devices are 16 on each.

DTensor's own convolution is of no use here: of its placements one computes something else and the others raise.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from paceline.parallel.tensor.axis import Axis, degrees_that_fit, everybody_has_some
from paceline.parallel.tensor.exchange import enter, gather, take_own
from paceline.parallel.tensor.linear import local

Entry = Literal["whole", "slice", "part"]
"""What a layer takes: the whole input; the own slice of a whole input; or what is the own part already."""


class _ChannelConv(_ConvNd):
    """(b, in_channels, ...) -> (b, own part of out_channels, ...), or all of them gathered.

    Of a convolution in groups a worker that has whole groups needs their input channels only, and one that has a part
    of a group that group's.
    """

    axis: Axis
    entry: Entry
    gathers: bool

    def forward(self, input: Tensor) -> Tensor:
        degree, groups = self.axis.degree, self.groups
        if self.entry == "slice":
            input = take_own(input, 1, self.axis)
        elif self.entry == "whole":
            input = enter(input, self.axis)
        if groups % degree == 0:
            groups //= degree
        elif groups > 1:
            width = self.in_channels // groups
            input = input.narrow(1, self.axis.rank * groups // degree * width, width)
            groups = 1
        padding = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = (0,) * len(self.kernel_size)
        convolve = _CONVOLVE[len(self.kernel_size)]
        bias = None if self.bias is None else local(self.bias)
        own: Tensor = convolve(input, local(self.weight), bias, self.stride, padding, self.dilation, groups)
        return gather(own, 1, self.out_channels, self.axis) if self.gathers else own


class ChannelConv1d(_ChannelConv, nn.Conv1d):
    """One dimension."""


class ChannelConv2d(_ChannelConv, nn.Conv2d):
    """Two dimensions."""


class ChannelConv3d(_ChannelConv, nn.Conv3d):
    """Three dimensions."""


_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CHANNEL_CONVS: dict[type[nn.Module], type[_ChannelConv]] = {
    nn.Conv1d: ChannelConv1d,
    nn.Conv2d: ChannelConv2d,
    nn.Conv3d: ChannelConv3d,
}


def entry_of(layer: _ConvNd, degree: int) -> Entry | None:
    """How a whole input enters the layer if `degree` workers share it; None if they cannot."""
    groups = layer.groups
    if groups == 1:
        return "whole" if everybody_has_some(layer.out_channels, degree) else None
    if groups % degree == 0:
        return "slice"
    if degree % groups == 0 and layer.out_channels % degree == 0:
        return "whole"
    return None


def why_whole(name: str, layer: _ConvNd, degree: int) -> str:
    """The sentence on a layer that `entry_of` finds none for."""
    if layer.groups > 1:
        fits = f"a degree that divides its {layer.groups} groups would do: {degrees_that_fit(layer.groups)}"
    else:
        fits = f"use {degrees_that_fit(layer.out_channels)} workers"
    return (
        f"'{name}' with {layer.out_channels} output channels is not shared by {degree} workers and stays whole on "
        f"each; {fits}."
    )
