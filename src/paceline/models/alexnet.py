"""AlexNet in one column or in two.

One: Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks". Two: Krizhevsky, Sutskever and
Hinton 2012, "ImageNet classification with deep convolutional neural networks", without its response normalisation.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

from torch import nn

from paceline.errors import ModelError


def alexnet(
    num_classes: int = 1000,
    in_channels: int = 3,
    image_size: int = 224,
    stem: Literal["imagenet", "cifar"] = "imagenet",
    dropout: float = 0.5,
    num_columns: Literal[1, 2] = 1,
    hidden: int = 4096,
) -> nn.Sequential:
    """Five convolutions and three linear layers: images (b, in_channels, s, s) -> logits (b, num_classes).

    Two columns, once two GPUs, are convolutions in two groups: all but the first, which has the image for its input,
    and the third, where the columns exchange. `hidden` is the width of the linear layers.

    The "imagenet" stem (11 x 11, stride 4) is for images of 224 or 227 pixels, and takes any from 63 up. The
    "cifar" stem (3 x 3, stride 1) keeps small images whole, from 15 pixels up; 32 pixels give the first
    linear layer a 3 x 3 grid. Adaptive pooling brings other sizes to the same grid.

    Raises:
        ModelError: the image is too small for the stem and the three poolings.
    """
    smallest = 63 if stem == "imagenet" else 15
    if image_size < smallest:
        remedy = "set model.options.stem = 'cifar'" if stem == "imagenet" else "take the model 'mlp'"
        raise ModelError(
            f"AlexNet with stem = '{stem}' needs images of at least {smallest} x {smallest} pixels; "
            f"these are {image_size} x {image_size}: {remedy}."
        )
    widths = (64, 192, 384, 256, 256) if num_columns == 1 else (96, 256, 384, 384, 256)
    if stem == "imagenet":
        first, grid_size = nn.Conv2d(in_channels, widths[0], kernel_size=11, stride=4, padding=2), 6
    else:
        first, grid_size = nn.Conv2d(in_channels, widths[0], kernel_size=3, padding=1), 3
    features = nn.Sequential(
        first,
        nn.ReLU(),
        nn.MaxPool2d(kernel_size=3, stride=2),
        nn.Conv2d(widths[0], widths[1], kernel_size=5, padding=2, groups=num_columns),
        nn.ReLU(),
        nn.MaxPool2d(kernel_size=3, stride=2),
        nn.Conv2d(widths[1], widths[2], kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(widths[2], widths[3], kernel_size=3, padding=1, groups=num_columns),
        nn.ReLU(),
        nn.Conv2d(widths[3], widths[4], kernel_size=3, padding=1, groups=num_columns),
        nn.ReLU(),
        nn.MaxPool2d(kernel_size=3, stride=2),
    )
    classifier = nn.Sequential(
        nn.Dropout(dropout),
        nn.Linear(256 * grid_size**2, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, num_classes),
    )
    return nn.Sequential(
        OrderedDict(
            features=features,
            pool=nn.AdaptiveAvgPool2d(grid_size),
            flatten=nn.Flatten(),
            classifier=classifier,
        )
    )
