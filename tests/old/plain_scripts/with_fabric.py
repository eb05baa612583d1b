"""A script of Lightning Fabric."""

import lightning
import torch
from beside import fault, fingerprint, samples_of

fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
fabric.seed_everything(0, verbose=False)
model = torch.nn.Linear(6, 3)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = fabric.setup_dataloaders(torch.utils.data.DataLoader(samples_of(80), batch_size=4, shuffle=True))
for step, (inputs, targets) in enumerate(data):
    fault(step, fabric.global_rank)
    optimizer.zero_grad()
    fabric.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
    optimizer.step()
fabric.barrier()
if fabric.is_global_zero:
    print(type(fabric.strategy.cluster_environment).__name__)
    print("weights", fingerprint(model.module))
