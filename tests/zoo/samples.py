"""Small data sets for the zoo: dictionaries of tensors, with padding, drawn from fixed seeds."""

from __future__ import annotations

from typing import Any

import torch

Samples = list[dict[str, Any]]

NUM_SAMPLES = 20
"""Three global batches of eight samples, the last of them half as long."""
WORDS = 30
PADDING = 0
IGNORED = -100
LENGTH = 8
NUM_CLASSES = 5


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def padded_text(seed: int = 1, length: int = LENGTH) -> Samples:
    """Token sequences of different lengths, padded on the right; labels are the tokens, ignored where padded."""
    draw = _generator(seed)
    samples = []
    for _ in range(NUM_SAMPLES):
        num_tokens = int(torch.randint(3, length + 1, (), generator=draw))
        tokens = torch.randint(3, WORDS, (length,), generator=draw)
        mask = (torch.arange(length) < num_tokens).long()
        samples.append(
            {
                "input_ids": tokens.where(mask == 1, PADDING),
                "attention_mask": mask,
                "labels": tokens.where(mask == 1, IGNORED),
            }
        )
    return samples


def classified_text() -> Samples:
    """As `padded_text`, with one class for each sequence."""
    classes = torch.randint(NUM_CLASSES, (NUM_SAMPLES,), generator=_generator(2))
    return [sample | {"labels": label} for sample, label in zip(padded_text(), classes, strict=True)]


def translated_text() -> Samples:
    """A source and a target, each padded; the decoder sees the target shifted by one."""
    samples = []
    for source, target in zip(padded_text(3), padded_text(4, 6), strict=True):
        shifted = torch.cat([torch.tensor([1]), target["input_ids"][:-1]])
        kept = {name: source[name] for name in ("input_ids", "attention_mask")}
        samples.append(kept | {"decoder_input_ids": shifted, "labels": target["labels"]})
    return samples


def images(channels: int = 3, side: int = 8) -> Samples:
    """Images with one class each, and a mask of the same side with one class for each pixel."""
    draw = _generator(5)
    return [
        {
            "pixel_values": torch.randn(channels, side, side, generator=draw),
            "labels": torch.randint(NUM_CLASSES, (), generator=draw),
            "mask": torch.randint(NUM_CLASSES, (side, side), generator=draw),
        }
        for _ in range(NUM_SAMPLES)
    ]


def captioned_images() -> Samples:
    return [
        {name: text[name] for name in ("input_ids", "attention_mask")} | {"pixel_values": image["pixel_values"]}
        for text, image in zip(padded_text(6), images(), strict=True)
    ]


def spoken_text(num_bins: int = 8, num_frames: int = 24) -> Samples:
    """Spectrograms and their transcripts."""
    draw = _generator(7)
    return [
        {
            "input_features": torch.randn(num_bins, num_frames, generator=draw),
            "decoder_input_ids": sample["decoder_input_ids"],
            "labels": sample["labels"],
        }
        for sample in translated_text()
    ]


def sound_waves(num_values: int = 400) -> Samples:
    draw = _generator(8)
    return [
        {
            "input_values": torch.randn(num_values, generator=draw),
            "labels": torch.randint(NUM_CLASSES, (), generator=draw),
        }
        for _ in range(NUM_SAMPLES)
    ]
