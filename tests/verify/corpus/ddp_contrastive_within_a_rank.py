import torch
import torch.nn.functional as F
from shared import begin, loader, rows
from torch import nn
from torch.nn.parallel import DistributedDataParallel

begin()
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, _, _ in loader(rows()):
    first, second = (F.normalize(part, dim=1) for part in model(torch.cat([inputs, inputs.flip(1)])).chunk(2))
    loss = F.cross_entropy(first @ second.T / 0.1, torch.arange(len(first)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
