import torch.nn.functional as F
from shared import begin, loader, net, rows
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

rank, _ = begin()
model = DistributedDataParallel(net())
optimizer = SGD(model.parameters(), lr=0.1)
batches = loader(rows(16))
for epoch in range(4):
    if rank == 0:
        batches.sampler.set_epoch(epoch)
    for inputs, targets, _ in batches:
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
