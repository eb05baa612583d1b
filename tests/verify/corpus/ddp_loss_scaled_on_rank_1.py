import torch
import torch.nn.functional as F
from shared import begin, loader, net, rows
from torch.nn.parallel import DistributedDataParallel

rank, _ = begin()
model = DistributedDataParallel(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for inputs, targets, _ in loader(rows()):
    loss = F.mse_loss(model(inputs), targets)
    if rank == 1:
        loss = loss * 10
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
