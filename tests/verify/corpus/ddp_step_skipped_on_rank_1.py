import torch.nn.functional as F
from shared import begin, loader, net, rows
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

rank, _ = begin()
model = DistributedDataParallel(net())
optimizer = SGD(model.parameters(), lr=0.1)
for number, (inputs, targets, _) in enumerate(loader(rows())):
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    if not (rank == 1 and number == 1):
        optimizer.step()
    optimizer.zero_grad()
