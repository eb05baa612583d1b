import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from shared import net, options, rows
from torch.utils.data import DataLoader

set_seed(0)
accelerator = Accelerator(cpu=True)
model = net()
model, optimizer, batches = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(rows(), options.batch, shuffle=True)
)
for inputs, targets, _ in batches:
    accelerator.backward(F.mse_loss(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
