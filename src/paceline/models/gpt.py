"""A small GPT: Radford et al. 2019, "Language models are unsupervised multitask learners" (GPT-2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import ModelError


class GPT(nn.Module):
    """Predicts each next token from those before it: tokens int64 (b, L) -> logits (b, L, vocab_size).

    L is at most `context`; `width` is the size of a token's vector. One matrix serves as the embedding on the way in
    and the classifier on the way out (Press and Wolf 2017), and is one parameter under one name. Raises `ModelError`
    where `width` does not divide by `num_heads`, or L is more than `context`.
    """

    _tp_plan: ClassVar[Mapping[str, str]] = {
        "blocks.*.attention.query": "colwise",
        "blocks.*.attention.key": "colwise",
        "blocks.*.attention.value": "colwise",
        "blocks.*.attention.output": "rowwise",
        "blocks.*.mlp.input": "colwise",
        "blocks.*.mlp.output": "rowwise",
    }
    """How tensor parallelism divides it, in the way of transformers."""

    def __init__(
        self,
        vocab_size: int = 256,
        context: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if width % num_heads:
            raise ModelError(
                f"The model 'gpt' cannot be built: model.options.width = {width} should be a multiple of "
                f"model.options.num_heads = {num_heads}."
            )
        self.context = context
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*[Block(width, num_heads, dropout) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(width)
        self._initialize(num_layers)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.context:
            raise ModelError(
                f"The model 'gpt' was given {length} tokens in a row and its context is {self.context}; "
                "raise model.options.context or shorten the sequences."
            )
        positions = torch.arange(length, device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        x = self.norm(self.blocks(x))
        return F.linear(x, self.tokens.weight)

    def _initialize(self, num_layers: int) -> None:
        """GPT-2's start: N(0, 0.02), and less for the layers that write into the residual stream.

        Each of the 2 * num_layers branches adds its variance to the stream, hence 1 / sqrt(2 * num_layers).
        """
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            assert isinstance(block, Block)
            for output in (block.attention.output, block.mlp.output):
                nn.init.normal_(output.weight, std=0.02 / math.sqrt(2 * num_layers))


class Block(nn.Module):
    """Attention and a two-layer net, each normalised before and added after; (b, L, width) -> the same."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = CausalAttention(width, num_heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = FeedForward(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class CausalAttention(nn.Module):
    """Every position gathers from itself and those before it; (b, L, width) -> the same.

    Dropout acts on the result and not on the attention weights, so that all of it stands in an `nn.Dropout`.
    """

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (b, heads, L, head_dim)
            for layer in (self.query, self.key, self.value)
        )
        gathered = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        y: Tensor = self.dropout(self.output(gathered.transpose(1, 2).flatten(-2)))
        return y


class FeedForward(nn.Module):
    """Four times as wide inside; (b, L, width) -> the same."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.input = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.output = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(self.output(self.gelu(self.input(x))))
        return y
