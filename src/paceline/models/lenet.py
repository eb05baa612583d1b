"""LeNet in the modern shape that the multi-GPU chapter of "Dive into Deep Learning" trains."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

from torch import nn

from paceline.errors import ModelError


def lenet(
    num_classes: int = 10,
    in_channels: int = 1,
    image_size: int = 28,
    padding: Literal["valid", "same"] | None = None,
) -> nn.Sequential:
    """Two convolutions and two linear layers: images (b, in_channels, s, s) -> logits (b, num_classes).

    Without padding ("valid") a 28 x 28 image arrives at the first linear layer as 50 x 4 x 4 = 800 features.
    With "same" padding the convolutions keep the image's size. None means "valid" where the image is large
    enough for it, at least 16 pixels, and "same" below that, for images such as the 8 x 8 digits.

    Raises:
        ModelError: the image is too small for the two poolings.
    """
    if padding is None:
        padding = "valid" if _grid_size(image_size, "valid") >= 1 else "same"
    grid_size = _grid_size(image_size, padding)
    if grid_size < 1:
        smallest, remedy = (
            (16, "set model.options.padding = 'same'") if padding == "valid" else (4, "take 'mlp'")
        )
        raise ModelError(
            f"LeNet with padding = '{padding}' needs images of at least {smallest} x {smallest} pixels; "
            f"these are {image_size} x {image_size}: {remedy}."
        )
    same = padding == "same"
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(in_channels, 20, kernel_size=3, padding=1 if same else 0),
            relu1=nn.ReLU(),
            pool1=nn.AvgPool2d(2),
            conv2=nn.Conv2d(20, 50, kernel_size=5, padding=2 if same else 0),
            relu2=nn.ReLU(),
            pool2=nn.AvgPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(50 * grid_size**2, 128),
            relu3=nn.ReLU(),
            fc2=nn.Linear(128, num_classes),
        )
    )


def _grid_size(image_size: int, padding: Literal["valid", "same"]) -> int:
    """Side of the feature map after both convolutions and poolings."""
    lost1, lost2 = (2, 4) if padding == "valid" else (0, 0)
    return ((image_size - lost1) // 2 - lost2) // 2
