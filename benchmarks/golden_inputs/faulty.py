"""A model that fails on one worker."""

from __future__ import annotations

import os

from torch import Tensor, nn


class Faulty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(28 * 28, 10)

    def forward(self, images: Tensor) -> Tensor:
        if os.environ["RANK"] == "1":
            raise ArithmeticError("this worker cannot count")
        logits: Tensor = self.inner(images.flatten(1))
        return logits
