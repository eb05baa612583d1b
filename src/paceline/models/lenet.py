"""LeNet in the modern shape that the multi-GPU chapter of "Dive into Deep Learning" trains, and a smaller net."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from paceline.errors import ModelError


def lenet(num_classes: int = 10, in_channels: int = 1, image_size: int = 28) -> nn.Sequential:
    """Two convolutions and two linear layers: images (b, in_channels, s, s) -> logits (b, num_classes).

    A 28 x 28 image arrives at the first linear layer as 50 x 4 x 4 = 800 features. Raises `ModelError` where the image
    is smaller than 16 x 16 pixels; nothing would be left of it.
    """
    if image_size < 16:
        raise ModelError(
            f"LeNet needs images of at least 16 x 16 pixels, not {image_size} x {image_size}; take the model 'mlp'."
        )
    grid_size = ((image_size - 2) // 2 - 4) // 2
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(in_channels, 20, kernel_size=3),
            relu1=nn.ReLU(),
            pool1=nn.AvgPool2d(2),
            conv2=nn.Conv2d(20, 50, kernel_size=5),
            relu2=nn.ReLU(),
            pool2=nn.AvgPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(50 * grid_size**2, 128),
            relu3=nn.ReLU(),
            fc2=nn.Linear(128, num_classes),
        )
    )


def mlp(
    num_classes: int = 10, in_channels: int = 1, image_size: int = 28, hidden: int = 256, dropout: float = 0.5
) -> nn.Sequential:
    """One hidden layer and dropout: images (b, in_channels, s, s) -> logits (b, num_classes)."""
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(in_channels * image_size**2, hidden),
            relu=nn.ReLU(),
            dropout=nn.Dropout(dropout),
            fc2=nn.Linear(hidden, num_classes),
        )
    )
