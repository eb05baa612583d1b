import torch
import torch.nn.functional as F
from accelerate import Accelerator
from shared import net, options, rows
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, batches, schedule = accelerator.prepare(
    model, optimizer, DataLoader(rows(), options.batch), LambdaLR(optimizer, lambda step: 1 / (1 + step))
)
for inputs, targets, _ in batches:
    accelerator.backward(F.mse_loss(model(inputs), targets))
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
