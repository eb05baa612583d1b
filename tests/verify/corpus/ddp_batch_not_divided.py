import torch.nn.functional as F
from shared import begin, net, rows
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader, DistributedSampler

begin()
model = DistributedDataParallel(net())
optimizer = SGD(model.parameters(), lr=0.1)
dataset = rows(96)
for inputs, targets, _ in DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset)):
    F.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
