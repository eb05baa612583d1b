"""A script of the Trainer of transformers."""

import tempfile

import torch
from beside import fault, fingerprint
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed


class Fault(TrainerCallback):
    def on_step_begin(self, arguments, state, *_, **__):
        fault(state.global_step, arguments.process_index)


set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=2))
draws = torch.Generator().manual_seed(7)
tokens = torch.randint(40, (64, 12), generator=draws)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=6,
        per_device_train_batch_size=4,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
        use_cpu=True,
    )
    assert arguments.world_size == 2, arguments.world_size
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model=model, args=arguments, train_dataset=samples, callbacks=[Fault()])
    trainer.train()
if trainer.is_world_process_zero():
    print("weights", fingerprint(model))
