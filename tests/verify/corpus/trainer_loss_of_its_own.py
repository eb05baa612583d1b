import torch.nn.functional as F
import transformers
from shared import Texts, options, padded


class Trainer(transformers.Trainer):
    def compute_loss(self, model, inputs, **_):
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())


transformers.set_seed(0)
config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)
arguments = transformers.TrainingArguments(
    "unused", per_device_train_batch_size=options.batch, max_steps=4, use_cpu=True, report_to=[], save_strategy="no",
    disable_tqdm=True,
)  # fmt: skip
model = transformers.GPT2LMHeadModel(config)
Trainer(model, arguments, train_dataset=Texts(), data_collator=padded).train()
