"""Fine-tunes a small GPT-2 on padded texts: the loss is the mean over all valid tokens of the global batch.

python examples/tasks/causal_lm.py
paceline launch -n 2 examples/tasks/causal_lm.py

A mean of the workers' means would weigh the tokens of short texts more, and depend on the number of workers.
"""

from __future__ import annotations

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel

import paceline

IGNORED = -100
"""The label of padding; transformers and cross_entropy leave it out."""


def texts(count: int, seed: int) -> list[torch.Tensor]:
    """Words that count upwards from anywhere, 4 to 15 of them."""
    draws = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 16, (count,), generator=draws).tolist()
    starts = torch.randint(30, (count,), generator=draws).tolist()
    return [(torch.arange(length) + start) % 30 for length, start in zip(lengths, starts, strict=True)]


def collate(samples):  # type: ignore[no-untyped-def]
    words = pad_sequence(samples, batch_first=True)
    labels = pad_sequence(samples, batch_first=True, padding_value=IGNORED)
    return {"input_ids": words, "attention_mask": (labels != IGNORED).long(), "labels": labels}


def loss_fn(model, batch):  # type: ignore[no-untyped-def]
    num_tokens = (batch["labels"][:, 1:] != IGNORED).sum()  # each predicts the next
    return paceline.Mean(model(**batch).loss, weight=num_tokens)


with paceline.init(global_batch_size=16, epochs=3, seed=0) as run:
    model = GPT2LMHeadModel(  # from_pretrained(...) where there is a network
        GPT2Config(vocab_size=30, n_positions=16, n_embd=32, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer = run.prepare(model, optimizer)
    for batch in run.batches(texts(160, seed=1), collate_fn=collate):
        loss = run.step(batch, loss_fn)
    if run.rank == 0:
        print(f"loss {float(loss):.4f} on {run.world_size} workers")
