import torch.nn.functional as F
from shared import begin, net, options, rows
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader, DistributedSampler

begin()
model = DistributedDataParallel(net())
optimizer = SGD(model.parameters(), lr=0.1)
dataset, number = rows(), 0
batches = DataLoader(dataset, options.batch // 2, sampler=DistributedSampler(dataset, shuffle=False))
for number, (inputs, targets, _) in enumerate(batches):
    if number % 2 == 0:
        (F.mse_loss(model(inputs), targets) / 2).backward()
        continue
    with model.no_sync():
        (F.mse_loss(model(inputs), targets) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
