"""Convolutions of which every worker computes its own output channels: 64 channels over 4 devices are 16 on each.

DTensor's own convolution is of no use here: of its placements one computes something else and the others raise.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.conv import _ConvNd

from paceline.parallel.tensor.exchange import Exchange, local_slice


class _ChannelConv(_ConvNd):
    """(b, in_channels, ...) -> (b, own slice of out_channels, ...), or all of them gathered.

    In a grouped convolution a worker needs the input channels of its groups only, or of the one group that it has a
    slice of.
    """

    axis: DeviceMesh
    take_input: Exchange
    give_output: Exchange

    def forward(self, input: Tensor) -> Tensor:
        degree, groups = self.axis.size(), self.groups
        input = self.take_input(input)
        if groups % degree == 0:
            groups //= degree
        elif groups > 1:
            width = self.in_channels // groups
            input = input.narrow(1, self.axis.get_local_rank() * groups // degree * width, width)
            groups = 1
        padding = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = (0,) * len(self.kernel_size)
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(self.kernel_size) - 1]
        bias = None if self.bias is None else local_slice(self.bias)
        return self.give_output(
            convolve(input, local_slice(self.weight), bias, self.stride, padding, self.dilation, groups)
        )


CHANNEL_CONVS: dict[type[nn.Module], type[_ChannelConv]] = {
    kind: type(f"Channel{kind.__name__}", (_ChannelConv, kind), {}) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
}
