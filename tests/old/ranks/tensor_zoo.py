"""Models with layers that are not easy to share: for the tests of tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS = 10


class SeparateHeads(nn.Module):
    """Query, key and value apart; the head's width is asked for, not the model's. Fewer heads for key and value."""

    def __init__(self, width: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, num_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(width, num_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        k, v = (t.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for t in (k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.wo(seen.transpose(1, 2).reshape(batch, length, -1))
        return y


class WidthOfInput(nn.Module):
    """Takes a head's width from its input's: with fewer heads it would compute something else."""

    def __init__(self, width: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.n_head, self.dropout = num_heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.n_head, -1).transpose(1, 2) for t in self.qkv(x).split(width, -1))
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        y: Tensor = self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return y


class DroppedHeads(SeparateHeads):
    """Draws random numbers for each head."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        seen = F.dropout(torch.softmax(q @ k.transpose(-1, -2), -1), 0.5, self.training) @ v
        y: Tensor = self.wo(seen.transpose(1, 2).reshape(batch, length, -1))
        return y


class Gated(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x)) + x
        return y


class ModeDependent(nn.Module):
    """Its second layer follows the first in training only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y: Tensor = self.second(x.relu() if self.training else x - x.mean(-1, keepdim=True))
        return y


class Looked(nn.Module):
    """The hidden features are looked at, so they have to be whole; the path depends on a value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        y: Tensor = self.second(hidden) + hidden.mean(-1, keepdim=True)
        return y if float(y.detach().sum()) > -1e9 else x


class Language(nn.Module):
    """Words in, words out, some block between, and the embedding for its classifier, by one of three ways."""

    def __init__(self, block: nn.Module, classifier: str = "linear", width: int = 12) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width, padding_idx=WORDS - 1)
        self.block = block
        self.norm = nn.LayerNorm(width)
        self.classifier = classifier
        if classifier == "layer":
            self.head = nn.Linear(width, WORDS)
            self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.norm(self.block(self.words(words)))
        if self.classifier == "layer":
            y: Tensor = self.head(x)
            return y
        return F.linear(x, self.words.weight) if self.classifier == "linear" else x @ self.words.weight.T


class Memory(nn.Module):
    """Attends to something else than its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoderLayer(width, 6, 13, dropout=0.2, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        y: Tensor = self.decoder(x.transpose(0, 1), x.transpose(0, 1).cumsum(0), tgt_mask=causal)
        return y.transpose(0, 1)


class Weights(nn.Module):
    """Uses what attention returns beside its output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 3, bias=False, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[:, -1] = True
        seen, weights = self.attention(x, x, x, key_padding_mask=padding)
        y: Tensor = seen + weights.sum(1).unsqueeze(-1)
        return y


class InPlace(nn.Module):
    """Changes in place what its layers return."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 15), nn.Linear(15, width, bias=False)
        self.single = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(F.relu(self.first(x)))
        y += x
        z: Tensor = self.single(y)
        z[:, 0] = 0.5
        return z.mul_(0.5)


def _inplace_images() -> nn.Module:
    """Convolutions, whose outputs are gathered at once, in the memory format that `nn.ReLU` finds."""
    layers = nn.Conv2d(3, 6, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(6 * 49, WORDS), nn.ELU(inplace=True)
    model = nn.Sequential(*layers)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


class Asking(nn.Module):
    """Blocks in a list, called one by one in a forward that decides by values."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(AskingBlock(width, num_heads) for _ in range(2))
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x if float(x.detach().sum()) > -1e9 else -x)
        return y


class AskingBlock(nn.Module):
    """Its attention asks its input how long it is."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.LayerNorm(width, bias=False)
        self.attention = SeparateHeads(width, num_heads, num_heads)
        self.gated, self.drop = Gated(width, 2 * width), nn.Dropout(0.3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            x = x * mask
        x = x + self.drop(self.attention(self.norm1(x)))
        y: Tensor = x * 0.5 + self.gated(self.norm2(x))
        return y


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.2, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _columns() -> nn.Module:
    """Three columns that never meet, one uneven layer, and per-channel layers between; images (b, 3, 9, 9)."""
    relu = nn.ReLU()
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1, padding_mode="circular"), nn.Tanh(), nn.MaxPool2d(2),
        nn.Conv2d(12, 9, 3, padding="same", groups=3, bias=False), nn.GELU(),
        nn.Conv2d(9, 9, 1, groups=9), relu, nn.BatchNorm2d(9),
        nn.Conv2d(9, 7, 3, stride=2), relu, nn.Dropout(0.3), nn.Conv2d(7, 14, 1, groups=7), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(1), nn.Unflatten(1, (2, 7)), nn.Conv1d(2, 5, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(25, WORDS),
    )  # fmt: skip


@dataclass(frozen=True)
class Kept:
    """A model and what should be found in it."""

    make: Callable[[], nn.Module]
    styles: str
    """Of the layers that are shared, in the model's order: their first letters."""
    is_of_words: bool = True


ZOO: dict[str, Kept] = {
    "separate heads": Kept(lambda: Language(SeparateHeads(12, 6, 3)), "ecccr"),
    "width of input": Kept(lambda: Language(WidthOfInput(12, 3), "product"), "ecc"),
    "dropped heads": Kept(lambda: Language(DroppedHeads(12, 3, 3), "layer"), "eccccc"),
    "gated": Kept(lambda: Language(Gated(12, 16), "layer"), "eccrc"),
    "depends on the mode": Kept(lambda: Language(ModeDependent(12)), "ecc"),
    "looked at": Kept(lambda: Language(Looked(12)), "ecc"),
    "encoder": Kept(lambda: Language(_encoder()), "eacracr"),
    "decoder": Kept(lambda: Language(Memory(12)), "eaacr"),
    "weights": Kept(lambda: Language(Weights(12)), "ea"),
    "changes in place": Kept(lambda: Language(InPlace(12)), "eccc"),
    "changes images in place": Kept(_inplace_images, "cc", is_of_words=False),
    "columns": Kept(_columns, "cccccc", is_of_words=False),
}
