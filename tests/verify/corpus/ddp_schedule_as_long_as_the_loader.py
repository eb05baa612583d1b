import torch.nn.functional as F
from shared import begin, loader, net, options, rows
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR

begin()
model = DistributedDataParallel(net())
optimizer = SGD(model.parameters(), lr=0.1)
dataset = rows()
schedule = CosineAnnealingLR(optimizer, T_max=len(dataset) // options.batch)
for inputs, targets, _ in loader(dataset):
    F.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
