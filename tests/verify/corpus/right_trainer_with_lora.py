import peft
import transformers
from shared import Texts, options, padded

transformers.set_seed(0)
config = transformers.LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0
)
model = peft.get_peft_model(
    transformers.LlamaForCausalLM(config), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
)
arguments = transformers.TrainingArguments(
    "unused", per_device_train_batch_size=options.batch, max_steps=4, use_cpu=True, report_to=[], save_strategy="no",
    disable_tqdm=True, learning_rate=1e-3,
)  # fmt: skip
transformers.Trainer(model, arguments, train_dataset=Texts(), data_collator=padded).train()
