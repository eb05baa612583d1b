"""Fine-tunes adapters of low rank (LoRA, by peft) in a small Llama; the model's own weights stay as they are.

python examples/tasks/lora.py
paceline launch -n 2 examples/tasks/lora.py
"""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import paceline


def texts(count: int, seed: int) -> list[torch.Tensor]:
    """Twelve words that count upwards from anywhere."""
    starts = torch.randint(30, (count, 1), generator=torch.Generator().manual_seed(seed))
    return list((torch.arange(12) + starts) % 30)


def loss_fn(model, words):  # type: ignore[no-untyped-def]
    return model(input_ids=words, labels=words).loss  # all texts are equally long: a mean over samples


with paceline.init(global_batch_size=16, epochs=3, seed=0) as run:
    base = LlamaForCausalLM(  # from_pretrained(...) where there is a network
        LlamaConfig(
            vocab_size=30,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    model = get_peft_model(base, LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "lm_head"]))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-2)
    model, optimizer = run.prepare(model, optimizer)
    for batch in run.batches(texts(160, seed=1)):
        loss = run.step(batch, loss_fn)
    if run.rank == 0:
        share = sum(one.numel() for one in trained) / sum(one.numel() for one in base.parameters())
        print(f"loss {float(loss):.4f} with {share:.0%} of the parameters on {run.world_size} workers")
