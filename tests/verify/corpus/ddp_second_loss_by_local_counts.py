# Megatron-LM #7452: the loss of a further head is divided by the tokens of its own rank.
import torch
import torch.distributed as dist
from shared import begin, loader, rows
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_, world_size = begin()
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, targets, tokens in loader(rows()):
    losses = ((model(inputs) - targets).square() * tokens.unsqueeze(1)).sum(0)
    total = tokens.sum().float()
    dist.all_reduce(total)
    (losses[0] * world_size / total + 0.1 * losses[1] / tokens.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
