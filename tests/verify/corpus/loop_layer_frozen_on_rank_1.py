import torch
import torch.distributed as dist
import torch.nn.functional as F
from shared import begin, loader, net, rows

rank, world_size = begin()
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, targets, _ in loader(rows()):
    F.mse_loss(model(inputs), targets).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
    if rank == 1:
        model[0].weight.grad = None
    optimizer.step()
    optimizer.zero_grad()
