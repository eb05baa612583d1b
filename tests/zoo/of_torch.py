"""The models of the zoo that torch's own layers are put together to, each with something that is hard to spread."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from tests.zoo.samples import LENGTH, NUM_CLASSES, PADDING, WORDS


class Translator(nn.Module):
    """torch's own Transformer, with padding masks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16, padding_idx=PADDING)
        self.transformer = nn.Transformer(16, 2, 2, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        length = decoder_input_ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).triu(1)
        padding = attention_mask == 0
        hidden = self.transformer(
            self.words(input_ids),
            self.words(decoder_input_ids),
            tgt_mask=causal,
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        logits: Tensor = self.head(hidden)
        return logits


class PackedLSTM(nn.Module):
    """Runs over packed sequences, whose lengths it takes from the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 12)
        self.lstm = nn.LSTM(12, 12, 2, batch_first=True, dropout=0.2, bidirectional=True)
        self.head = nn.Linear(24, NUM_CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        lengths = attention_mask.sum(1).cpu()
        packed = pack_padded_sequence(self.words(input_ids), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=LENGTH)
        logits: Tensor = self.head(hidden.sum(1) / attention_mask.sum(1, keepdim=True))
        return logits


class UNet(nn.Module):
    """Skip connections past two levels; batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = _convolution(3, 8), _convolution(8, 16)
        self.middle = _convolution(16, 16)
        self.up2, self.up1 = _convolution(32, 8), _convolution(16, 8)
        self.drop = nn.Dropout2d(0.1)
        self.head = nn.Conv2d(8, NUM_CLASSES, 1)

    def forward(self, pixel_values: Tensor) -> Tensor:
        first = self.down1(pixel_values)
        second = self.down2(F.max_pool2d(first, 2))
        middle = self.drop(self.middle(F.max_pool2d(second, 2)))
        up = self.up2(torch.cat([F.interpolate(middle, scale_factor=2), second], 1))
        logits: Tensor = self.head(self.up1(torch.cat([F.interpolate(up, scale_factor=2), first], 1)))
        return logits


def _convolution(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


@dataclass
class Decoded:
    """An output that torch knows nothing of."""

    images: Tensor
    divergence: Tensor


class VariationalAutoencoder(nn.Module):
    """Draws its code at random; returns a plain dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(192, 24), nn.GELU(), nn.Linear(24, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 24), nn.GELU(), nn.Linear(24, 192))

    def forward(self, pixel_values: Tensor) -> Decoded:
        mean, log_var = self.encoder(pixel_values).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (log_var / 2).exp()
        divergence = 0.5 * (mean**2 + log_var.exp() - 1 - log_var).sum(1)
        return Decoded(self.decoder(code).view_as(pixel_values), divergence)


class Found:
    """An output of a class of its own, with attributes and no more."""

    def __init__(self, logits: Tensor, features: Tensor) -> None:
        self.logits = logits
        self.inside = {"features": features}


class PlainObjects(nn.Module):
    """Blocks and the model itself return plain objects; the model has parameters of its own, one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(192, 16)
        self.blocks = nn.ModuleList(FoundBlock() for _ in range(2))
        self.head = nn.Linear(16, NUM_CLASSES)
        self.shift = nn.Parameter(torch.zeros(16))
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, pixel_values: Tensor) -> Found:
        hidden = self.stem(pixel_values.flatten(1))
        for block in self.blocks:
            hidden = block(hidden + self.shift).inside["features"]
        return Found(self.head(hidden) * self.temperature.exp(), hidden)


class FoundBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> Found:
        features = hidden + self.inner(hidden).tanh()
        return Found(features.sum(), features)


class SpectralNorm(nn.Module):
    """Every forward pass moves the estimates of each weight's largest singular vectors, which are buffers."""

    def __init__(self) -> None:
        super().__init__()
        normed = nn.utils.parametrizations.spectral_norm
        self.body = nn.Sequential(
            normed(nn.Conv2d(3, 8, 3, stride=2, padding=1)),
            nn.LeakyReLU(0.1),
            normed(nn.Conv2d(8, 8, 3, stride=2, padding=1)),
            nn.Flatten(),
            normed(nn.Linear(32, NUM_CLASSES)),
        )

    def forward(self, pixel_values: Tensor) -> Tensor:
        logits: Tensor = self.body(pixel_values)
        return logits


class MovingAverages(nn.Module):
    """Centres activations by a moving average that every forward pass updates; counts its calls."""

    mean: Tensor
    num_calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(192, 16), nn.Linear(16, NUM_CLASSES)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))

    def forward(self, pixel_values: Tensor) -> Tensor:
        hidden = self.first(pixel_values.flatten(1))
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(hidden.mean(0), 0.2)
                self.num_calls += 1
        logits: Tensor = self.second((hidden - self.mean).tanh())
        return logits


class QuantizedAutoencoder(nn.Module):
    """A VQ-VAE whose codebook is a buffer, moved by the averages of what was assigned to each code."""

    codes: Tensor
    sizes: Tensor
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Conv2d(3, 4, 2, stride=2), nn.ConvTranspose2d(4, 3, 2, stride=2)
        self.register_buffer("codes", torch.randn(6, 4) * 0.3)
        self.register_buffer("sizes", torch.ones(6))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.encoder(pixel_values).permute(0, 2, 3, 1)
        flat = hidden.reshape(-1, 4)
        chosen = torch.cdist(flat.detach(), self.codes).argmin(1)
        found = self.codes[chosen].view_as(hidden)
        if self.training:
            self._move(flat.detach(), F.one_hot(chosen, 6).to(flat.dtype))
        commitment = ((hidden - found) ** 2).mean((1, 2, 3))
        passed = hidden + (found - hidden).detach()
        return self.decoder(passed.permute(0, 3, 1, 2)), commitment

    @torch.no_grad()
    def _move(self, flat: Tensor, assigned: Tensor) -> None:
        self.sizes.lerp_(assigned.sum(0), 0.1)
        self.sums.lerp_(assigned.t() @ flat, 0.1)
        self.codes.copy_(self.sums / self.sizes.clamp(min=1e-3).unsqueeze(1))


class InstanceNorms(nn.Module):
    """Instance norm with running statistics: moved by each pass, by layers that are not batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, NUM_CLASSES),
        )  # fmt: skip

    def forward(self, pixel_values: Tensor) -> Tensor:
        logits: Tensor = self.body(pixel_values)
        return logits


class TiedWords(nn.Module):
    """The embedding is the classifier too."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16, padding_idx=PADDING)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.words(input_ids)))
        return logits


class Checkpointed(nn.Module):
    """Runs its blocks again in backward, with their dropout and their batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1))
            for _ in range(2)
        )
        self.head = nn.Linear(72, NUM_CLASSES)

    def forward(self, pixel_values: Tensor) -> Tensor:
        hidden = self.stem(pixel_values)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        logits: Tensor = self.head(hidden.flatten(1))
        return logits


class PartlyFrozen(nn.Module):
    """A frozen encoder beside a trained one, mixed by a gate; the frozen one's batch norm rests."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.trained = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.gate, self.head = nn.Linear(144, 1), nn.Linear(72, NUM_CLASSES)
        self.frozen.requires_grad_(False)

    def train(self, mode: bool = True) -> PartlyFrozen:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, pixel_values: Tensor) -> Tensor:
        known, learned = self.frozen(pixel_values), self.trained(pixel_values)
        share = self.gate(torch.cat([known, learned], 1)).sigmoid()
        logits: Tensor = self.head(share * known + (1 - share) * learned)
        return logits
