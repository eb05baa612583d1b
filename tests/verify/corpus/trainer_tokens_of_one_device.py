import transformers
from shared import Texts, options, padded

transformers.set_seed(0)
config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)
arguments = transformers.TrainingArguments(
    "unused", per_device_train_batch_size=options.batch, max_steps=4, use_cpu=True, report_to=[], save_strategy="no",
    disable_tqdm=True, average_tokens_across_devices=False,
)  # fmt: skip
model = transformers.GPT2LMHeadModel(config)
transformers.Trainer(model, arguments, train_dataset=Texts(), data_collator=padded).train()
