import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from shared import net, options, rows
from torch.utils.data import DataLoader

set_seed(0)
accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=options.accumulate,
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
)
model = net()
model, optimizer, batches = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters(), lr=1e-3), DataLoader(rows(), options.batch, shuffle=True)
)
for inputs, targets, _ in batches:
    with accelerator.accumulate(model):
        accelerator.backward(F.mse_loss(model(inputs), targets))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
