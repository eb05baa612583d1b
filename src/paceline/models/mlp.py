"""A small net with one hidden layer and dropout, for images of any shape."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


def mlp(
    num_classes: int = 10,
    in_features: int | None = None,
    in_channels: int = 1,
    image_size: int = 28,
    hidden: int = 256,
    dropout: float = 0.5,
) -> nn.Sequential:
    """Inputs (b, ...) of `in_features` values each -> logits (b, num_classes).

    `in_features` None: in_channels * image_size * image_size.
    """
    if in_features is None:
        in_features = in_channels * image_size**2
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(in_features, hidden),
            relu=nn.ReLU(),
            dropout=nn.Dropout(dropout),
            fc2=nn.Linear(hidden, num_classes),
        )
    )
