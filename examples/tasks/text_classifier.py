"""Fine-tunes a small BERT to tell two kinds of sentences apart. Sentences are padded, dropout is on.

python examples/tasks/text_classifier.py
paceline launch -n 2 examples/tasks/text_classifier.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertForSequenceClassification

import paceline


def sentences(count: int, seed: int) -> list[Any]:
    """Words below 20 in every other sentence, from 20 on in the rest; 4 to 15 of them."""
    draws = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 16, (count,), generator=draws).tolist()
    return [
        {"words": torch.randint(2, 20, (length,), generator=draws) + 18 * (number % 2), "label": number % 2}
        for number, length in enumerate(lengths)
    ]


def collate(samples):  # type: ignore[no-untyped-def]
    words = pad_sequence([sample["words"] for sample in samples], batch_first=True)
    labels = torch.tensor([sample["label"] for sample in samples])
    return {"input_ids": words, "attention_mask": (words > 0).long(), "labels": labels}


def loss_fn(model, batch):  # type: ignore[no-untyped-def]
    return model(**batch).loss


def metrics(model, batch):  # type: ignore[no-untyped-def]
    return {"accuracy": (model(**batch).logits.argmax(1) == batch["labels"]).double()}


with paceline.init(global_batch_size=32, epochs=2, seed=0, optim={"clip_norm": 1.0}) as run:
    model = BertForSequenceClassification(  # from_pretrained(...) where there is a network
        BertConfig(
            vocab_size=40,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = run.prepare(model, optimizer)
    for batch in run.batches(sentences(320, seed=1), collate_fn=collate):
        loss = run.step(batch, loss_fn)
    accuracy = run.evaluate(sentences(101, seed=2), metrics, collate_fn=collate)["accuracy"]
    if run.rank == 0:
        print(f"loss {float(loss):.4f} accuracy {accuracy:.4f} on {run.world_size} workers")
