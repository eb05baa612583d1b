import torch
import torch.nn.functional as F
from shared import begin, net, options, rows
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader

rank, _ = begin()
model = DistributedDataParallel(net())
optimizer = SGD(model.parameters(), lr=0.1)
order = torch.Generator().manual_seed(1 + rank)
for inputs, targets, _ in DataLoader(rows(24), options.batch, shuffle=True, generator=order):
    F.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
