"""Small models that every engine can spread: a few hundred parameters, in layers at which a pipeline can be cut and of
which tensor parallelism can divide two."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, NUM_CLASSES, NUM_TOKENS = 8, 4, 12


class Layers(nn.Module):
    """Four linear layers, with dropout or batch norm between them if wanted."""

    def __init__(self, *, width: int = WIDTH, dropout: float = 0.0, has_norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width) if has_norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.third = nn.Linear(width, width)
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.dropout(self.norm(self.second(self.first(inputs).tanh())))
        logits: Tensor = self.head(self.third(hidden).tanh())
        return logits


class Tied(nn.Module):
    """Next tokens, predicted by the very weights that embed them; of the other layers one is frozen and one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, NUM_TOKENS, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.second(self.first(self.embedding(tokens)).tanh())
        logits: Tensor = self.head(self.third(hidden).tanh())
        return logits


class Skips(Layers):
    """What the first layer gives goes past two of the others, also in another order in memory, and is used behind
    them, where some of it is dropped."""

    def forward(self, inputs: Tensor) -> Tensor:
        early = self.first(inputs).tanh()
        turned = early.unflatten(1, (2, WIDTH // 2)).transpose(1, 2)
        late = self.third(self.second(early).tanh() + early).tanh()
        noisy = F.dropout(turned, 0.5, self.training).flatten(1)
        logits: Tensor = self.head(late * early + noisy)
        return logits


CUTS = ("second", "third", "head")
"""Where stages of `Layers` and `Tied` may begin."""
TENSOR_PLAN = {"first": "colwise", "second": "rowwise"}
"""How tensor parallelism divides them."""


def layers(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Layers(**options)


def tied() -> nn.Module:
    torch.manual_seed(0)
    return Tied()


def skips() -> nn.Module:
    torch.manual_seed(0)
    return Skips()


layers_with_dropout = partial(layers, dropout=0.5)
layers_with_norm = partial(layers, has_norm=True)
layers_with_norm_and_dropout = partial(layers, dropout=0.5, has_norm=True)
